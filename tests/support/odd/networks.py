"""Models with unusual inputs, layers, types and passes."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.odd.table import PIXELS, WORDS, T, X, Y, classifier, entropy, linear, net, odd, raw

of_words, of_rows = (lambda m: entropy(m(WORDS))), (lambda m: entropy(m(X.view(12, 3, 2))))
# -- inputs


def classes_last() -> nn.CrossEntropyLoss:
    loss: Any = nn.CrossEntropyLoss()
    loss.class_axis = -1
    return loss


classifier("one_sample_without_axis", net, lambda m: F.cross_entropy(m(X[0]), Y[0]))
classifier(
    "image_without_axis",
    lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(0), nn.Linear(27, 3)),
    lambda m: F.cross_entropy(m(PIXELS[0]), Y[0]),
)
classifier("one_sample", net, lambda m: F.cross_entropy(m(X[:1]), Y[:1]))
classifier("words", lambda: nn.Sequential(nn.Embedding(7, 5), nn.Flatten(), nn.Linear(20, 3)), of_words)
classifier(
    "word_alone",
    lambda: nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 3)),
    lambda m: F.cross_entropy(m(WORDS[0, 0]), Y[0]),
)
classifier(
    "sparse_embedding",
    raw(lambda m, i: m.head(m.words(i).mean(1)), words=lambda: nn.Embedding(7, 5, sparse=True), head=linear(5, 3)),
    of_words,
)
classifier("bag_of_words", lambda: nn.Sequential(nn.EmbeddingBag(7, 5), nn.Linear(5, 3)), of_words)
rated = lambda m, i, j: (m.users(i) * m.items(j)).sum(1) + m.mean
ratings = raw(rated, users=lambda: nn.Embedding(7, 3), items=lambda: nn.Embedding(7, 3), mean=())
odd("ratings", ratings, lambda m: F.mse_loss(m(WORDS[:, 0], WORDS[:, 1]), T[:, 0]))
classifier(
    "keywords", raw(lambda m, x=None, mask=None: m.net(x * mask), net=net), lambda m: entropy(m(x=X, mask=X > 0))
)
classifier("nothing_but_a_number", raw(lambda m, n: m.net(X[:n]), net=net), lambda m: entropy(m(12)))
classifier(
    "graph",
    raw(lambda m, a, x: a @ m.two((a @ m.one(x)).relu()), one=linear(6, 5), two=linear(5, 3)),
    lambda m: entropy(m(torch.eye(12, device=X.device).roll(1, 0).to_sparse(), X)),
)
classifier(
    "time_first",
    raw(lambda m, x: m.head(m.rnn(x)[0][-1]), rnn=lambda: nn.GRU(2, 4), head=linear(4, 3)),
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
    raw(lambda m, x: m.head(m.rnn(x)[1][0][0]), rnn=lambda: nn.LSTM(2, 4, batch_first=True), head=linear(4, 3)),
    of_rows,
)
attend = lambda m, x: m.head(m.mix(x, x, x, need_weights=False)[0].mean(1))
attention = lambda: nn.MultiheadAttention(2, 1, batch_first=True)
encoder = lambda: nn.TransformerEncoderLayer(2, 1, 4, 0.0, batch_first=True)
classifier("attention", raw(attend, mix=attention, head=linear(2, 3)), of_rows)
classifier("transformer", raw(lambda m, x: m.head(m.mix(x).mean(1)), mix=encoder, head=linear(2, 3)), of_rows)
classifier("bilinear", lambda: nn.ModuleList([nn.Bilinear(3, 3, 3)])[0], lambda m: entropy(m(X[:, :3], X[:, 3:])))
classifier("prelu", lambda: nn.Sequential(nn.Linear(6, 5), nn.PReLU(5), nn.Linear(5, 3)))
classifier(
    "transposed_convolution",
    lambda: nn.Sequential(nn.ConvTranspose2d(2, 2, 3, groups=2), nn.Flatten(), nn.Linear(98, 3)),
    lambda m: entropy(m(PIXELS)),
)
bare = lambda m, x: torch.einsum("ni,kio->no", x, m.w) + sum(m.bs)
biases = lambda: nn.ParameterList([torch.zeros(3), torch.ones(3)])
classifier("bare_list_of_weights", raw(bare, w=(2, 6, 3), bs=biases))
odd(
    "many_models_in_one",
    raw(lambda m, x: torch.baddbmm(m.b[:, None], x.expand(4, -1, -1), m.w), w=(4, 6, 3), b=(4, 3)),
    lambda m: sum(map(entropy, m(X))),
)
classifier(
    "one_layer_five_times",
    raw(lambda m, x: m.head([x := m.mix(x).tanh() for _ in range(5)][-1]), mix=linear(6, 6), head=linear(6, 3)),
)
classifier(
    "straight_through",
    raw(lambda m, x: m.head((z := m.enter(x)) + (z.sign() - z).detach()), enter=linear(6, 5), head=linear(5, 3)),
)
classifier("in_place", raw(lambda m, x: m.two(m.one(x).mul_(2).relu_()).add_(1), one=linear(6, 5), two=linear(5, 3)))
odd("shared", raw(lambda m, x: (x @ m.p).tanh() @ m.p.T, p=(6, 4)), lambda m: F.mse_loss(m(X), X))
classifier(
    "frozen_in_part",
    raw(lambda m, x: m.two(m.one(x).tanh()), one=lambda: nn.Linear(6, 5).requires_grad_(False), two=linear(5, 3)),
)
classifier("unused", raw(lambda m, x: m.net(x), net=net, spare=linear(2, 2), p=(3,)))
classifier(
    "scripted_in_part", lambda: nn.Sequential(nn.Linear(6, 5), torch.jit.script(nn.Linear(5, 5)), nn.Linear(5, 3))
)

# -- types

classifier("double", lambda: net().double(), lambda m: entropy(m(X.double())))
classifier("bfloat16", lambda: net().bfloat16(), lambda m: entropy(m(X.bfloat16()).float()))
classifier("float16", lambda: net().half(), lambda m: entropy(m(X.half()).float()))
classifier(
    "mixed_types", raw(lambda m, x: m.two(m.one(x).double()), one=linear(6, 5), two=lambda: nn.Linear(5, 3).double())
)


def autocast(m: nn.Module) -> Tensor:
    with torch.autocast(X.device.type, torch.bfloat16):
        return entropy(m(X))


classifier("autocast", net, autocast)
classifier("compiled", lambda: torch.compile(net(), backend="eager"))

# -- passes

odd("twice", raw(lambda m, x: m.net(x), net=net), lambda m: (m(X) - m(X.flip(0)) - 1).square().mean())
odd("thrice_into_one", net, lambda m: F.triplet_margin_loss(m(X), m(X + 0.1), m(X.flip(0)), margin=5.0))
odd("three_dims_of_one_batch", net, lambda m: entropy(m(X.view(3, 4, 6)).view(12, 3)), classes_last)
classifier("batches_of_two_sizes", net, lambda m: entropy(m(X)) + F.cross_entropy(m(X[:5]), Y[:5]))
classifier("checkpointed", raw(lambda m, x: checkpoint(m.net, x, use_reentrant=False), net=net))
classifier(
    "checkpointed_reentrant",
    raw(lambda m, x: checkpoint(m.net, x, use_reentrant=True), net=net),
    lambda m: entropy(m(X.clone().requires_grad_())),
)
classifier("input_needs_gradient", net, lambda m: entropy(m(X.clone().requires_grad_())))


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
