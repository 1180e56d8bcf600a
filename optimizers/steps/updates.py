"""Pure functions of the step: nothing here holds state or sees a model."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from curvature.linalg import stack, widen

# AdamW's usual learning rate, for which lr=1 stands in weight decay: lr multiplies the step here, and has no unit, so
# that lr * weight_decay would be a thousand times the decay that recipes for AdamW mean.
DECAY_RATE = 1e-3


def kept_by_decay(options: Mapping[str, float]) -> float:
    """What decoupled weight decay leaves of a parameter at a step, given the options of its group."""
    return 1 - DECAY_RATE * options["lr"] * options["weight_decay"]


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
        rates: lr, and the number of parameters in a row that it is for.
        kept: what weight decay leaves of it; None: all.
        layers: how many parameters belong to each layer, in this order.
        step_size, trust: scalars; no layer moves by more than `trust` times its norm.
        good: a flag (); if it is false, nothing moves.
        undo: a flag (); if it is true (and `good` is not), the last displacements are undone.
    """

    parameters: list[Tensor]
    directions: list[Tensor]
    last: list[Tensor | None]
    squares: list[tuple[Tensor, Tensor] | None]
    slopes: list[Tensor]
    rates: list[tuple[Tensor, int]]
    kept: list[Tensor | None]
    layers: list[int]
    step_size: Tensor
    trust: Tensor
    good: Tensor
    undo: Tensor


def take(move: Move) -> Tensor:
    """Decay and move the parameters; the directions become displacements.

    Returns:
        How steeply the loss falls along all displacements together, a scalar.
    """
    size = torch.where(move.good, move.step_size, 0)
    lengths, sizes = _squares(move, move.directions, 0), _squares(move, move.parameters, 1)
    sizes = sizes.clamp(min=1)  # so that tensors that start at zero can leave it
    lengths, sizes = (_by_layer(squares, move.layers).sqrt() for squares in (lengths, sizes))
    cuts = _spread(within_trust(size, lengths, sizes, move.trust), move.layers)
    parts = zip(cuts.split([count for _, count in move.rates]), move.rates, strict=True)
    rates = torch.cat([part * rate.to(part.dtype) for part, (rate, _) in parts])
    for p, kept in zip(move.parameters, move.kept, strict=True):
        if kept is not None:
            p.mul_(torch.where(move.good, kept.to(p.dtype), 1))
    torch._foreach_mul_(move.directions, list(rates.neg().unbind()))
    for displacement in move.directions:
        displacement.nan_to_num_(0.0, 0.0, 0.0)
    torch._foreach_add_(move.parameters, move.directions)
    lasts = [(last, d) for last, d in zip(move.last, move.directions, strict=True) if last is not None]
    if lasts:  # without a step the displacements are zero
        old, new = map(list, zip(*lasts, strict=True))
        moved = [p for p, last in zip(move.parameters, move.last, strict=True) if last is not None]
        torch._foreach_sub_(moved, torch._foreach_mul(old, move.undo.to(old[0].dtype)))
        torch._foreach_mul_(old, (~(move.good | move.undo)).to(old[0].dtype))
        torch._foreach_add_(old, new)
    return -(rates * torch.stack(move.slopes)).nan_to_num(0.0, 0.0, 0.0).sum()


def _squares(move: Move, tensors: list[Tensor], which: int) -> Tensor:
    """Squared norms (n,) of directions (0) or parameters (1)."""
    given = [pair[which] for pair in move.squares if pair is not None]
    if given:
        return torch.stack(given)
    return squared_norms(tensors)


def _by_layer(squares: Tensor, layers: list[int]) -> Tensor:
    """Sums over the parameters of each layer."""
    parts = squares.split([count * number for count, number in _runs(layers)])
    return torch.cat([x.view(-1, count).sum(1) for x, (count, _) in zip(parts, _runs(layers), strict=True)])


def _spread(numbers: Tensor, layers: list[int]) -> Tensor:
    """The number of its layer for each parameter."""
    parts = numbers.split([number for _, number in _runs(layers)])
    return torch.cat([x.repeat_interleave(count) for x, (count, _) in zip(parts, _runs(layers), strict=True)])


def _runs(counts: list[int]) -> list[tuple[int, int]]:
    """Counts, and how often each follows upon itself."""
    return [(count, len(list(same))) for count, same in itertools.groupby(counts)]


def squared_norms(tensors: list[Tensor]) -> Tensor:
    """The squared norm of each tensor (n,), in single precision."""
    wide = functools.reduce(torch.promote_types, [t.dtype for t in tensors], torch.float32)
    return torch.stack(torch._foreach_norm(tensors, 2, wide)).square().float()


def inner(one: Tensor, other: Tensor) -> Tensor:
    """The inner product of two tensors of one shape, in single precision at least."""
    wide = torch.promote_types(one.dtype, torch.float32)
    return torch.dot(one.to(wide).flatten(), other.to(wide).flatten())


def inners(ones: list[Tensor], others: list[Tensor]) -> Tensor:
    """The inner products of pairs of tensors (n,), in single precision."""
    if all(x.dtype == y.dtype == torch.float32 for x, y in zip(ones, others, strict=True)):
        return torch.stack([torch.dot(x.flatten(), y.flatten()) for x, y in zip(ones, others, strict=True)])
    return torch.stack([inner(x, y).float() for x, y in zip(ones, others, strict=True)])


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no entry is infinite or nan."""
    some = [t for t in tensors if t.numel()]
    sums = stack(widen(t.sum(dtype=torch.promote_types(t.dtype, torch.float32))) for t in some)
    # sums are quick, but those of finite entries may overflow
    return bool(torch.isfinite(sums).all()) or bool(stack(torch.isfinite(t).all() for t in some).all())
