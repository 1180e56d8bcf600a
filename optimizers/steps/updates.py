"""Pure functions of the step: nothing here holds state or sees a model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from curvature.linalg import by_device, stack, widen
from optimizers.steps.stacks import Form, at_least_single, joined, pieces, row_squares, rows_of
from optimizers.steps.step_size import Decision, Look, StepSize, decided

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
    """A step of the parameters, by `take`. Vectors and forms are those of `optimizers.steps.stacks`.

    Parameters and vectors are where their layers are, and all numbers on one device.

    Attributes:
        parameters: of all vectors, layer by layer.
        directions: vectors of descent.
        last: vectors of the last displacements, to be overwritten.
        forms: of the layers in each vector.
        scales: what the directions of the layers (n,) are multiplied by before all else; None: by nothing.
        squares: squared norms of the layers' directions, and of the parameters, where these are shards.
        slopes: inner products of gradient and scaled direction, for each layer.
        rates: lr, a scalar or one for each layer.
        decayed: what weight decay leaves of some parameters, and these.
        tables: parameters whose rows are layers of their own (embeddings): which of all it is, and the number of its
            rows on all processes.
        blocks: number of the block of each layer, where parts of a block have options of their own; cut together.
    """

    parameters: list[Tensor]
    directions: list[Tensor]
    last: list[Tensor]
    forms: list[list[Form]]
    scales: Tensor | None
    squares: tuple[Tensor, Tensor] | None
    slopes: Tensor
    rates: Tensor
    decayed: list[tuple[Tensor, list[Tensor]]]
    tables: list[tuple[int, int]]
    blocks: Tensor | None


class Step(NamedTuple):
    """A step as `make` makes it.

    Attributes:
        look: what decides how far it goes.
        move: of the parameters.
        predicted: energies of the scaled directions, for each layer; None if they are not known layer by layer.
        energies: those of the last displacement, to be overwritten.
    """

    look: Look
    move: Move
    predicted: Tensor | None
    energies: Tensor


def make(step: Step) -> None:
    """Decide how far to go, move the parameters, and keep what is to be known of the displacement."""
    values = step.look.values
    decision = decided(step.look)
    rates, slope = take(step.move, decision)
    is_kept = ~(decision.good | decision.undo)
    place = StepSize._fields.index("slope")
    values[place].copy_(torch.where(is_kept, values[place], slope))
    if step.predicted is not None:
        step.energies.copy_(torch.where(is_kept, step.energies, rates.square() * step.predicted))


def take(move: Move, decision: Decision) -> tuple[Tensor, Tensor]:
    """Decay and move the parameters; the directions become displacements.

    Returns:
        What the scaled direction of each layer was multiplied by, and how steeply the loss falls along all
        displacements together, a scalar.
    """
    good, undo, trust = decision.good, decision.undo, decision.trust
    size = decision.step_size.masked_fill(~good, 0)
    home, rows = size.device, [x for pair in zip(move.directions, move.forms, strict=True) for x in rows_of(*pair)]
    lengths, sizes = move.squares or (row_squares(rows, home), squared_norms(move.parameters, home))
    longest = [trust * _row_sizes(move.parameters[k], sizes[k] / count) for k, count in move.tables]
    sizes = _by_layer(sizes.clamp(min=1), move.forms)  # so that tensors that start at zero can leave it
    if move.scales is not None:
        lengths = lengths * move.scales.square()
    if move.blocks is not None:
        totals = torch.zeros_like(lengths)
        lengths, sizes = (totals.index_add(0, move.blocks, x.to(totals))[move.blocks] for x in (lengths, sizes))
    cuts = within_trust(size, lengths.sqrt(), sizes.sqrt(), trust)
    rates = cuts * move.rates.to(cuts.dtype)
    factors = -rates if move.scales is None else -rates * move.scales
    for kept, parameters in move.decayed:
        left = torch.where(good, kept, 1)
        for own in by_device(parameters):
            torch._foreach_mul_(own, left.to(own[0]))
    for x, factor in zip(rows, factors.split([len(x) for x in rows]), strict=True):
        x.mul_(factor.to(x.device)[:, None])
    for x in move.directions:
        x.nan_to_num_(0.0, 0.0, 0.0)
    if move.tables:
        displacements = _pieces(move.directions, move.forms)
        for (k, _), length in zip(move.tables, longest, strict=True):
            norms = torch.linalg.vector_norm(displacements[k], dim=1, dtype=length.dtype)
            displacements[k].mul_((length / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1)[:, None])
    # without a step the displacements are zero
    moved = []
    for x, last in zip(move.directions, move.last, strict=True):
        undone, stays = undo.to(x), (~(good | undo)).to(x)
        moved.append(torch.addcmul(x, last, undone, value=-1))
        last.mul_(stays).add_(x)
    torch._foreach_add_(move.parameters, _pieces(moved, move.forms))
    return rates, -(rates * move.slopes).nan_to_num(0.0, 0.0, 0.0).sum()


def _pieces(vectors: list[Tensor], forms: list[list[Form]]) -> list[Tensor]:
    return [x for pair in zip(vectors, forms, strict=True) for x in pieces(*pair)]


def _row_sizes(table: Tensor, square: Tensor) -> Tensor:
    """Norms (rows,) of the rows of a table; of short ones the root of their mean `square`."""
    norms = torch.linalg.vector_norm(table, dim=1, dtype=at_least_single([table]))
    return norms.clamp(min=square.sqrt().to(norms.device))


def _by_layer(numbers: Tensor, forms: list[list[Form]]) -> Tensor:
    """Sums over the parameters of each layer."""
    runs: list[tuple[int, int]] = []  # torch.compile cannot follow itertools.groupby
    for k, n in ((len(form.shapes), form.layers) for own in forms for form in own):
        if runs and runs[-1][0] == k:
            n += runs.pop()[1]
        runs.append((k, n))
    parts = zip(numbers.split([k * n for k, n in runs]), runs, strict=True)
    return joined([x.view(-1, k).sum(1) for x, (k, _) in parts], numbers.device)


def squared_norms(tensors: list[Tensor], home: torch.device) -> Tensor:
    """The squared norm of each tensor (n,), in single precision, on the device `home`."""
    norms = torch._foreach_norm(tensors, 2, at_least_single(tensors))
    return torch.stack([x.to(home) for x in norms]).square().float()


def inner(one: Tensor, other: Tensor) -> Tensor:
    """The inner product of two tensors of one shape, in single precision at least."""
    wide = torch.promote_types(one.dtype, torch.float32)
    return torch.dot(one.to(wide).flatten(), other.to(wide).flatten())


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no entry is infinite or nan."""
    some = [t for t in tensors if t.numel()]
    # sums are quick, but those of finite entries may overflow
    return bool(torch.isfinite(_sums(some)).all()) or bool(all_finite(some))


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """`are_finite` of at least one tensor, as a flag () on the device of the first."""
    return stack(torch.isfinite(t).all() for t in tensors).all()


def finite_value(loss: Tensor, gradients: Iterable[Tensor]) -> float:
    """The loss as a number; nan if it, or an entry of the gradients, is not finite. The host waits once."""
    some = [loss, *(t for t in gradients if t.numel())]
    value, total = torch.stack([widen(loss), _sums(some).sum()]).tolist()
    return value if math.isfinite(total) or are_finite(some) else math.nan


def _sums(tensors: Iterable[Tensor]) -> Tensor:
    return stack(widen(t.sum(dtype=torch.promote_types(t.dtype, torch.float32))) for t in tensors)
