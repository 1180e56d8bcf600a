"""Inverses of Kronecker-factored blocks, prepared once and applied at every step.

A side is (g, d, d), or its diagonal (g, d); matrices that an inverse is applied to are (g, o, i).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from curvature.kronecker.diagonal_blocks import Cuts, joined, parts_of
from curvature.kronecker.packing import Packed, Side, diagonal_of, whole
from curvature.linalg import (
    LOW_RANK_MIN_SIZE,
    Lazily,
    careful_spd_inverse,
    count_recovery,
    eigenvalues_of,
    is_sketch,
    look,
    low_rank_inverses,
    matmul,
    own_precision,
    psd_eigh,
    psd_eighs,
    sketch_spectrum,
    try_spd_inverse,
)

LOW_RANK_MAX_ASPECT = 16  # a side so many times larger than the other is quick to solve with as it is
JOINED_MAX_SIDE = 512  # rows up to which matrices are inverted together: memory for several of a larger one counts
STACKED_MAX_SIDE = 256  # rows up to which copying inverses costs less than a call for each


@dataclass(frozen=True)
class KroneckerInverse:
    """``rows X columns``, or ``rows ((rows^T X columns) * values) columns^T`` in a basis where `values` are given.

    `shifts` has a number c where a side is V of ``c (I - V V^T)``, V (g, d, r) with orthogonal columns.
    Where `values` (1, r + 1, s + 1) are given for partial bases rows (1, o, r) and columns (1, i, s), the last of each
    axis belongs to all directions outside of them. `cuts` are those of both sides (`curvature.kronecker.cuts_of`).
    """

    rows: Tensor
    columns: Tensor
    values: Tensor | None = None
    shifts: tuple[Tensor | None, Tensor | None] = (None, None)
    cuts: Cuts = ((), ())

    def __call__(self, x: Tensor, own: bool = False) -> Tensor:
        """The product with x, in place if x is our own: allocating memory costs more than arithmetic."""
        cut, other = self.cuts
        with own_precision(x):
            if self.values is None:
                x = _solved(self.rows, self.shifts[0], x, left=True, own=own, cut=cut)
                return _solved(self.columns, self.shifts[1], x, left=False, own=True, cut=other)
            if self.is_partial:
                return _partial(self.rows, self.columns, self.values, x)
            inner = _right(self.columns, _left(_transposed(self.rows), x, cut), other).mul_(self.values)
            return _right(_transposed(self.columns), _left(self.rows, inner, cut), other)

    def owned(self) -> KroneckerInverse:
        """The same; sides that were made together with others, and would keep these in memory, as copies."""
        rows, columns = (
            side.clone() if side.untyped_storage().nbytes() > side.nbytes else side
            for side in (self.rows, self.columns)
        )
        return replace(self, rows=rows, columns=columns)

    @property
    def form(self) -> Any:
        """Equal for inverses that can be stacked; None if this one cannot, or is so large that it does not pay."""
        sides = (self.rows, self.columns) if self.values is None else (self.rows, self.columns, self.values)
        is_plain = self.shifts == (None, None) and not self.is_partial
        is_small = max(self.rows.shape[-1], self.columns.shape[-1]) <= STACKED_MAX_SIDE
        cuts = tuple(map(tuple, self.cuts))
        return (self.rows.device, cuts, *(side.shape for side in sides)) if is_plain and is_small else None

    @staticmethod
    def stacked(inverses: Sequence[KroneckerInverse]) -> KroneckerInverse:
        """One inverse for several of one form, their groups one after the other."""
        rows, columns = torch.cat([i.rows for i in inverses]), torch.cat([i.columns for i in inverses])
        values = [i.values for i in inverses if i.values is not None]
        return replace(inverses[0], rows=rows, columns=columns, values=torch.cat(values) if values else None)

    def parts(self, count: int) -> list[KroneckerInverse]:
        """What was `stacked`, in its memory."""
        sides = [
            [None] * count if side is None else side.chunk(count) for side in (self.rows, self.columns, self.values)
        ]
        return [replace(self, rows=b, columns=a, values=values) for b, a, values in zip(*sides, strict=True)]

    @property
    def is_partial(self) -> bool:
        return self.values is not None and self.rows.ndim == 3 and self.values.shape[1] > self.rows.shape[2]

    def condition(self) -> float:
        """Largest over smallest nonzero eigenvalue, the maximum over groups."""
        if self.values is not None:
            spread = self.values.flatten(1)
            least = torch.where(spread > 0, spread, torch.inf).amin(1)
            return float((spread.amax(1) / least).max())
        sides = [_spectrum(*side) for side in zip((self.rows, self.columns), self.shifts, strict=True)]
        one, other = (s.amax(1) / s.amin(1) for s in sides)
        return float((one * other).max())

    @property
    def ranks(self) -> tuple[int | None, int | None]:
        """Rank of V for either side, None if there is none."""
        sides = zip((self.rows, self.columns), self.shifts, strict=True)
        one, other = (None if shift is None else side.shape[2] for side, shift in sides)
        return one, other


def factored_inverses(
    pairs: Sequence[Sequence[Side]],
    share: float,
    before: Sequence[KroneckerInverse | None],
    anew: Sequence[bool],
) -> list[KroneckerInverse]:
    """``(B + share mean(B) I)^-1`` and ``(A + share mean(A) I)^-1`` for pairs (B, A), mean() being the mean eigenvalue.

    This is factored damping (arXiv:1503.05671, section 6.3) of ``share^2`` times the mean eigenvalue of the block.
    Sketches have few eigenvalues to begin with. Sides with `LOW_RANK_MIN_SIZE` rows or more use their largest
    eigenvalues if few stand out. The rest are inverted by Cholesky decomposition, sides of one shape together.

    Args:
        before: the previous inverses of the pairs.
        anew: whether to try again for sides of a pair that were not of low rank before.
    """
    sides = [side for pair in pairs for side in pair]
    widths = [other.shape[-1] for rows, columns in pairs for other in (columns, rows)]
    found_before = (side for inverse in before for side in _parts(inverse))
    starts = {k: None if side is None else side.to(sides[k].dtype) for k, side in enumerate(found_before)}
    found: dict[int, tuple[Tensor, Tensor | None]] = {
        k: _of_sketch(whole(side), share) for k, side in enumerate(sides) if _is_sketch(side)
    }
    large = [
        k for k, side in enumerate(sides) if side.ndim == 3 and len(side) == 1 and side.shape[1] >= LOW_RANK_MIN_SIZE
    ]
    large = [
        k
        for k in large
        if k not in found
        and sides[k].shape[1] < LOW_RANK_MAX_ASPECT * widths[k]
        and (starts[k] is not None or anew[k // 2])
    ]
    found |= _by_largest({k: sides[k] for k in large}, share, starts)
    left = [k for k in range(len(sides)) if k not in found]
    alone = {k: sides[k].ndim == 3 and sides[k].shape[1] > JOINED_MAX_SIDE and k for k in left}
    kinds = {k: (alone[k], type(sides[k]), sides[k].shape[1:], sides[k].dtype, sides[k].device) for k in left}
    groups = [([sides[k] for k in alike], alike) for _, alike in _grouped(kinds)]
    tried = [_tried(_stacked(own), share) for own, _ in groups]
    fine = look([ok for _, ok in tried])
    for (some, alike), (together, _), is_fine in zip(groups, tried, fine, strict=True):
        if not is_fine:
            together = _carefully(_stacked(some), share)
        for k, own in zip(alike, together.split([len(side) for side in some]), strict=True):
            found[k] = own, None
    both = [(*found[k], *found[k + 1]) for k in range(0, len(sides), 2)]
    return [KroneckerInverse(rows, columns, None, (c, d)) for rows, c, columns, d in both]


def inverses_in_blocks(pairs: Sequence[Sequence[Side]], share: float, cuts: Cuts) -> list[KroneckerInverse]:
    """`factored_inverses` of sides with diagonal blocks, by Cholesky decomposition of blocks of one shape together.

    Args:
        cuts: of both sides of all pairs.
    """
    sides = [side for pair in pairs for side in pair]
    found: dict[int, tuple[Tensor, Tensor | None]] = {
        k: _of_sketch(whole(side), share) for k, side in enumerate(sides) if _is_sketch(side)
    }
    found |= {k: (_diagonally(whole(side), share), None) for k, side in enumerate(sides) if side.ndim == 2}
    left = [k for k in range(len(sides)) if k not in found]
    scaled = [whole(sides[k]) / _mean(sides[k])[:, None, None] for k in left]
    for matrix in scaled:
        matrix.diagonal(dim1=1, dim2=2).add_(share)
    parts = parts_of(scaled, [cuts[k] for k in left])
    inverted = _by_shape(parts, _spd_inverses)
    for k, (own,) in zip(left, joined(inverted, [cuts[k] for k in left]), strict=True):
        found[k] = own.div_(_mean(sides[k])[:, None, None]), None
    both = [(found[k], found[k + 1], cuts[k : k + 2]) for k in range(0, len(sides), 2)]
    return [KroneckerInverse(b, a, None, (c, d), own) for (b, c), (a, d), own in both]


def eigen_inverses(pairs: Sequence[Sequence[Side]], damping: float, cuts: Cuts | None = None) -> list[KroneckerInverse]:
    """``(kron(B, A) + damping I)^-1`` for pairs (B, A) by eigenvalues; without damping, the pseudo-inverse.

    Args:
        cuts: of both sides of all pairs, see `inverses_in_blocks`.
    """
    parts = {k for k, pair in enumerate(pairs) if any(map(_is_sketch, pair))}
    some = [2 * k + side for k in range(len(pairs)) if k not in parts for side in (0, 1)]
    bases = iter(eigenbases([pairs[k // 2][k % 2] for k in some], cuts and [cuts[k] for k in some]))
    found = [
        (_outlined(whole(rows)), _outlined(whole(columns))) if k in parts else (next(bases), next(bases))
        for k, (rows, columns) in enumerate(pairs)
    ]
    own = [((), ()) if cuts is None or k in parts else cuts[2 * k : 2 * k + 2] for k in range(len(pairs))]
    return [_in_eigenbasis(*both, damping, of_both) for both, of_both in zip(found, own, strict=True)]


def _in_eigenbasis(
    rows: tuple[Tensor, Tensor], columns: tuple[Tensor, Tensor], damping: float, cuts: Cuts
) -> KroneckerInverse:
    (b, left), (a, right) = rows, columns
    values = b[:, :, None] * a[:, None, :]
    if damping > 0:
        return KroneckerInverse(left, right, 1 / (values + damping), cuts=cuts)
    least = torch.finfo(values.dtype).eps * max(values.shape) * values.amax((1, 2), keepdim=True)
    return KroneckerInverse(left, right, torch.where(values > least, 1 / values, 0.0), cuts=cuts)


def eigenbasis(side: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (g, d), and eigenvectors as columns; for a diagonal these are ones (g, d), as the identity is."""
    return (side.clamp(min=0), torch.ones_like(side)) if side.ndim == 2 else psd_eigh(side)


def eigenbases(sides: Sequence[Side], cuts: Cuts | None = None) -> list[tuple[Tensor, Tensor]]:
    """`eigenbasis` of each side, sides (or diagonal blocks) of one shape together.

    Args:
        cuts: of the sides, see `inverses_in_blocks`; eigenvalues are ascending in each block.
    """
    found = {k: eigenbasis(whole(side)) for k, side in enumerate(sides) if side.ndim == 2}
    dense = [k for k in range(len(sides)) if k not in found]
    own = [(sides[k].shape[-1],) if cuts is None else cuts[k] for k in dense]
    parts = parts_of([whole(sides[k]) for k in dense], own)
    made = _by_shape(parts, psd_eighs)
    found |= {k: (values, vectors) for k, (values, vectors) in zip(dense, joined(made, own), strict=True)}
    return [found[k] for k in range(len(sides))]


def carry_diagonal(values: Tensor, old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> Tensor:
    """The diagonal in a new basis (rows, columns) of the matrix with diagonal `values` (g, o, i) in an old one.

    That matrix is taken to be diagonal in the old basis. The trace is kept, for orthogonal sides.
    """
    olds, news = ([side.to(values.dtype) for side in sides] for sides in (old, new))
    olds = [torch.diag_embed(o) if o.ndim < n.ndim else o for o, n in zip(olds, news, strict=True)]
    with own_precision(values):
        rows, columns = (n * o if n.ndim == 2 else (n.mT @ o).square() for o, n in zip(olds, news, strict=True))
        return _right(_transposed(columns), _left(rows, values))


def _stacked(sides: Sequence[Side]) -> Tensor:
    """Sides of one form together, in memory of their own if they were packed, or several."""
    if isinstance(sides[0], Packed):
        return Packed.stacked([side for side in sides if isinstance(side, Packed)]).whole()
    return torch.cat([whole(side) for side in sides]) if len(sides) > 1 else sides[0]


def _is_sketch(side: Side) -> bool:
    return isinstance(side, Tensor) and is_sketch(side)


def _grouped(kinds: Mapping[int, Any]) -> list[tuple[Any, list[int]]]:
    """Each kind with the indices of that kind."""
    return [(kind, [k for k, own in kinds.items() if own == kind]) for kind in dict.fromkeys(kinds.values())]


def _by_shape(
    parts: Sequence[Tensor], run: Callable[[Sequence[Tensor]], Sequence[tuple[Tensor, ...]]]
) -> list[tuple[Tensor, ...]]:
    """What `run` makes of stacks of parts, those of one shape together."""
    found: dict[int, tuple[Tensor, ...]] = {}
    groups = _grouped({k: (part.shape[1:], part.dtype, part.device) for k, part in enumerate(parts)})
    made = run([_stacked([parts[k] for k in alike]) for _, alike in groups])
    for (_, alike), own in zip(groups, made, strict=True):
        pieces = [x.split([len(parts[k]) for k in alike]) for x in own]
        found |= dict(zip(alike, zip(*pieces, strict=True), strict=True))
    return [found[k] for k in range(len(parts))]


def _spd_inverses(stacks: Sequence[Tensor]) -> list[tuple[Tensor]]:
    """Inverses of stacks of matrices; the host asks once whether all have succeeded."""
    tried = [try_spd_inverse(stack) for stack in stacks]
    fine = look([ok for _, ok in tried])
    both = zip(tried, fine, stacks, strict=True)
    return [(own if is_fine else careful_spd_inverse(stack),) for (own, _), is_fine, stack in both]


def _tried(sides: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Damped inverses, and a flag (): whether they can be used."""
    if sides.ndim == 2:
        return _diagonally(sides, share), torch.ones((), dtype=torch.bool, device=sides.device)
    matrix, scale = _damped(sides, share)
    found, ok = try_spd_inverse(matrix)
    return found.div_(scale), ok


def _carefully(sides: Tensor, share: float) -> Tensor:
    """Damped inverses after a first failure."""
    matrix, scale = _damped(sides, share)
    return careful_spd_inverse(matrix).div_(scale)


def _damped(sides: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """In units of the mean eigenvalue, so that no product of small numbers underflows; and these units (g, 1, 1)."""
    scale = _mean(sides)[:, None, None]
    matrix = sides / scale
    matrix.diagonal(dim1=1, dim2=2).add_(share)
    return matrix, scale


def _diagonally(side: Tensor, share: float) -> Tensor:
    return 1 / (side + share * _mean(side)[:, None])


def _outlined(side: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (1, r + 1), the last for all directions outside the basis (1, d, r), and the basis."""
    if is_sketch(side):
        vectors, values, rest = sketch_spectrum(side)
        return torch.cat([values, rest[None]])[None], vectors[None]
    values, vectors = eigenbasis(side)
    vectors = torch.diag_embed(vectors) if side.ndim == 2 else vectors
    return torch.cat([values, values[:, -1:]], 1), vectors  # nothing is outside: any value would do


def _partial(rows: Tensor, columns: Tensor, values: Tensor, x: Tensor) -> Tensor:
    """The product outside both bases, plus the differences within the one, the other, and both."""
    outside, row, column = values[:, -1:, -1:], values[:, :-1, -1:], values[:, -1:, :-1]
    left, right = matmul(rows.mT, x), matmul(x, columns)
    both = (values[:, :-1, :-1] - row - column + outside) * matmul(left, columns)
    within = matmul(rows, (row - outside) * left + matmul(both, columns.mT))
    return outside * x + within + matmul((column - outside) * right, columns.mT)


def _of_sketch(side: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """V and c of the damped inverse of a sketch."""
    vectors, values, rest = sketch_spectrum(side)
    damping = share * _mean(side)
    root = (1 - (rest + damping) / (values + damping)).clamp(min=0).sqrt()
    return (vectors * root)[None], 1 / (rest + damping)


def _by_largest(
    sides: Mapping[int, Side], share: float, starts: Mapping[int, Tensor | None]
) -> dict[int, tuple[Tensor, Tensor]]:
    """V and c of the damped inverses of sides (1, d, d), for those of which few eigenvalues stand out."""
    means = {k: _mean(side) for k, side in sides.items()}
    firsts = [None if (start := starts[k]) is None else start[0] for k in sides]
    try:
        scaled = Lazily([partial(_scaled, side, means[k]) for k, side in sides.items()])
        found = low_rank_inverses(scaled, share, firsts)
    except torch.linalg.LinAlgError:  # fall back to Cholesky
        count_recovery("retried")
        return {}
    return {k: (own[0][None], own[1] / means[k]) for k, own in zip(sides, found, strict=True) if own}


def _scaled(side: Side, mean: Tensor) -> Tensor:
    return whole(side)[0] / mean


def _mean(sides: Side) -> Tensor:
    """Mean eigenvalue of each group, nonzero."""
    return nonzero_or_one(diagonal_of(sides).mean(1))


def nonzero_or_one(mean: Tensor) -> Tensor:
    """Mean eigenvalues to divide by, with 1 in place of zero.

    A layer without curvature may get a gradient before its curvature is renewed; its step must stay finite.
    """
    return torch.where(mean > 0, mean.clamp(min=torch.finfo(mean.dtype).tiny ** 0.5), 1)


def _parts(inverse: KroneckerInverse | None) -> Iterable[Tensor | None]:
    """V of each side that has one."""
    if inverse is None:
        return None, None
    sides = zip((inverse.rows, inverse.columns), inverse.shifts, strict=True)
    return (None if shift is None else side for side, shift in sides)


def _solved(side: Tensor, shift: Tensor | None, x: Tensor, left: bool, own: bool, cut: Sequence[int]) -> Tensor:
    """The product of a side with x from the left or the right, in place if x is our own."""
    if shift is None:
        return _left(side, x, cut) if left else _right(side, x, cut)
    one, other = (side, side.mT @ x) if left else (x @ side, side.mT)
    return (x if own else x.clone()).baddbmm_(one, other, alpha=-1).mul_(shift)


def _spectrum(side: Tensor, shift: Tensor | None) -> Tensor:
    """Eigenvalues of the matrix that a side stands for, or of its inverse, (g, d)."""
    if shift is not None:
        return shift[:, None] * torch.cat([1 - side.square().sum(1), torch.ones_like(shift)[:, None]], 1)
    return side if side.ndim == 2 else eigenvalues_of(side)


def _left(side: Tensor, x: Tensor, cut: Sequence[int] = ()) -> Tensor:
    if len(cut) > 1 and side.ndim == 3:
        parts = zip(parts_of([side], [cut]), x.split(list(cut), 1), strict=True)
        return torch.cat([_left(block, rows) for block, rows in parts], 1)
    return side[:, :, None] * x if side.ndim == 2 else side @ x


def _right(side: Tensor, x: Tensor, cut: Sequence[int] = ()) -> Tensor:
    if len(cut) > 1 and side.ndim == 3:
        parts = zip(parts_of([side], [cut]), x.split(list(cut), 2), strict=True)
        return torch.cat([_right(block, columns) for block, columns in parts], 2)
    return x * side[:, None, :] if side.ndim == 2 else x @ side


def _transposed(side: Tensor) -> Tensor:
    return side if side.ndim == 2 else side.mT
