"""Models that return their loss, or nothing, or much; losses of something else than the output."""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from support.odd.table import NOISE, WORDS, T, X, Y, changed, classifier, entropy, fit, linear, net, odd, raw

by_hand = lambda z, y: (z.logsumexp(1) - z.gather(1, y[:, None])[:, 0]).mean()
squares = lambda z, y: ((z - y) ** 2).mean()

# -- the model returns its loss


def returns(name: str, function: Callable[..., Any], *inputs: Tensor, kind: Any = nn.MSELoss, **parts: Any) -> None:
    """A function of the model, X and Y, which has `net`, if nothing else is said."""
    odd(f"returns_{name}", raw(function, **(parts or {"net": net})), lambda m: m(*(inputs or (X, Y))), kind)


batch_normed = lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
torch_loss = lambda m, x, y: F.cross_entropy(m.net(x), y)
own_loss = lambda m, x, y: by_hand(m.net(x), y)
own_squares = lambda m, x, y: squares(m.net(x), y)
of_words = lambda m, i, y: by_hand(m.head(m.words(i).mean(1)), y)
of_lstm = lambda m, x, y: by_hand(m.head(m.rnn(x.view(12, 3, 2))[0][:, -1]), y)
of_mixture = lambda m, x, y: squares(sum(w * f(x) for w, f in zip(m.p.softmax(0), m.fs, strict=True)), y)
by_width = lambda m, x, y: ((m.net(x) - y) ** 2 / (2 * m.s.exp() ** 2) + m.s).mean()
by_distribution = lambda m, x, y: -torch.distributions.Normal(m.net(x), m.s.exp()).log_prob(y).mean()
returns("torch_loss", torch_loss, kind=nn.CrossEntropyLoss)
returns("own_loss", own_loss)
returns("own_squares", own_squares, X, T)
returns("own_sum", lambda m, x, y: (m.net(x) - y).square().sum(), X, T)
returns("norm", lambda m, x, y: torch.linalg.norm(m.net(x) - y), X, T)
odd("returns_one_entry", raw(lambda m, x, y: own_squares(m, x, y)[None], net=net), lambda m: m(X, T)[0])
returns("loss_and_penalty", lambda m, x, y: own_loss(m, x, y) + 0.01 * sum(p.square().sum() for p in m.parameters()))
with_penalty = lambda m, x, y: torch_loss(m, x, y) + 0.01 * m.net[0].weight.abs().sum()
returns("torch_loss_and_penalty", with_penalty, kind=nn.CrossEntropyLoss)
odd("returns_loss_beside_output", raw(lambda m, x, y: (by_hand(z := m.net(x), y), z), net=net), lambda m: m(X, Y)[0])
of_two = lambda m, x, y, t: {"a": by_hand(m.net(x), y), "b": squares(m.net(x), t)}
odd("returns_losses_in_dict", raw(of_two, net=net), lambda m: sum(m(X, Y, T).values()))
for name in ("weight_norm", "spectral_norm", "orthogonal"):
    returns(f"loss_of_{name}", own_loss, net=changed(getattr(parametrizations, name)))
returns("loss_of_exponential", lambda m, x, y: squares(F.linear(x, m.p.exp()), y), X, T, p=(3, 6))
returns("loss_of_mixture", of_mixture, X, T, p=(2,), fs=lambda: nn.ModuleList([net(), net()]))
returns("loss_and_zero", lambda m, x, y: own_squares(m, x, y) + 0 * m.p.sum(), X, T, net=net, p=(4,))
returns("likelihood_with_width", by_width, X, T, net=net, s=(3,))
returns("likelihood_of_distribution", by_distribution, X, T, net=net, s=())
returns(
    "weighted_losses",
    lambda m, x, y, t: by_hand(z := m.net(x), y) * (-m.s[0]).exp() + squares(z, t) * (-m.s[1]).exp() + m.s.sum(),
    *(X, Y, T),
    **{"net": net, "s": (2,)},
)
returns("own_loss_of_words", of_words, WORDS, Y, words=lambda: nn.Embedding(7, 5), head=linear(5, 3))
returns("own_loss_of_lstm", of_lstm, rnn=lambda: nn.LSTM(2, 4, batch_first=True), head=linear(4, 3))
returns("own_loss_of_batch_norm", own_loss, net=batch_normed)
kept = lambda m: (m(X, Y), m.kept)[1]
classifier("keeps_torch_loss", raw(lambda m, x, y: setattr(m, "kept", torch_loss(m, x, y)), net=net), kept)
odd("keeps_own_loss", raw(lambda m, x, y: setattr(m, "kept", own_loss(m, x, y)), net=net), kept)


def variational(m: Any, x: Tensor) -> Tensor:
    mean, width = m.enter(x).chunk(2, 1)
    back = m.leave(mean + width.exp() * NOISE)
    return (back - x).square().sum(1).mean() + (mean.square() + (2 * width).exp() - 2 * width - 1).sum(1).mean() / 2


def contrastive(m: Any, x: Tensor) -> Tensor:
    """Every sample's loss has all others in it."""
    one, two = F.normalize(m.net(x)), F.normalize(m.net(x + 0.1))
    scores = one @ two.T * m.scale.exp()
    return (scores.logsumexp(1) - scores.diagonal()).mean() + (scores.logsumexp(0) - scores.diagonal()).mean()


odd("variational", raw(variational, enter=linear(6, 4), leave=linear(2, 6)), lambda m: m(X))
odd("contrastive", raw(contrastive, net=net, scale=()), lambda m: m(X))

# -- outputs of all kinds


@dataclass
class Result:
    value: Tensor
    note: str = ""


Pair = namedtuple("Pair", "value rest")

classifier(
    "dict",
    raw(lambda m, x: {"value": m.net(x), "classes": m.net(x).argmax(1), "none": None}, net=net),
    lambda m: entropy(m(X)["value"]),
)
classifier("tuple", raw(lambda m, x: (None, m.net(x), 3), net=net), lambda m: entropy(m(X)[1]))
classifier("named_tuple", raw(lambda m, x: Pair(m.net(x), None), net=net), lambda m: entropy(m(X).value))
classifier("dataclass", raw(lambda m, x: Result(m.net(x)), net=net), lambda m: entropy(m(X).value))
classifier("list_of_rows", raw(lambda m, x: list(m.net(x)), net=net), lambda m: entropy(torch.stack(m(X))))
depths = raw(lambda m, x: [z := m.one(x), m.two(z.tanh())], one=linear(6, 3), two=linear(3, 3))
sizes = raw(lambda m, x: (m.one(x), m.two(x).mean(0)), one=linear(6, 3), two=linear(6, 3))
two_heads = raw(lambda m, x: (m.one(x), m.two(x)), one=linear(6, 3), two=linear(6, 3))
categorical = raw(lambda m, x: torch.distributions.Categorical(logits=m.net(x)), net=net)
of_first = lambda m: entropy(m(X)[0])
odd("list_of_depths", depths, lambda m: sum(map(entropy, m(X))))
classifier("outputs_of_two_sizes", sizes, lambda m: of_first(m) + m(X)[1].square().sum())
classifier("two_heads_of_which_one_trains", two_heads, of_first)
odd("own_class", categorical, lambda m: -m(X).log_prob(Y).mean())
classifier("function", raw(lambda m, x: lambda: m.net(x), net=net), lambda m: entropy(m(X)()))
odd("complex_output", raw(lambda m, x: torch.fft.fft(m.net(x)), net=net), lambda m: m(X).abs().mean())
classifier("whole_numbers_beside", raw(lambda m, x: (m.net(x), torch.arange(5, device=x.device)), net=net), of_first)
odd("log_probabilities", lambda: nn.Sequential(net(), nn.LogSoftmax(1)), lambda m: F.nll_loss(m(X), Y))
classifier(
    "masked_logits",
    raw(lambda m, x: m.net(x).masked_fill(torch.arange(3, device=x.device) > Y.max(), -torch.inf), net=net),
)

# -- losses of other things

keeping = lambda m, x: m.two(setattr(m, "kept", m.one(x).tanh()) or m.kept)
hidden = raw(keeping, one=linear(6, 3), two=linear(3, 3))
odd("sum_of_outputs", lambda: nn.Sequential(net(), nn.Sigmoid()), lambda m: m(X).sum())
odd("mean_of_outputs", lambda: nn.Sequential(net(), nn.Sigmoid()), lambda m: m(X).mean())
odd("hidden_features", hidden, lambda m: (m(X), fit(m.kept))[1])
odd("hidden_beside", hidden, lambda m: entropy(m(X)) + m.kept.square().mean())
classifier("penalty_beside", net, lambda m: entropy(m(X)) + 0.01 * sum(p.square().sum() for p in m.parameters()))
beside = raw(lambda m, x: m.net(x), net=net, s=(2,))
weighted = lambda m: entropy(m(X)) * (-m.s[0]).exp() + fit(m(X)) * (-m.s[1]).exp() + m.s.sum()
classifier("penalty_of_what_is_not_read", beside, lambda m: entropy(m(X)) + m.s.square().sum())
classifier("weights_of_losses_outside", beside, weighted)
classifier("part_of_samples", net, lambda m: F.cross_entropy(m(X)[:5], Y[:5]))
classifier("largest_loss", net, lambda m: F.cross_entropy(m(X), Y, reduction="none").max())
classifier("median_loss", net, lambda m: F.cross_entropy(m(X), Y, reduction="none").median())
odd("policy", net, lambda m: -(m(X).log_softmax(1).gather(1, Y[:, None])[:, 0] * T[:, 0]).mean())
classifier("sum_reduction", net, lambda m: F.cross_entropy(m(X), Y, reduction="sum"))
odd("constant_loss", net, lambda m: 0 * m(X).sum() + 1)
