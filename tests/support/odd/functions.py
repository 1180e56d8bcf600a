"""Functions of the user's. Of a sine torch loses the second derivative, and none says that it has one."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0].cos()


class SineByNumpy(Sine):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return torch.from_numpy(g.detach().numpy() * np.cos(ctx.saved_tensors[0].detach().numpy()))


class SineWithDetachedGradient(Sine):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.detach() * ctx.saved_tensors[0].cos()


class SineInGivenMemory(Sine):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return torch.mul(g, ctx.saved_tensors[0].cos(), out=torch.empty_like(g))


class SineOfContext(Sine):
    """What forward keeps in ctx has no graph, and the Hessian stays symmetric."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.cos = x.cos()
        return x.sin()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.cos


class Kinked(torch.autograd.Function):
    twice_differentiable = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.is_positive = x > 0
        return x.relu()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.is_positive


class StraightThrough(torch.autograd.Function):
    """Its gradient is that of another function."""

    twice_differentiable = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g
