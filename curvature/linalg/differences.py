"""Second derivatives beside differences of gradients.

Differences decide only if gradients are those of the function (not of a straight-through estimator), and if two lengths
give the same: with kinks, or too many digits lost, they do not. Lengths are short, because over a long way the jumps of
many kinks add up to a curvature of their own, so all is to be in double precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from curvature.linalg.devices import cat, stack

STEP = 1e-6  # the shorter length, of the size of the point in units of the direction
ROUGHLY, CLOSELY = 0.02, 1e-4


def hides_second_derivatives(function: Callable[[Tensor], Tensor], point: Tensor, direction: Tensor) -> bool:
    """`contradicts_differences` of a scalar function of a tensor, at a point in double precision."""
    x = point.clone().requires_grad_()
    return contradicts_differences(lambda: function(x), [x], [direction])


def contradicts_differences(
    function: Callable[[], Tensor], leaves: Sequence[Tensor], directions: Sequence[Tensor]
) -> bool:
    """Whether a Hessian's product is not the slope of gradients; `function` is of the leaves, which are then elsewhere.

    The product is that of a scalar function with a direction of each of its leaves.
    """
    product, slope, slopes, size = _product_and_slopes(function, leaves, directions)
    (_, wide), (change, narrow) = slopes(2 * STEP * size), slopes(STEP * size)
    if (change - slope).abs() > ROUGHLY * slope.abs():
        return False
    off = (narrow - product).norm()
    if not (off > ROUGHLY * narrow.norm() and (wide - narrow).norm() < 0.1 * off):
        return False
    _, between = slopes(1.4 * STEP * size)  # of a few entries, rounding errors may be alike once
    return bool((between - narrow).norm() < 0.1 * off)


def agrees_with_differences(
    function: Callable[[], Tensor], leaves: Sequence[Tensor], directions: Sequence[Tensor]
) -> bool:
    """Whether the product is surely the slope of gradients."""
    product, _, slopes, size = _product_and_slopes(function, leaves, directions)
    _, narrow = slopes(STEP * size)
    return bool((narrow - product).norm() <= CLOSELY * narrow.norm())


def _product_and_slopes(
    function: Callable[[], Tensor], leaves: Sequence[Tensor], directions: Sequence[Tensor]
) -> tuple[Tensor, Tensor, Callable[[float], tuple[Tensor, Tensor]], float]:
    """Hessian times direction, the slope along it, both by differences at a length, and the size of the point."""
    differentiate = partial(torch.autograd.grad, inputs=leaves, materialize_grads=True)
    joined = lambda tensors: cat(x.detach().flatten() for x in tensors)
    start = [x.detach().clone() for x in leaves]
    gradients = differentiate(function(), create_graph=True)
    slope = stack((g * v).sum() for g, v in zip(gradients, directions, strict=True)).sum()
    product = joined(differentiate(slope) if slope.requires_grad else map(torch.zeros_like, leaves))
    size = float(joined(start).norm().clamp(min=1.0) / joined(directions).norm())

    def near(length: float) -> tuple[Tensor, Tensor]:
        for x, at, v in zip(leaves, start, directions, strict=True):
            x.data.copy_(at + length * v)
        value = function()
        return value.detach(), joined(differentiate(value))

    def slopes(length: float) -> tuple[Tensor, Tensor]:
        (up, after), (down, before) = near(length), near(-length)
        return (up - down) / (2 * length), (after - before) / (2 * length)

    return product, slope.detach(), slopes, size
