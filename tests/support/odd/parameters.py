"""Models whose parameters meet no data, or meet it in unusual ways."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from support.cases.shared import LATE
from support.odd.table import PIXELS, WORDS, C, T, X, changed, classifier, entropy, fit, linear, net, odd, raw


def given(value: Any) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.as_tensor(value, dtype=torch.get_default_dtype()))


# -- no data

odd("parameter_times_constant", raw(lambda m: m.p * C, p=(5,)), lambda m: (m() - 1).square().mean())
odd("parameter_tanh", raw(lambda m: m.p.tanh(), p=(5,)), lambda m: (m() - 0.5).square().sum())
odd("parameter_itself", raw(lambda m: m.p, p=(5,)), lambda m: (m() - C).square().sum())
odd("product_of_parameters", raw(lambda m: m.p @ m.q, p=(4, 2), q=(2, 3)), lambda m: F.mse_loss(m(), T[:4]))
odd("scalar_of_parameters", raw(lambda m: (m.p * C).sum(), p=(5,)), lambda m: (m() - 3).square())
rosenbrock = lambda m: (1 - m.x) ** 2 + 100 * (m.y - m.x**2) ** 2
rosenbrock_chain = lambda m, _: (100 * (m.p[1:] - m.p[:-1] ** 2) ** 2 + (1 - m.p[:-1]) ** 2).sum()


def beale(m: Any) -> Tensor:
    x, y = m.p
    return (1.5 - x + x * y) ** 2 + (2.25 - x + x * y**2) ** 2 + (2.625 - x + x * y**3) ** 2


odd("rosenbrock", raw(rosenbrock, x=given(-1.0), y=given(1.5)), lambda m: m())
odd("rosenbrock_chain", raw(rosenbrock_chain, p=(6,)), lambda m: m(None))
odd("beale", raw(beale, p=given([-2.0, 1.0])), lambda m: m())
odd(
    "quadratic_of_scales",
    raw(lambda m: (m.p**2 * 10.0 ** torch.arange(5, device=X.device)).sum(), p=(5,)),
    lambda m: m(),
)
odd("torch_loss_of_parameters", raw(lambda m: F.mse_loss(m.p, C), p=(5,)), lambda m: m())
odd("saddle", raw(lambda m: m.x**2 - m.y**2 + 0.1 * m.y**4, x=given(1.0), y=given(0.1)), lambda m: m())
odd("absolute_values", raw(lambda m: m.p.abs().sum(), p=(5,)), lambda m: m())
odd("model_never_called", raw(lambda m: m.p, p=(5,)), lambda m: (m.p - C).square().sum())
odd("matrix_exponential", raw(lambda m: X[:, :3] @ torch.matrix_exp(m.p - m.p.T), p=(3, 3)), lambda m: fit(m()))
odd("expanded", raw(lambda m, x: m.p.expand(len(x), 3), p=(3,)), lambda m: fit(m(X)))

# -- scalars, zero-dim and empty tensors

odd("scalar_parameters", raw(lambda m, x: x[:, :3] * m.a + m.b, a=(), b=()), lambda m: fit(m(X)))
odd("scalar_output", raw(lambda m, x: m.net(x).mean(), net=net), lambda m: (m(X) - 1).square())
odd("scalars_added_up", raw(lambda m, x: m.a * x.mean() + m.b, a=(), b=()), lambda m: (m(X) - 1).square())
classifier("empty_parameter", raw(lambda m, x: m.net(x) + m.p.sum(), net=net, p=(0, 3)))
classifier("empty_layer", raw(lambda m, x: torch.cat([m.net(x), m.none(x)], 1), net=net, none=linear(6, 0)))

# -- weights computed from parameters

exponential = lambda m, x: F.linear(x, m.p.exp())
mixed = lambda m, x: sum(w * layer(x) for w, layer in zip(m.p.softmax(0), (m.one, m.two), strict=True))
cosine = lambda m, x: F.linear(F.normalize(x), F.normalize(m.p)) * m.scale.exp()
hyper = lambda m, x: F.linear(x, m.make(m.z).view(3, 6))
own_weights = lambda m, x: torch.bmm(m.make(x).view(-1, 3, 6), x[..., None])[..., 0]


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


def symmetric(layer: nn.Module) -> None:
    parametrize.register_parametrization(layer, "weight", Symmetric())


for name in ("weight_norm", "spectral_norm"):
    classifier(name, changed(getattr(parametrizations, name)))
    classifier(f"{name}_of_old", changed(getattr(nn.utils, name)))
classifier("orthogonal", changed(parametrizations.orthogonal))
classifier("symmetric", changed(symmetric))
odd("exponential_weight", raw(exponential, p=(3, 6)), lambda m: fit(m(X)))
classifier("mixed_by_softmax", raw(mixed, p=(2,), one=net, two=net))
classifier("added_zero_times_sum", raw(lambda m, x: m.net(x) + 0 * m.p.sum(), net=net, p=(4,)))
classifier("cosine_classifier", raw(cosine, p=(3, 6), scale=()))
classifier("hypernetwork", raw(hyper, make=linear(4, 18), z=(4,)))
classifier("hypernetwork_of_data", raw(own_weights, make=linear(6, 18)))
odd("indexed", raw(lambda m, x: x @ m.p[[2, 0, 1, 1, 0, 2]], p=(3, 3)), lambda m: fit(m(X)))
odd("masked", raw(lambda m, x: x @ torch.where(m.p > 0, m.p, 0.1 * m.p), p=(6, 3)), lambda m: fit(m(X)))
classifier(
    "low_rank",
    raw(lambda m, x: m.net(x) + x @ (m.a @ m.b), net=lambda: net().requires_grad_(False), a=(6, 2), b=(2, 3)),
)
odd(
    "not_contiguous",
    raw(lambda m, x: F.linear(x, m.p), p=lambda: nn.Parameter(torch.randn(6, 3).T)),
    lambda m: fit(m(X)),
)
last = {"memory_format": torch.channels_last}
classifier(
    "channels_last",
    lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.Flatten()).to(**last),
    lambda m: entropy(m(PIXELS.to(**last))),
)


class Scaled(torch.autograd.Function):
    """A function of torch's engine that nobody knows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor) -> Tensor:
        ctx.save_for_backward(x, p)
        return x * p

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, p = ctx.saved_tensors
        return g * p, (g * x).sum(0)


classifier("own_function", raw(lambda m, x: Scaled.apply(m.net(x), m.p), net=net, p=(3,)))
odd(
    "complex_spectrum",
    raw(lambda m, x: torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(m.p), 6)[:, :3], p=(4, 2)),
    lambda m: fit(m(X)),
)
odd(
    "complex_weight",
    raw(lambda m, x: (x.to(torch.complex64) @ torch.complex(m.a, m.b)).abs(), a=(6, 3), b=(6, 3)),
    lambda m: fit(m(X)),
)


def tied_layers() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3))
    model[2].weight = model[0].weight
    return model


tied_words = raw(lambda m, i: F.linear(m.words(i).mean(1), m.words.weight)[:, :3], words=lambda: nn.Embedding(7, 4))
classifier("tied_layers", tied_layers)
classifier("tied_words", tied_words, lambda m: entropy(m(WORDS)))
for name, build in LATE.items():
    odd(name, build, lambda m: F.mse_loss(m(X[:, :2]), T[:, :2]))
