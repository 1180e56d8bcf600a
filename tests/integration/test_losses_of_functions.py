"""Losses made of functions of the user's: exact where torch can differentiate them twice, refused by name elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from curvature.losses import exact, propagated
from support.odd.functions import Kinked, Sine, SineByNumpy, SineOfContext, SineWithDetachedGradient, StraightThrough

pytestmark = pytest.mark.fast
N, D = 5, 3


class SineOfContextUnderVmap(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x.cos()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0].detach()


def sine_under_vmap(x: Tensor) -> Tensor:
    return SineOfContextUnderVmap.apply(x)[0]


HIDDEN: dict[str, Any] = {f.__name__: f.apply for f in (Sine, SineByNumpy, SineWithDetachedGradient, SineOfContext)}
HIDDEN["SineOfContextUnderVmap"] = sine_under_vmap
# Losses of a sine f; without their second derivative at the sine, or without that of the sine.
LOSSES = {
    "mean": lambda f: lambda o, y: f(o).mean(),
    "square": lambda f: lambda o, y: (f(o) + y).square().sum(),
    "inside": lambda f: lambda o, y: f(o.square()).sum(),
}
# A function that detaches the gradient that it gets loses nothing where that is constant.
CASES = [(k, f) for k in LOSSES for f in HIDDEN if f != "SineWithDetachedGradient" or k == "square"]
BUILDERS = {
    "gauss_newton @": lambda *a: curvature.gauss_newton(*a) @ torch.ones(15, dtype=a[2][0].dtype),
    "gauss_newton": lambda *a: curvature.gauss_newton(*a).to_dense(),
    "fisher": lambda *a: curvature.fisher(*a).diagonal(),
    "hessian": lambda *a: curvature.hessian(*a) @ torch.ones(15, dtype=a[2][0].dtype),
    "fisher_diagonal": curvature.fisher_diagonal,
    "fisher_blocks": curvature.fisher_blocks,
    "kfac": curvature.kfac,
    "propagated": lambda *a: curvature.kfac(*a, inject=propagated()),
    "ekfac": curvature.ekfac,
}


def data(dtype: torch.dtype = torch.float64) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(3)
    return nn.Linear(4, D, dtype=dtype), torch.randn(N, 4, dtype=dtype), torch.randn(N, D, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize(("loss", "function"), CASES)
def test_losses_whose_second_derivative_torch_loses_are_refused(
    loss: str, function: str, name: str, dtype: torch.dtype
) -> None:
    model, x, y = data(dtype)
    made = LOSSES[loss](HIDDEN[function])
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"\({function}\)"):
            BUILDERS[name](model, made, (x, y))


class Huber(torch.autograd.Function):
    """Of a residual; its second derivative jumps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.where(x.abs() < 1, x.square() / 2, x.abs() - 0.5)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0].clamp(-1, 1)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -0.3 * g


class Clamped(torch.autograd.Function):
    """In NumPy: it is flat or linear, and loses nothing but what it does to the gradient that it gets."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.inside = torch.from_numpy(np.abs(x.detach().numpy()) < 1)
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.inside


class Cubed(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 3 * g * ctx.saved_tensors[0] ** 2


class CubedInSinglePrecision(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x.float() ** 3).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return (3 * g.float() * ctx.saved_tensors[0].float() ** 2).to(g.dtype)


class OwnPerceptual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(D, 4)

    def forward(self, o: Tensor, y: Tensor) -> Tensor:
        return Cubed.apply(self.features(o) - self.features(y)).square().mean()


FINE = {
    "relu": lambda o, y: Kinked.apply(o * y).square().mean(),
    "hinge": lambda o, y: Kinked.apply(1 - o * y.sign()).mean(),
    "huber": lambda o, y: Huber.apply(o - y).mean(),
    "huber with all inside": lambda o, y: Huber.apply(0.01 * (o - y)).sum(),
    "clamped": lambda o, y: (Clamped.apply(o) - y).square().mean(),
    "straight-through": lambda o, y: (StraightThrough.apply(o) - y).square().mean(),
    "reversed": lambda o, y: (Reversed.apply(o) - y).square().mean() + o.exp().sum(1).mean(),
    "cubed": lambda o, y: Cubed.apply(o - y).square().mean(),
    "cubed in a sum": lambda o, y: Cubed.apply(o).sum(),
    "in single precision": lambda o, y: CubedInSinglePrecision.apply(o - y).sum(),
    "sine": lambda o, y: SineWithDetachedGradient.apply(o.square()).mean(),
    "linear": lambda o, y: (Kinked.apply(o) * y).mean(),
}


def expected_gauss_newton(model: nn.Linear, loss: Any, x: Tensor, y: Tensor) -> Tensor:
    """With J and H by plain autograd, sample by sample, as a mean or a sum as the loss is."""
    share = {"huber with all inside": 1.0, "cubed in a sum": 1.0, "in single precision": 1.0}
    total = torch.zeros(15, 15, dtype=torch.float64)
    weight = next((w for k, w in share.items() if FINE.get(k) is loss), 1 / N)
    for n in range(N):
        o = model(x[n : n + 1]).detach()
        H = torch.autograd.functional.hessian(lambda f, n=n: loss(f, y[n : n + 1]), o).reshape(D, D)
        J = torch.cat([torch.kron(torch.eye(D).to(x), x[n]).reshape(D, 12), torch.eye(D).to(x)], 1)
        total += weight * (J.T @ H @ J).double()
    return total.to(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FINE)
def test_losses_of_functions_that_can_be_differentiated_twice(name: str, dtype: torch.dtype) -> None:
    model, x, y = data(dtype)
    for _ in range(2):
        found = curvature.gauss_newton(model, FINE[name], (x, y))
        torch.testing.assert_close(
            found.to_dense(), expected_gauss_newton(model, FINE[name], x, y), rtol=2e-5, atol=1e-5
        )
        curvature.kfac(model, FINE[name], (x, y), inject=exact())


@pytest.mark.parametrize("seed", range(20))
def test_roundings_in_single_precision_are_no_lost_derivative(seed: int) -> None:
    """With one entry, two lengths could agree by chance."""
    torch.manual_seed(seed)
    model, x, y = nn.Linear(4, 1), torch.randn(2, 4), torch.randn(2, 1)
    curvature.gauss_newton(model, FINE["in single precision"], (x, y)).to_dense()


def test_a_loss_with_weights_of_its_own_is_compared_in_double_precision() -> None:
    model, x, y = data(torch.float32)
    loss = OwnPerceptual()
    before = [p.clone() for p in loss.parameters()]
    found = curvature.gauss_newton(model, loss, (x, y)).to_dense()
    torch.testing.assert_close(found, expected_gauss_newton(model, loss, x, y), rtol=2e-5, atol=1e-5)
    assert all(torch.equal(p, b) and p.dtype == torch.float32 for p, b in zip(loss.parameters(), before, strict=True))


def fail(*_: Any) -> Any:
    raise AssertionError


def test_a_comparison_is_made_once_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = data()
    loss = lambda o, y: Cubed.apply(o - y).square().mean()
    curvature.gauss_newton(model, loss, (x, y)).to_dense()
    monkeypatch.setattr("curvature.losses.output_hessian.own_functions", fail)
    curvature.gauss_newton(model, loss, (x, y)).to_dense()
    with pytest.raises(AssertionError):
        curvature.gauss_newton(model, loss, (x[:4], y[:4])).to_dense()


def test_losses_of_torch_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("curvature.losses.output_hessian.own_functions", fail)
    model, x, y = data()
    for loss in (nn.HuberLoss(), nn.SoftMarginLoss(), F.smooth_l1_loss, nn.MSELoss()):
        curvature.gauss_newton(model, loss, (x, y.sign())).to_dense()
