"""Models that return their loss, or nothing, or much; losses of something else than the output."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from support.cases.case import Raw
from support.odd.table import NOISE, WORDS, T, X, Y, classifier, net, odd

entropy = lambda z: F.cross_entropy(z, Y)
fit = lambda z: F.mse_loss(z, T)
by_hand = lambda z, y: (z.logsumexp(1) - z.gather(1, y[:, None])[:, 0]).mean()
squares = lambda z, y: ((z - y) ** 2).mean()

# -- the model returns its loss

classifier(
    "returns_torch_loss", lambda: Raw(lambda m, x, y: F.cross_entropy(m.net(x), y), net=net()), lambda m: m(X, Y)
)
odd("returns_own_loss", lambda: Raw(lambda m, x, y: by_hand(m.net(x), y), net=net()), lambda m: m(X, Y))
odd("returns_own_squares", lambda: Raw(lambda m, x, y: squares(m.net(x), y), net=net()), lambda m: m(X, T))
odd("returns_own_sum", lambda: Raw(lambda m, x, y: (m.net(x) - y).square().sum(), net=net()), lambda m: m(X, T))
odd("returns_norm", lambda: Raw(lambda m, x, y: torch.linalg.norm(m.net(x) - y), net=net()), lambda m: m(X, T))
odd("returns_one_entry", lambda: Raw(lambda m, x, y: squares(m.net(x), y)[None], net=net()), lambda m: m(X, T)[0])
odd(
    "returns_loss_and_penalty",
    lambda: Raw(lambda m, x, y: by_hand(m.net(x), y) + 0.01 * sum(p.square().sum() for p in m.parameters()), net=net()),
    lambda m: m(X, Y),
)
classifier(
    "returns_torch_loss_and_penalty",
    lambda: Raw(lambda m, x, y: F.cross_entropy(m.net(x), y) + 0.01 * m.net[0].weight.abs().sum(), net=net()),
    lambda m: m(X, Y),
)
odd(
    "returns_loss_beside_output",
    lambda: Raw(lambda m, x, y: (by_hand(z := m.net(x), y), z), net=net()),
    lambda m: m(X, Y)[0],
)
odd(
    "returns_losses_in_dict",
    lambda: Raw(lambda m, x, y, t: {"a": by_hand(m.net(x), y), "b": squares(m.net(x), t)}, net=net()),
    lambda m: sum(m(X, Y, T).values()),
)
odd(
    "returns_loss_of_weight_norm",
    lambda: Raw(
        lambda m, x, y: by_hand(m.net(x), y),
        net=nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 3)),
    ),
    lambda m: m(X, Y),
)
odd(
    "returns_loss_of_spectral_norm",
    lambda: Raw(
        lambda m, x, y: by_hand(m.net(x), y),
        net=nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 3)),
    ),
    lambda m: m(X, Y),
)
odd(
    "returns_loss_of_orthogonal",
    lambda: Raw(
        lambda m, x, y: by_hand(m.net(x), y),
        net=nn.Sequential(parametrizations.orthogonal(nn.Linear(6, 6)), nn.Linear(6, 3)),
    ),
    lambda m: m(X, Y),
)
odd(
    "returns_loss_of_exponential",
    lambda: Raw(lambda m, x, y: squares(F.linear(x, m.p.exp()), y), p=(3, 6)),
    lambda m: m(X, T),
)
odd(
    "returns_loss_of_mixture",
    lambda: Raw(
        lambda m, x, y: squares(sum(w * f(x) for w, f in zip(m.p.softmax(0), m.fs, strict=True)), y),
        p=(2,),
        fs=nn.ModuleList([net(), net()]),
    ),
    lambda m: m(X, T),
)
odd(
    "returns_loss_and_zero",
    lambda: Raw(lambda m, x, y: squares(m.net(x), y) + 0 * m.p.sum(), net=net(), p=(4,)),
    lambda m: m(X, T),
)
odd(
    "returns_likelihood_with_width",
    lambda: Raw(lambda m, x, y: ((m.net(x) - y) ** 2 / (2 * m.s.exp() ** 2) + m.s).mean(), net=net(), s=(3,)),
    lambda m: m(X, T),
)
odd(
    "returns_likelihood_of_distribution",
    lambda: Raw(lambda m, x, y: -torch.distributions.Normal(m.net(x), m.s.exp()).log_prob(y).mean(), net=net(), s=()),
    lambda m: m(X, T),
)
odd(
    "returns_weighted_losses",
    lambda: Raw(
        lambda m, x, y, t: by_hand(z := m.net(x), y) * (-m.s[0]).exp() + squares(z, t) * (-m.s[1]).exp() + m.s.sum(),
        net=net(),
        s=(2,),
    ),
    lambda m: m(X, Y, T),
)
odd(
    "returns_own_loss_of_words",
    lambda: Raw(lambda m, i, y: by_hand(m.head(m.words(i).mean(1)), y), words=nn.Embedding(7, 5), head=nn.Linear(5, 3)),
    lambda m: m(WORDS, Y),
)
odd(
    "returns_own_loss_of_lstm",
    lambda: Raw(
        lambda m, x, y: by_hand(m.head(m.rnn(x)[0][:, -1]), y),
        rnn=nn.LSTM(2, 4, batch_first=True),
        head=nn.Linear(4, 3),
    ),
    lambda m: m(X.view(12, 3, 2), Y),
)
odd(
    "returns_own_loss_of_batch_norm",
    lambda: Raw(
        lambda m, x, y: by_hand(m.net(x), y), net=nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    ),
    lambda m: m(X, Y),
)
classifier(
    "keeps_torch_loss",
    lambda: Raw(lambda m, x, y: setattr(m, "kept", F.cross_entropy(m.net(x), y)), net=net()),
    lambda m: (m(X, Y), m.kept)[1],
)
odd(
    "keeps_own_loss",
    lambda: Raw(lambda m, x, y: setattr(m, "kept", by_hand(m.net(x), y)), net=net()),
    lambda m: (m(X, Y), m.kept)[1],
)


def variational(m: Any, x: Tensor) -> Tensor:
    mean, width = m.enter(x).chunk(2, 1)
    back = m.leave(mean + width.exp() * NOISE)
    return (back - x).square().sum(1).mean() + (mean.square() + (2 * width).exp() - 2 * width - 1).sum(1).mean() / 2


def contrastive(m: Any, x: Tensor) -> Tensor:
    """Every sample's loss has all others in it."""
    one, two = F.normalize(m.net(x)), F.normalize(m.net(x + 0.1))
    scores = one @ two.T * m.scale.exp()
    return (scores.logsumexp(1) - scores.diagonal()).mean() + (scores.logsumexp(0) - scores.diagonal()).mean()


odd("variational", lambda: Raw(variational, enter=nn.Linear(6, 4), leave=nn.Linear(2, 6)), lambda m: m(X))
odd("contrastive", lambda: Raw(contrastive, net=net(), scale=()), lambda m: m(X))

# -- outputs of all kinds


@dataclass
class Result:
    value: Tensor
    note: str = ""


Pair = namedtuple("Pair", "value rest")

classifier(
    "dict",
    lambda: Raw(lambda m, x: {"value": m.net(x), "classes": m.net(x).argmax(1), "none": None}, net=net()),
    lambda m: entropy(m(X)["value"]),
)
classifier("tuple", lambda: Raw(lambda m, x: (None, m.net(x), 3), net=net()), lambda m: entropy(m(X)[1]))
classifier("named_tuple", lambda: Raw(lambda m, x: Pair(m.net(x), None), net=net()), lambda m: entropy(m(X).value))
classifier("dataclass", lambda: Raw(lambda m, x: Result(m.net(x)), net=net()), lambda m: entropy(m(X).value))
classifier("list_of_rows", lambda: Raw(lambda m, x: list(m.net(x)), net=net()), lambda m: entropy(torch.stack(m(X))))
odd(
    "list_of_depths",
    lambda: Raw(lambda m, x: [z := m.one(x), m.two(z.tanh())], one=nn.Linear(6, 3), two=nn.Linear(3, 3)),
    lambda m: sum(map(entropy, m(X))),
)
classifier(
    "outputs_of_two_sizes",
    lambda: Raw(lambda m, x: (m.one(x), m.two(x).mean(0)), one=nn.Linear(6, 3), two=nn.Linear(6, 3)),
    lambda m: entropy(m(X)[0]) + m(X)[1].square().sum(),
)
classifier(
    "two_heads_of_which_one_trains",
    lambda: Raw(lambda m, x: (m.one(x), m.two(x)), one=nn.Linear(6, 3), two=nn.Linear(6, 3)),
    lambda m: entropy(m(X)[0]),
)
odd(
    "own_class",
    lambda: Raw(lambda m, x: torch.distributions.Categorical(logits=m.net(x)), net=net()),
    lambda m: -m(X).log_prob(Y).mean(),
)
classifier("function", lambda: Raw(lambda m, x: lambda: m.net(x), net=net()), lambda m: entropy(m(X)()))
odd("complex_output", lambda: Raw(lambda m, x: torch.fft.fft(m.net(x)), net=net()), lambda m: m(X).abs().mean())
classifier(
    "whole_numbers_beside",
    lambda: Raw(lambda m, x: (m.net(x), torch.arange(5, device=x.device)), net=net()),
    lambda m: entropy(m(X)[0]),
)
odd("log_probabilities", lambda: nn.Sequential(net(), nn.LogSoftmax(1)), lambda m: F.nll_loss(m(X), Y))
classifier(
    "masked_logits",
    lambda: Raw(lambda m, x: m.net(x).masked_fill(torch.arange(3, device=x.device) > Y.max(), -torch.inf), net=net()),
)

# -- losses of other things

expected = lambda m: m.net(X).sum()
hidden = lambda: Raw(
    lambda m, x: m.two(setattr(m, "kept", m.one(x).tanh()) or m.kept), one=nn.Linear(6, 3), two=nn.Linear(3, 3)
)

odd("sum_of_outputs", lambda: nn.Sequential(net(), nn.Sigmoid()), lambda m: m(X).sum())
odd("mean_of_outputs", lambda: nn.Sequential(net(), nn.Sigmoid()), lambda m: m(X).mean())
odd("hidden_features", hidden, lambda m: (m(X), fit(m.kept))[1])
odd("hidden_beside", hidden, lambda m: entropy(m(X)) + m.kept.square().mean())
classifier("penalty_beside", net, lambda m: entropy(m(X)) + 0.01 * sum(p.square().sum() for p in m.parameters()))
classifier(
    "penalty_of_what_is_not_read",
    lambda: Raw(lambda m, x: m.net(x), net=net(), p=(3,)),
    lambda m: entropy(m(X)) + m.p.square().sum(),
)
classifier(
    "weights_of_losses_outside",
    lambda: Raw(lambda m, x: m.net(x), net=net(), s=(2,)),
    lambda m: entropy(m(X)) * (-m.s[0]).exp() + fit(m(X)) * (-m.s[1]).exp() + m.s.sum(),
)
classifier("part_of_samples", net, lambda m: F.cross_entropy(m(X)[:5], Y[:5]))
classifier("largest_loss", net, lambda m: F.cross_entropy(m(X), Y, reduction="none").max())
classifier("median_loss", net, lambda m: F.cross_entropy(m(X), Y, reduction="none").median())
odd("policy", net, lambda m: -(m(X).log_softmax(1).gather(1, Y[:, None])[:, 0] * T[:, 0]).mean())
classifier("sum_reduction", net, lambda m: F.cross_entropy(m(X), Y, reduction="sum"))
odd("constant_loss", net, lambda m: 0 * m(X).sum() + 1)
