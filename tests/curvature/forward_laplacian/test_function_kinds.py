"""Each kind of function: derivatives by the rules against the oracle, and by parameters against differences."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from curvature.recording import warn_once
from support.cases.case import seeded
from support.cases.laplacian import D, N, case
from support.laplacians import check
from support.oracles import laplacian as oracle

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


@pytest.mark.fast
@pytest.mark.parametrize("name", [*UNARY, *POSITIVE, *INSIDE, *OTHERS])
def test_functions_of_entries(name: str, caplog: pytest.LogCaptureFixture):
    """By rules; kernels have wrong third derivatives now and then."""
    warn_once.cache_clear()
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


W = torch.linspace(-1, 1.5, 25).reshape(5, 5).double()
EVEN = torch.arange(5) % 2 == 0
BY_NAME: dict[str, Callable[[Tensor], Tensor]] = {
    "where": lambda h: torch.where(EVEN, other=h.sin(), input=h.exp()),
    "where, all": lambda h: torch.where(other=h.sin(), condition=EVEN, input=h.exp()),
    "matmul": lambda h: torch.matmul(other=h[:, :, None] * h[:, None], input=h.sin()[:, :, None] * W).flatten(1),
    "matmul, a constant": lambda h: torch.matmul(other=W, input=h) + torch.mm(mat2=W, input=h),
    "pow": lambda h: torch.pow(exponent=h, self=2) + torch.pow(exponent=2, input=h) + h.pow(exponent=3),
    "linear": lambda h: F.linear(bias=W[0], weight=W, input=h),
    "others": lambda h: (
        torch.sub(other=h.sin(), input=h) + torch.div(other=h.exp(), input=h) + torch.mul(other=h, input=h)
    ),
}
# what must not go with the derivatives, or has none
HELD: dict[str, Callable[[Tensor], Tensor]] = {
    "differences": lambda h: torch.diff(h.sin(), n=2),
    "differences from constants": lambda h: torch.diff(h, prepend=h.new_ones(len(h), 1), append=h.new_ones(len(h), 2)),
    "differences from others": lambda h: h.sin().diff(dim=1, prepend=h[:, 1:2].exp()),
    "whole numbers": lambda h: h * (3 * h).to(torch.int64) + h * h.type(torch.int32) + h * h.to(torch.bool),
    "the type of whole numbers": lambda h: h * (3 * h).type_as(EVEN.long()) + h * (3 * h).view(torch.int64).sign(),
    "queries that see nothing": lambda h: F.scaled_dot_product_attention(
        h[..., None], h[..., None].sin(), h[..., None], attn_mask=(EVEN[:, None] & EVEN).expand(len(h), 5, 5)
    )[..., 0],
}  # fmt: skip


@pytest.mark.parametrize("name", [*BY_NAME, *HELD])
def test_arguments(name: str, caplog: pytest.LogCaptureFixture):
    warn_once.cache_clear()
    caplog.set_level(logging.INFO, "curvature")
    function = (BY_NAME | HELD)[name]
    with seeded(3):
        first, x, C = nn.Linear(D, 5).double(), torch.randn(N, D).double(), torch.randn(D, D).double()
    model = lambda x: function(first(x))
    for weights in (None, C + C.mT):
        check(model, x, weights)
    u, _, second = curvature.laplacian(model, x)
    torch.testing.assert_close(u, model(x))
    slopes = torch.autograd.grad((u + second).sum(), list(first.parameters()))
    assert all(slope.isfinite().all() for slope in slopes)
    assert not caplog.records


def test_a_result_in_given_memory():
    """Refused as torch refuses it: the derivatives would be lost."""
    with pytest.raises(RuntimeError, match="out=... arguments don't support automatic differentiation"):
        curvature.laplacian(lambda x: torch.exp(x, out=torch.empty(N, D).double()), torch.ones(N, D).double())
