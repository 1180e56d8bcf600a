"""Models with unusual inputs, layers, types and passes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.cases.case import Raw
from support.odd.table import PIXELS, WORDS, T, X, Y, classifier, net, odd

entropy = lambda z: F.cross_entropy(z, Y)
fit = lambda z: F.mse_loss(z, T)

# -- inputs

classifier("one_sample_without_axis", net, lambda m: F.cross_entropy(m(X[0]), Y[0]))
classifier(
    "image_without_axis",
    lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(0), nn.Linear(27, 3)),
    lambda m: F.cross_entropy(m(PIXELS[0]), Y[0]),
)
classifier("one_sample", net, lambda m: F.cross_entropy(m(X[:1]), Y[:1]))
classifier(
    "words", lambda: nn.Sequential(nn.Embedding(7, 5), nn.Flatten(), nn.Linear(20, 3)), lambda m: entropy(m(WORDS))
)
classifier(
    "word_alone",
    lambda: nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 3)),
    lambda m: F.cross_entropy(m(WORDS[0, 0]), Y[0]),
)
classifier(
    "sparse_embedding",
    lambda: Raw(lambda m, i: m.head(m.words(i).mean(1)), words=nn.Embedding(7, 5, sparse=True), head=nn.Linear(5, 3)),
    lambda m: entropy(m(WORDS)),
)
classifier("bag_of_words", lambda: nn.Sequential(nn.EmbeddingBag(7, 5), nn.Linear(5, 3)), lambda m: entropy(m(WORDS)))
odd(
    "ratings",
    lambda: Raw(
        lambda m, i, j: (m.users(i) * m.items(j)).sum(1) + m.mean,
        users=nn.Embedding(7, 3),
        items=nn.Embedding(7, 3),
        mean=(),
    ),
    lambda m: F.mse_loss(m(WORDS[:, 0], WORDS[:, 1]), T[:, 0]),
)
classifier(
    "keywords",
    lambda: Raw(lambda m, x=None, mask=None: m.net(x * mask), net=net()),
    lambda m: entropy(m(x=X, mask=X > 0)),
)
classifier("nothing_but_a_number", lambda: Raw(lambda m, n: m.net(X[:n]), net=net()), lambda m: entropy(m(12)))
classifier(
    "graph",
    lambda: Raw(lambda m, a, x: a @ m.two((a @ m.one(x)).relu()), one=nn.Linear(6, 5), two=nn.Linear(5, 3)),
    lambda m: entropy(m(torch.eye(12, device=X.device).roll(1, 0).to_sparse(), X)),
)
classifier(
    "time_first",
    lambda: Raw(lambda m, x: m.head(m.rnn(x)[0][-1]), rnn=nn.GRU(2, 4), head=nn.Linear(4, 3)),
    lambda m: entropy(m(X.view(12, 3, 2).transpose(0, 1))),
)

# -- layers

classifier(
    "no_affine_norm",
    lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, affine=False), nn.Tanh(), nn.Linear(5, 3)),
)
classifier(
    "batch_norm", lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(inplace=True), nn.Linear(5, 3))
)
classifier("dropout", lambda: nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.3), nn.Linear(5, 3)))
classifier(
    "lstm",
    lambda: Raw(lambda m, x: m.head(m.rnn(x)[1][0][0]), rnn=nn.LSTM(2, 4, batch_first=True), head=nn.Linear(4, 3)),
    lambda m: entropy(m(X.view(12, 3, 2))),
)
classifier(
    "attention",
    lambda: Raw(
        lambda m, x: m.head(m.mix(x, x, x, need_weights=False)[0].mean(1)),
        mix=nn.MultiheadAttention(2, 1, batch_first=True),
        head=nn.Linear(2, 3),
    ),
    lambda m: entropy(m(X.view(12, 3, 2))),
)
classifier(
    "transformer",
    lambda: Raw(
        lambda m, x: m.head(m.mix(x).mean(1)),
        mix=nn.TransformerEncoderLayer(2, 1, 4, 0.0, batch_first=True),
        head=nn.Linear(2, 3),
    ),
    lambda m: entropy(m(X.view(12, 3, 2))),
)
classifier("bilinear", lambda: nn.ModuleList([nn.Bilinear(3, 3, 3)])[0], lambda m: entropy(m(X[:, :3], X[:, 3:])))
classifier("prelu", lambda: nn.Sequential(nn.Linear(6, 5), nn.PReLU(5), nn.Linear(5, 3)))
classifier(
    "transposed_convolution",
    lambda: nn.Sequential(nn.ConvTranspose2d(2, 2, 3, groups=2), nn.Flatten(), nn.Linear(98, 3)),
    lambda m: entropy(m(PIXELS)),
)
classifier(
    "bare_list_of_weights",
    lambda: Raw(
        lambda m, x: torch.einsum("ni,kio->no", x, m.w) + sum(m.bs),
        w=(2, 6, 3),
        bs=nn.ParameterList([torch.zeros(3), torch.ones(3)]),
    ),
)
odd(
    "many_models_in_one",
    lambda: Raw(lambda m, x: torch.baddbmm(m.b[:, None], x.expand(4, -1, -1), m.w), w=(4, 6, 3), b=(4, 3)),
    lambda m: sum(map(entropy, m(X))),
)
classifier(
    "one_layer_five_times",
    lambda: Raw(
        lambda m, x: m.head([x := m.mix(x).tanh() for _ in range(5)][-1]), mix=nn.Linear(6, 6), head=nn.Linear(6, 3)
    ),
)
classifier(
    "straight_through",
    lambda: Raw(
        lambda m, x: m.head((z := m.enter(x)) + (z.sign() - z).detach()), enter=nn.Linear(6, 5), head=nn.Linear(5, 3)
    ),
)
classifier(
    "in_place",
    lambda: Raw(lambda m, x: m.two(m.one(x).mul_(2).relu_()).add_(1), one=nn.Linear(6, 5), two=nn.Linear(5, 3)),
)
odd("shared", lambda: Raw(lambda m, x: (x @ m.p).tanh() @ m.p.T, p=(6, 4)), lambda m: F.mse_loss(m(X), X))
classifier(
    "frozen_in_part",
    lambda: Raw(lambda m, x: m.two(m.one(x).tanh()), one=nn.Linear(6, 5).requires_grad_(False), two=nn.Linear(5, 3)),
)
classifier("unused", lambda: Raw(lambda m, x: m.net(x), net=net(), spare=nn.Linear(2, 2), p=(3,)))
classifier(
    "scripted_in_part", lambda: nn.Sequential(nn.Linear(6, 5), torch.jit.script(nn.Linear(5, 5)), nn.Linear(5, 3))
)

# -- types

classifier("double", lambda: net().double(), lambda m: entropy(m(X.double())))
classifier("bfloat16", lambda: net().bfloat16(), lambda m: entropy(m(X.bfloat16()).float()))
classifier("float16", lambda: net().half(), lambda m: entropy(m(X.half()).float()))
classifier(
    "mixed_types", lambda: Raw(lambda m, x: m.two(m.one(x).double()), one=nn.Linear(6, 5), two=nn.Linear(5, 3).double())
)


def autocast(m: nn.Module) -> Tensor:
    with torch.autocast(X.device.type, torch.bfloat16):
        return entropy(m(X))


classifier("autocast", net, autocast)
classifier("compiled", lambda: torch.compile(net(), backend="eager"))

# -- passes

odd("twice", lambda: Raw(lambda m, x: m.net(x), net=net()), lambda m: (m(X) - m(X.flip(0)) - 1).square().mean())
odd("thrice_into_one", net, lambda m: F.triplet_margin_loss(m(X), m(X + 0.1), m(X.flip(0)), margin=5.0))
classifier("three_dims_of_one_batch", net, lambda m: entropy(m(X.view(3, 4, 6)).view(12, 3)))
classifier("batches_of_two_sizes", net, lambda m: entropy(m(X)) + F.cross_entropy(m(X[:5]), Y[:5]))
classifier("checkpointed", lambda: Raw(lambda m, x: checkpoint(m.net, x, use_reentrant=False), net=net()))
classifier(
    "checkpointed_reentrant",
    lambda: Raw(lambda m, x: checkpoint(m.net, x, use_reentrant=True), net=net()),
    lambda m: entropy(m(X.clone().requires_grad_())),
)
classifier("input_needs_gradient", net, lambda m: entropy(m(X.clone().requires_grad_())))


def game(m: Any) -> Tensor:
    """A judge that tells pictures from those of a maker, both at once."""
    fake = m.maker(X[:, :2])
    return (
        F.softplus(-m.judge(fake)).mean() + F.softplus(m.judge(fake.detach())).mean() + F.softplus(-m.judge(X)).mean()
    )


def smooth(m: nn.Module) -> Tensor:
    """A penalty on the gradient at the input."""
    x = X.clone().requires_grad_()
    z = m(x)
    (g,) = torch.autograd.grad(z.sum(), x, create_graph=True)
    return entropy(z) + g.square().sum(1).mean()


def functional(m: nn.Module) -> Tensor:
    """A step of the inner loop of meta-learning."""
    own = dict(m.named_parameters())
    steps = torch.autograd.grad(entropy(m(X)), list(own.values()), create_graph=True)
    moved = {name: p - 0.1 * g for (name, p), g in zip(own.items(), steps, strict=True)}
    return entropy(torch.func.functional_call(m, moved, X))


odd("penalty_on_input_gradient", net, smooth, closes=False)
odd("meta_learning", net, functional, closes=False)
