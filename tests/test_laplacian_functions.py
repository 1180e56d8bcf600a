"""Each kind of function: derivatives by the rules against the oracle, and by parameters against differences."""

from __future__ import annotations

import logging
from collections.abc import Callable

import oracle_laplacian as oracle
import pytest
import torch
import torch.nn.functional as F
from case import seeded
from cases_laplacian import D, N, case, check
from torch import Tensor, nn

import curvature
from curvature.laplacian import _say

UNARY = [
    "tanh", "sin", "cos", "exp", "sigmoid", "square", "tan", "sinh", "cosh", "atan", "asinh", "exp2", "expm1",
    "erf", "erfc", "sinc", "silu", "softplus", "elu", "selu", "celu", "gelu", "mish", "relu", "relu6", "leaky_relu",
    "hardswish", "hardtanh", "softshrink", "hardshrink", "tanhshrink", "softsign", "logsigmoid", "abs", "neg",
]  # fmt: skip
POSITIVE = ["log", "log1p", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "lgamma", "digamma"]
INSIDE = ["asin", "acos", "atanh", "erfinv"]
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu tanh": lambda h: F.gelu(h, approximate="tanh"),
    "softplus 2": lambda h: F.softplus(h, beta=2.0, threshold=1.0),
    "elu in between": lambda h: F.elu(h, 0.7) + F.celu(h, 1.3) + F.leaky_relu(h, 0.3),
    "powers": lambda h: h**3 + h.pow(2) + (h * h + 1) ** -0.5 + (h * h + 1).pow(h) + 2**h + h.square() ** 0.5,
    "clamp": lambda h: h.clamp(-0.4, 0.6) + h.clamp_min(0.1) + torch.clamp(h, max=h.flip(1)),
    "atan2": lambda h: torch.atan2(h, h.roll(1, 1) + 2) + torch.hypot(h, h.new_ones(5)),
    "maximum": lambda h: torch.maximum(h, h.flip(1)) + torch.minimum(h, h.new_zeros(())),
    "lerp": lambda h: torch.lerp(h, h.sin(), h.cos()) + torch.addcmul(h, h, h.exp(), value=0.3),
    "logaddexp": lambda h: torch.logaddexp(h, h.sin()) + torch.addcdiv(h, h, h.exp() + 1) + torch.xlogy(h, h.exp()),
    "prelu": lambda h: F.prelu(h, h.new_tensor([0.1, 0.2, 0.3, 0.4, 0.5])) + F.prelu(h, h.new_tensor([0.3])),
    "remainder": lambda h: h.remainder(0.7) * h.fmod(0.9) + h.frac() + h.floor() + h.sign() + h.round().detach(),
    "scalars": lambda h: torch.add(h, h.sin(), alpha=3) - torch.sub(h.cos(), h, alpha=0.5) + torch.rsub(h, h.exp()),
    "quotients": lambda h: h / (2 + h * h) + 1 / (h.exp() + 1) + torch.ones(5).double() / (3 + h.sin()) + h / 4,
}  # fmt: skip


def unary(name: str) -> Callable[[Tensor], Tensor]:
    spaces = (torch, F, torch.special)
    function = next(getattr(space, name) for space in spaces if hasattr(space, name))
    shift = {**dict.fromkeys(POSITIVE, lambda h: h * h + 0.3), **dict.fromkeys(INSIDE, lambda h: 0.9 * h.sin())}
    return lambda h: function(shift[name](h) if name in shift else h)


def assert_slope(model: Callable[[Tensor], Tensor], x: Tensor, parameter: Tensor) -> None:
    """The gradient by the parameters, in a random direction, against differences of second derivatives."""
    with seeded(4):
        direction = torch.randn_like(parameter)
    found = torch.autograd.grad(oracle.mixed(curvature.laplacian(model, x)), parameter)[0]
    expected = oracle.difference(lambda: oracle.mixed(oracle.laplacian(model, x)), parameter, direction)
    scale = (found * direction).norm().item()
    torch.testing.assert_close((found * direction).sum(), expected, rtol=1e-6, atol=1e-6 * max(1.0, scale))


@pytest.mark.parametrize("name", [*UNARY, *POSITIVE, *INSIDE, *OTHERS])
def test_functions_of_entries(name: str, caplog: pytest.LogCaptureFixture):
    """By rules; kernels have wrong third derivatives now and then."""
    _say.cache_clear()
    caplog.set_level(logging.INFO, "curvature")
    function = OTHERS.get(name) or unary(name)
    with seeded(3):
        first, x = nn.Linear(D, 5).double(), torch.randn(N, D).double()
    model = lambda x: function(first(x))
    check(model, x)
    assert_slope(model, x, first.weight)
    assert not caplog.records


NORMS = ["layer norm", "rms norm", "group norm", "instance norm", "batch norm"]


@pytest.mark.parametrize("name", [*NORMS, "residual block", "fused attention", "sums", "recurrent", "determinant"])
def test_third_derivatives(name: str):
    model, x = case(name)
    assert_slope(model, x, next(model.parameters()))
