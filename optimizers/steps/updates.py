"""The arithmetic of a step. Nothing here sees a model; what is kept from step to step is changed in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from curvature.linalg import by_device, stack, widen
from optimizers.steps.stacks import Form, at_least_single, joined, pieces, row_norms, rows_of, total
from optimizers.steps.step_size import Decision, Look, decided, keep

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
        size: norm of the parameters, not zero.
        relative: largest length as a fraction of `size`.
    """
    return torch.minimum(step, relative * size / length)


class Move(NamedTuple):
    """A step of the parameters, by `take`. Vectors and forms are those of `optimizers.steps.stacks`.

    Parameters and vectors are where their layers are, and all numbers on one device.

    Attributes:
        parameters: of all vectors, layer by layer.
        directions: vectors of descent.
        last: vectors of the last displacements, to be overwritten.
        forms: of the layers in each vector.
        scales: what the directions of the layers (n,) are multiplied by before all else; None: by nothing.
        norms: of the layers' directions, and of the parameters, where these are shards.
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
    norms: tuple[Tensor, Tensor] | None
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
    decision = decided(step.look)
    rates, slope = take(step.move, decision)
    keep(step.look, decision, slope)
    if step.predicted is not None:
        step.energies.copy_(torch.where(decision.stays, step.energies, rates.square() * step.predicted))


def take(move: Move, decision: Decision) -> tuple[Tensor, Tensor]:
    """Decay and move the parameters; the directions become displacements.

    Returns:
        What the scaled direction of each layer was multiplied by, and how steeply the loss falls along all
        displacements together, a scalar.
    """
    trust, home = decision.trust, decision.trust.device
    rows = [x for pair in zip(move.directions, move.forms, strict=True) for x in rows_of(*pair)]
    lengths, sizes = move.norms or (row_norms(rows, home), tensor_norms(move.parameters, home))
    longest = [trust * _row_sizes(move.parameters[k], sizes[k] / count**0.5) for k, count in move.tables]
    sizes = _by_layer(sizes.clamp(min=1), move.forms)  # so that tensors that start at zero can leave it
    if move.scales is not None:
        lengths = lengths * move.scales
    if move.blocks is not None:
        lengths, sizes = (_together(x, move.blocks) for x in (lengths, sizes))
    rates = within_trust(decision.step_size, lengths, sizes, trust) * move.rates
    falls = -rates
    factors = falls if move.scales is None else falls * move.scales
    for kept, parameters in move.decayed:
        left = torch.where(decision.moves, kept, 1)
        for own in by_device(parameters):
            torch._foreach_mul_(own, left.to(own[0]))
    for x, factor in zip(
        rows, factors.split_with_sizes([form.layers for own in move.forms for form in own]), strict=True
    ):
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
        moved.append(torch.addcmul(x, last, decision.undoes.to(x), value=-1))
        last.mul_(decision.stays.to(x.device)).add_(x)
    torch._foreach_add_(move.parameters, _pieces(moved, move.forms))
    return rates, total((falls * move.slopes).nan_to_num(0.0, 0.0, 0.0))


def _pieces(vectors: list[Tensor], forms: list[list[Form]]) -> list[Tensor]:
    return [x for pair in zip(vectors, forms, strict=True) for x in pieces(*pair)]


def _row_sizes(table: Tensor, mean: Tensor) -> Tensor:
    """Norms (rows,) of the rows of a table; of short ones the root mean square `mean` of all."""
    norms = torch.linalg.vector_norm(table, dim=1, dtype=at_least_single([table]))
    return norms.clamp(min=mean.to(norms.device))


def _together(norms: Tensor, blocks: Tensor) -> Tensor:
    """For each of the norms that of all in its block."""
    squares = norms.square()
    return torch.zeros_like(squares).index_add(0, blocks, squares)[blocks].sqrt()


def _by_layer(norms: Tensor, forms: list[list[Form]]) -> Tensor:
    """Norms of layers, from those of their parameters."""
    runs: list[tuple[int, int]] = []  # torch.compile cannot follow itertools.groupby
    for k, n in ((len(form.shapes), form.layers) for own in forms for form in own):
        if runs and runs[-1][0] == k:
            n += runs.pop()[1]
        runs.append((k, n))
    parts = zip(norms.split_with_sizes([k * n for k, n in runs]), runs, strict=True)
    return joined([torch.linalg.vector_norm(x.view(-1, k), dim=1) for x, (k, _) in parts], norms.device)


def tensor_norms(tensors: list[Tensor], home: torch.device) -> Tensor:
    """The norm of each tensor (n,), in single precision, on the device `home`."""
    norms = torch._foreach_norm(tensors, 2, at_least_single(tensors))
    return torch.stack([x.to(home) for x in norms]).float()


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


def _sums(tensors: Iterable[Tensor]) -> Tensor:
    return stack(widen(t.sum(dtype=torch.promote_types(t.dtype, torch.float32))) for t in tensors)
