"""Parameters that are transformed, shared, frozen, recomputed or hidden before they reach a layer."""

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from support.cases.case import Case, Raw, both, classes, floats, indices, masks, named, token_loss, tokens


def cases() -> Iterator[Case]:
    yield from transformed_cases()
    yield from shared_cases()
    yield from frozen_cases()
    yield from recomputed_cases()
    yield from input_cases()
    yield from function_cases()
    yield from late_cases()


def old_weight_norm(layer: nn.Module, **options: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer, **options)


class Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).T


def transformed_cases() -> Iterator[Case]:
    for name, wrap in {
        "weight_norm_old": old_weight_norm,
        "weight_norm_old_all": functools.partial(old_weight_norm, dim=None),
        "weight_norm": parametrizations.weight_norm,
        "weight_norm_dim1": functools.partial(parametrizations.weight_norm, dim=1),
        "spectral_norm": lambda layer: parametrizations.spectral_norm(layer).eval(),
        "spectral_norm_old": lambda layer: nn.utils.spectral_norm(layer).eval(),
    }.items():
        yield Case(f"{name}_linear", functools.partial(wrapped_linear, wrap), floats(3, 4))
        yield Case(f"{name}_conv", functools.partial(wrapped_conv, wrap), floats(2, 5, 5))
    orthogonal = lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Tanh())
    yield Case("orthogonal", orthogonal, floats(3, 4))
    yield Case("symmetric", symmetric, floats(3, 4))
    yield Case("masked_weight", masked, floats(3, 4))
    yield Case("masked_conv", masked_conv, floats(2, 7))
    pruned = lambda: nn.Sequential(prune.ln_structured(nn.Linear(4, 3), "weight", 1, n=2, dim=0), nn.Tanh())
    yield Case("pruned", pruned, floats(4))
    yield Case("half_frozen_weight", half_frozen, floats(3, 4))


def wrapped_linear(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(wrap(nn.Linear(4, 5)), nn.Tanh(), wrap(nn.Linear(5, 2)))


def wrapped_conv(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(wrap(nn.Conv2d(2, 4, 3, padding=1)), nn.ReLU(inplace=True), wrap(nn.Conv2d(4, 2, 3, groups=2)))


def symmetric() -> nn.Module:
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return nn.Sequential(layer, nn.Tanh())


def masked() -> nn.Module:
    run = lambda m, x: F.linear(x, m.w * m.mask, m.b).tanh()
    return Raw(run, w=(5, 4), b=(5,), mask=torch.ones(5, 4).tril())


def masked_conv() -> nn.Module:
    run = lambda m, x: F.conv1d(x, m.layer.weight * m.mask, m.layer.bias, padding=1).tanh()
    return Raw(run, layer=nn.Conv1d(2, 4, 3), mask=torch.tensor([1.0, 0.5, 0.0]))


def half_frozen() -> nn.Module:
    run = lambda m, x: F.linear(x, torch.cat([m.fixed.detach(), m.w])).tanh()
    return Raw(run, fixed=torch.randn(2, 4), w=(3, 4))


def shared_cases() -> Iterator[Case]:
    yield Case("called_twice", called_twice, floats(3, 4))
    yield Case("called_twice_other_places", called_on_two, both(floats(3, 4), floats(5, 4)))
    yield Case("called_on_halves", lambda: nn.Sequential(Halves(), nn.Tanh()), floats(6, 4))
    yield Case("called_in_loop", in_loop, floats(4, 5))
    yield Case("conv_called_twice", conv_twice, floats(3, 6))
    yield Case("shared_linear", shared_linear, floats(3, 4))
    yield Case("shared_parameter_other_bias", shared_weight, floats(3, 4))
    for name, decode in {
        "tied_linear": lambda m, h: F.linear(h, m.words.weight),
        "tied_linear_bias": lambda m, h: F.linear(h, m.words.weight, m.bias),
        "tied_matmul": lambda m, h: h @ m.words.weight.T,
        "tied_matmul_transpose": lambda m, h: torch.matmul(h, m.words.weight.transpose(0, 1)),
        "tied_einsum": lambda m, h: torch.einsum("ntd,vd->ntv", h, m.words.weight),
    }.items():
        build = functools.partial(tied, decode, **({"bias": (6,)} if name.endswith("bias") else {}))
        yield Case(name, build, indices(6, 3), token_loss, tokens)
        yield Case(f"{name}_equal_sizes", build, indices(6, 4), token_loss, tokens)
    yield Case("tied_module", tied_module, indices(6, 3), token_loss, tokens)
    yield Case("tied_padding", functools.partial(tied_module, padding_idx=2), indices(6, 5), token_loss, tokens)
    yield Case("tied_autoencoder", tied_autoencoder, floats(5))
    yield Case("embedding_shared_by_two", two_embeddings, both(indices(6, 3), indices(6, 5)))
    yield Case("module_named_twice", named_twice, floats(4))


class Halves(nn.Module):
    """A layer called on the two halves of the places in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.layer(half) for half in x.chunk(2, dim=1)], dim=1)


def called_twice() -> nn.Module:
    return Raw(lambda m, x: m.layer(m.layer(x).tanh()).tanh(), layer=nn.Linear(4, 4))


def called_on_two() -> nn.Module:
    run = lambda m, a, b: m.head(m.layer(a).tanh().sum(1) * m.layer(b).tanh().sum(1))
    return Raw(run, layer=nn.Linear(4, 3), head=nn.Linear(3, 2))


def in_loop() -> nn.Module:
    """A residual block applied three times, as in a deep equilibrium model."""

    def run(m: nn.Module, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + F.relu(m.norm(m.layer(x)), inplace=True)
        return x

    return Raw(run, layer=nn.Linear(5, 5), norm=nn.LayerNorm(5))


def conv_twice() -> nn.Module:
    return Raw(lambda m, x: m.layer(m.layer(x).tanh()[..., ::2]), layer=nn.Conv1d(3, 3, 3, padding=1))


def shared_linear() -> nn.Module:
    one, two = nn.Linear(4, 4), nn.Linear(4, 4)
    two.weight = one.weight
    return nn.Sequential(one, nn.Tanh(), two)


def shared_weight() -> nn.Module:
    run = lambda m, x: F.linear(F.linear(x, m.w, m.a).relu_(), m.w, m.b)
    return Raw(run, w=(4, 4), a=(4,), b=(4,))


def tied(decode: Callable[[nn.Module, Tensor], Tensor], **parts: Any) -> nn.Module:
    run = lambda m, x: decode(m, m.layer(m.words(x)).tanh())
    return Raw(run, words=nn.Embedding(6, 4), layer=nn.Linear(4, 4), **parts)


def tied_module(**options: Any) -> nn.Module:
    model = nn.Sequential(nn.Embedding(6, 4, **options), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 6, bias=False))
    model[3].weight = model[0].weight
    return model


def tied_autoencoder() -> nn.Module:
    return Raw(lambda m, x: F.linear(m.encoder(x).tanh(), m.encoder.weight.T, m.b), encoder=nn.Linear(5, 3), b=(5,))


def two_embeddings() -> nn.Module:
    return Raw(lambda m, a, b: (m.words(a).sum(1) * m.words(b).mean(1)).tanh(), words=nn.Embedding(6, 4))


def named_twice() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.Tanh(), layer)


def frozen_cases() -> Iterator[Case]:
    yield Case("unused_parameter", unused, floats(4))
    yield Case("unused_module", lambda: Raw(lambda m, x: m.a(x), a=nn.Linear(4, 3), b=nn.LSTM(3, 2)), floats(4))
    yield Case("used_without_effect", without_effect, floats(4))
    yield Case("used_detached", used_detached, floats(4))
    yield Case("frozen_parameter", functools.partial(frozen, "0.weight"), floats(4))
    yield Case("frozen_bias", functools.partial(frozen, "0.bias", "2.bias"), floats(4))
    yield Case("frozen_first_layer", functools.partial(frozen, "0.weight", "0.bias"), floats(4))
    yield Case("frozen_middle_layer", functools.partial(frozen, "2.weight", "2.bias"), floats(4))
    yield Case("frozen_last_layer", functools.partial(frozen, "4.weight", "4.bias"), floats(4))
    yield Case("frozen_norm_weight", frozen_norm, floats(3, 4))
    yield Case("frozen_lstm_weight", frozen_lstm, floats(5, 3))


def unused() -> nn.Module:
    return Raw(lambda m, x: m.layer(x).tanh(), layer=nn.Linear(4, 3), spare=(2, 5))


def without_effect() -> nn.Module:
    """The second layer is called, and what it returns is thrown away."""
    return Raw(lambda m, x: (m.layer(x).tanh(), m.spare(x))[0], layer=nn.Linear(4, 3), spare=nn.Linear(4, 2))


def used_detached() -> nn.Module:
    return Raw(lambda m, x: m.layer(x).tanh() + m.teacher(x).detach(), layer=nn.Linear(4, 3), teacher=nn.Linear(4, 3))


def frozen(*names: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def frozen_norm() -> nn.Module:
    norm = nn.LayerNorm(4)
    norm.weight.requires_grad_(False)
    return nn.Sequential(norm, nn.Linear(4, 2), nn.Tanh())


def frozen_lstm() -> nn.Module:
    lstm = nn.LSTM(3, 4, batch_first=True)
    lstm.weight_hh_l0.requires_grad_(False)
    return Raw(lambda m, x: m.lstm(x)[0], lstm=lstm)


def recomputed_cases() -> Iterator[Case]:
    yield Case("checkpoint", recomputed, floats(3, 4))
    yield Case("checkpoint_conv", recomputed_conv, floats(2, 6, 6), nn.CrossEntropyLoss(), classes)
    yield Case("checkpoint_nested", recomputed_twice, floats(3, 4))


def recomputed() -> nn.Module:
    block = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    run = lambda m, x: m.head(x + checkpoint(m.block, m.stem(x), use_reentrant=False))
    return Raw(run, stem=nn.Linear(4, 4), block=block, head=nn.Linear(4, 2))


def recomputed_conv() -> nn.Module:
    block = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(inplace=True), nn.Conv2d(3, 3, 3), nn.ReLU(inplace=True))
    return Raw(lambda m, x: checkpoint(m.block, x, use_reentrant=False).mean((2, 3)), block=block)


def recomputed_twice() -> nn.Module:
    """The same block recomputed at two depths."""

    def run(m: nn.Module, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(m.block, x, use_reentrant=False)
        return x

    return Raw(run, block=nn.Sequential(nn.Linear(4, 4), nn.Tanh()))


def input_cases() -> Iterator[Case]:
    pair = lambda: Raw(lambda m, a, b: m.a(a).tanh() * m.b(b), a=nn.Linear(4, 3), b=nn.Linear(5, 3))
    yield Case("input_tuple", pair, both(floats(4), floats(5)))
    yield Case("input_dict", pair, named(b=floats(5), a=floats(4)))
    yield Case("input_dict_other_values", optioned, lambda n: {"x": torch.randn(n, 4), "scale": 2.0, "mask": None})
    yield Case("input_with_constant", graph, with_adjacency)
    yield Case("input_with_mask", pooled, named(x=floats(5, 4), mask=masks(5)))
    yield Case("input_transposed", lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh()), strided)


def optioned() -> nn.Module:
    return Raw(lambda m, x, scale, mask: m.layer(x if mask is None else x * mask).tanh() * scale, layer=nn.Linear(4, 3))


def graph() -> nn.Module:
    """A graph convolution; the adjacency matrix is the same for every sample."""
    run = lambda m, x, links: m.two(links @ F.relu(m.one(links @ x)))
    return Raw(run, one=nn.Linear(4, 6), two=nn.Linear(6, 2))


def with_adjacency(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 7, 4), torch.rand(7, 7)


def pooled() -> nn.Module:
    run = lambda m, x, mask: m.head((m.layer(x).tanh() * ~mask[..., None]).sum(1) / (~mask).sum(1, keepdim=True))
    return Raw(run, layer=nn.Linear(4, 3), head=nn.Linear(3, 2))


def strided(n: int) -> Tensor:
    return torch.randn(4, 3, n).permute(2, 1, 0)


class Doubled(torch.autograd.Function):
    """y = 2 w x with a backward pass that torch cannot see into."""

    generate_vmap_rule = True
    twice_differentiable = True

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return 2 * w * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return 2 * w * gradient, (2 * x * gradient).sum_to_size(w.shape)


class Step(torch.autograd.Function):
    """Rounds a weight; the gradient passes straight through."""

    generate_vmap_rule = True
    twice_differentiable = True

    @staticmethod
    def forward(w: Tensor) -> Tensor:
        return w.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def function_cases() -> Iterator[Case]:
    yield Case("custom_function", lambda: Raw(lambda m, x: Doubled.apply(x, m.p).tanh(), p=(5,)), floats(3, 5))
    yield Case("custom_function_mixed", with_function, floats(3, 5))
    yield Case("custom_function_on_weight", lambda: Raw(lambda m, x: F.linear(x, Step.apply(m.w)), w=(3, 4)), floats(4))


def with_function() -> nn.Module:
    """A parameter that only the general path explains, between two that have rules."""
    run = lambda m, x: m.two(Doubled.apply(F.relu(m.one(x), inplace=True), m.p))
    return Raw(run, one=nn.Linear(5, 4), p=(4,), two=nn.Linear(4, 2))


# Parameters that meet the batch only after arithmetic of their own: a learnt step size, initial state or time.


def by_time(m: Any, x: Tensor) -> Tensor:
    """The step of an ODE solver is also the time at which the field is evaluated."""
    h = m.t.exp().reshape(1, 1)
    return m.field(torch.cat([x, (h + h).expand(len(x), 1)], 1)) * h


def by_steps(m: Any, x: Tensor) -> Tensor:
    a, b = m.t.exp(), m.t.sin()
    for _ in range(2):
        x = x + a * m.field(torch.cat([x, (a + b).repeat(len(x), 1)], 1)) * b
    return x


def by_embedding(m: Any, x: Tensor) -> Tensor:
    """A network of the time alone, and of the time with each sample."""
    time = m.t.exp().reshape(1, 1)
    first = m.inner(time)
    return m.field(torch.cat([x, time.expand(len(x), 1)], 1)) * first + m.inner(time * x[:, :1])


def by_hidden_state(m: Any, x: Tensor) -> Tensor:
    """A learnt state, which every sample starts from and a sum without samples reads."""
    state = m.t.tanh()
    mixed = state + 2 * state
    return m.field(torch.cat([x, mixed[:, :1].expand(len(x), 1)], 1)) + state + mixed


LATE: dict[str, Callable[[], nn.Module]] = {
    "by_time": lambda: Raw(by_time, field=nn.Linear(3, 2), t=(1,)),
    "by_steps": lambda: Raw(by_steps, field=nn.Linear(3, 2), t=(1,)),
    "by_embedding": lambda: Raw(by_embedding, field=nn.Linear(3, 2), t=(1,), inner=nn.Linear(1, 2)),
    "by_hidden_state": lambda: Raw(by_hidden_state, field=nn.Linear(3, 2), t=(1, 2)),
}


def late_cases() -> Iterator[Case]:
    for name, build in LATE.items():
        yield Case(name, build, floats(2))
