"""Losses made of functions of the user's: exact where these say that they have a second derivative, else refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import curvature
from curvature.losses import propagated
from support.odd.functions import Kinked, Sine, SineOfContext, StraightThrough
from support.oracles.brute_force import of_the_batch

pytestmark = [pytest.mark.fast, pytest.mark.usefixtures("double")]


class SineUnderVmap(torch.autograd.Function):
    """Torch makes another function of it."""

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


@torch.library.custom_op("curvature_tests::sine", mutates_args=())
def sine_operator(x: Tensor) -> Tensor:
    return x.sin()


sine_operator.register_autograd(
    lambda ctx, g: g * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
UNDECLARED: dict[str, Any] = {
    "Sine": Sine.apply,
    "SineOfContext": SineOfContext.apply,
    "SineUnderVmap": lambda x: SineUnderVmap.apply(x)[0],
    "GeneratedBackwardFor_curvature_tests_sine_default": sine_operator,
}
BUILDERS = {
    "gauss_newton @": lambda *a: curvature.gauss_newton(*a) @ torch.ones(15),
    "fisher": lambda *a: curvature.fisher(*a).diagonal(),
    "hessian": lambda *a: curvature.hessian(*a) @ torch.ones(15),
    "fisher_blocks": curvature.fisher_blocks,
    "propagated": lambda *a: curvature.kfac(*a, inject=propagated()),
    "ekfac": curvature.ekfac,
}


def data() -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(3)
    return nn.Linear(4, 3), torch.randn(5, 4), torch.randn(5, 3)


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("function", UNDECLARED)
def test_losses_of_functions_that_do_not_say_that_they_have_a_second_derivative(function: str, name: str) -> None:
    model, x, y = data()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"\({function}\).*twice_differentiable = True"):
            BUILDERS[name](model, lambda o, y: (UNDECLARED[function](o) + y).square().mean(), (x, y))


class Huber(torch.autograd.Function):
    """Of a residual; its second derivative jumps."""

    twice_differentiable = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.where(x.abs() < 1, x.square() / 2, x.abs() - 0.5)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0].clamp(-1, 1)


class Clamped(torch.autograd.Function):
    """In NumPy: it is flat or linear, and loses nothing but what it does to the gradient that it gets."""

    twice_differentiable = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.inside = torch.from_numpy(np.abs(x.detach().numpy()) < 1)
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.inside


class Cubed(torch.autograd.Function):
    generate_vmap_rule = True
    twice_differentiable = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 3 * g * ctx.saved_tensors[0] ** 2


DECLARED = {
    "relu": lambda o, y: Kinked.apply(o * y).square().mean(),
    "huber": lambda o, y: Huber.apply(o - y).mean(),
    "clamped": lambda o, y: (Clamped.apply(o) - y).square().mean(),
    "straight-through": lambda o, y: (StraightThrough.apply(o) - y).square().mean(),
    "cubed": lambda o, y: Cubed.apply(o - y).square().mean(),
    "linear": lambda o, y: (Kinked.apply(o) * y).mean(),
}


@pytest.mark.parametrize("name", DECLARED)
def test_losses_of_functions_that_can_be_differentiated_twice(name: str) -> None:
    model, x, y = data()
    expected, _ = of_the_batch(model, DECLARED[name], x, y)
    torch.testing.assert_close(curvature.gauss_newton(model, DECLARED[name], (x, y)).to_dense(), expected)
    curvature.kfac(model, DECLARED[name], (x, y))
