"""Second derivatives beside differences of gradients.

Differences decide only if gradients are those of the function (not of a straight-through estimator), and if two lengths
give the same: with kinks, or too many digits lost, they do not. Lengths are short, because over a long way the jumps of
many kinks add up to a curvature of their own, so all is to be in double precision.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

STEP = 1e-6  # the shorter length, of the size of the point in units of the direction
ROUGHLY = 0.02


def contradicts_differences(
    near: Callable[[float], tuple[Tensor, Tensor]], slope: Tensor, product: Tensor, size: float
) -> bool:
    """Whether a Hessian's product with a direction is not the gradient's slope; `near` gives value and gradient."""

    def slopes(length: float) -> tuple[Tensor, Tensor]:
        (up, after), (down, before) = near(length), near(-length)
        return (up - down) / (2 * length), (after - before) / (2 * length)

    (_, wide), (found, narrow) = slopes(2 * STEP * size), slopes(STEP * size)
    if (found - slope).abs() > ROUGHLY * slope.abs():
        return False
    off = (narrow - product).norm()
    if not (off > ROUGHLY * narrow.norm() and (wide - narrow).norm() < 0.1 * off):
        return False
    _, between = slopes(1.4 * STEP * size)  # of a few entries, rounding errors may be alike once
    return bool((between - narrow).norm() < 0.1 * off)


def hides_second_derivatives(function: Callable[[Tensor], Tensor], point: Tensor, direction: Tensor) -> bool:
    """`contradicts_differences` of a scalar function of a tensor, at a point in double precision."""
    gradient = partial(torch.autograd.grad, materialize_grads=True)

    def near(step: float) -> tuple[Tensor, Tensor]:
        x = (point + step * direction).requires_grad_()
        value = function(x)
        return value.detach(), gradient(value, x)[0].detach()

    x = point.clone().requires_grad_()
    (at,) = gradient(function(x), x, create_graph=True)
    slope = (at * direction).sum()
    product = gradient(slope, x)[0].detach() if slope.requires_grad else torch.zeros_like(x)
    size = float(point.norm().clamp(min=1.0) / direction.norm())
    return contradicts_differences(near, slope.detach(), product, size)
