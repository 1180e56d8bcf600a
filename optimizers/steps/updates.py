"""Pure functions of the step: nothing here holds state or sees a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


def slope_ratio(slope: Tensor, predicted: Tensor) -> Tensor:
    """A look at the last step from its end, between -2 and 1; 0 where the prediction is zero or not finite.

    Along the last displacement the loss fell with slope `predicted` at the start; `slope` is what is left of it now.
    Their ratio is one where the step could have gone on for ever, zero at the minimum along the line, negative beyond.
    """
    ratio = torch.where(predicted != 0, slope / predicted, torch.zeros_like(slope))
    return ratio.nan_to_num(0.0, 0.0, 0.0).clamp(-2, 1)


def adapted_step(step: Tensor, ratio: Tensor, rate: float) -> Tensor:
    """The step size after a look at the last step: ``step * exp(rate * ratio)``."""
    # noise alone can shrink the step without end: it must stay able to grow back
    return (step * (rate * ratio).exp()).clamp(min=1e-20)


def adapted_trust(bound: Tensor, ratio: Tensor, least: float, most: float) -> Tensor:
    """A bound on relative lengths: slowly wider while steps could go on for ever, quickly back to `least` otherwise."""
    return (bound * torch.where(ratio > 0.95, 1.03, 0.8)).clamp(least, most)


def within_trust(step: Tensor, length: Tensor, size: Tensor, relative: Tensor) -> Tensor:
    """The step size, cut back where the step would be longer than a fraction of what it changes.

    Args:
        step: step size.
        length: norm of the displacement for step size one.
        size: norm of the parameters.
        relative: largest length as a fraction of `size`.
    """
    return torch.minimum(step, relative * size / length.clamp(min=torch.finfo(step.dtype).tiny))


class Move(NamedTuple):
    """A step of the parameters, by `take`.

    Attributes:
        parameters, directions: those of one layer next to each other; directions are of descent.
        last: where the last displacements are, to be overwritten.
        squares: squared norms of direction and parameter, where these are shards.
        slopes: inner products of gradient and direction.
        rates: lr of each parameter.
        kept: what weight decay leaves of it; None: all.
        layers: how many parameters belong to each layer, in this order.
        step_size, trust: scalars; no layer moves by more than `trust` times its norm.
        good: a flag (); if it is false, nothing moves.
    """

    parameters: list[Tensor]
    directions: list[Tensor]
    last: list[Tensor | None]
    squares: list[tuple[Tensor, Tensor] | None]
    slopes: list[Tensor]
    rates: list[Tensor]
    kept: list[Tensor | None]
    layers: list[int]
    step_size: Tensor
    trust: Tensor
    good: Tensor


def take(move: Move) -> Tensor:
    """Decay and move the parameters; the directions become displacements.

    Returns:
        How steeply the loss falls along all displacements together, a scalar.
    """
    slopes, start = [], 0
    size = torch.where(move.good, move.step_size, 0)
    for count in move.layers:
        layer = range(start, start + count)
        start += count
        squares = [move.squares[k] or (_square(move.directions[k]), _square(move.parameters[k])) for k in layer]
        lengths = [length for length, _ in squares]
        own = [square.clamp(min=1) for _, square in squares]  # so that tensors that start at zero can leave it
        cut = within_trust(size, torch.stack(lengths).sum().sqrt(), torch.stack(own).sum().sqrt(), move.trust)
        for k in layer:
            p, rate = move.parameters[k], cut * move.rates[k].to(cut.dtype)
            if (kept := move.kept[k]) is not None:
                p.mul_(torch.where(move.good, kept.to(p.dtype), 1))
            displacement = move.directions[k].mul_(-rate.to(p.dtype)).nan_to_num_(0.0, 0.0, 0.0)
            p.add_(displacement)
            if (last := move.last[k]) is not None:
                last.copy_(torch.where(move.good, displacement, last))
            slopes.append(rate * move.slopes[k])
    return -torch.stack(slopes).nan_to_num(0.0, 0.0, 0.0).sum()


def _square(x: Tensor) -> Tensor:
    return inner(x, x).float()


def inner(one: Tensor, other: Tensor) -> Tensor:
    """The inner product of two tensors of one shape, in single precision at least."""
    wide = torch.promote_types(one.dtype, torch.float32)
    return torch.dot(one.to(wide).flatten(), other.to(wide).flatten())


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no entry is infinite or nan."""
    some = [t for t in tensors if t.numel()]
    sums = torch.stack([t.sum(dtype=torch.promote_types(t.dtype, torch.float32)).double() for t in some])
    # sums are quick, but those of finite entries may overflow
    return bool(torch.isfinite(sums).all()) or bool(torch.stack([torch.isfinite(t).all() for t in some]).all())
