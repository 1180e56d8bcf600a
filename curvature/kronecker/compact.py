"""What running curvature takes, and inverses in the memory that they need: as they are, or in 16 bits."""

from __future__ import annotations

from dataclasses import replace

from curvature.kronecker.diagonal_blocks import Cuts, cuts_of
from curvature.kronecker.factors import Scheme
from curvature.kronecker.inverses import KroneckerInverse
from curvature.kronecker.packing import entries_of, halve, is_halved, pack


def compacted(inverse: KroneckerInverse, cuts: Cuts) -> KroneckerInverse:
    """The inverse in 16 bits: symmetric sides and roots as triangles (`halve`), bases and scales as they are.

    Eigenbases and vectors that stand out stay orthogonal to 3e-4, scales (bfloat16) are right to 2^-9 of themselves.
    """
    if inverse.is_partial:
        return inverse
    if inverse.values is not None:
        rows, columns = (side.half() if side.ndim == 3 else side for side in (inverse.rows, inverse.columns))
        return replace(inverse, rows=rows, columns=columns, values=inverse.values.bfloat16())
    both = zip((inverse.rows, inverse.columns), inverse.shifts, cuts, strict=True)
    rows, columns = (
        halve(pack(side, cut), cut) if shift is None else side.half() if side.ndim == 3 else side
        for side, shift, cut in both
    )
    packed = is_halved(rows, cuts[0]), is_halved(columns, cuts[1])
    return replace(inverse, rows=rows, columns=columns, cuts=cuts, packed=packed)


def owned(inverse: KroneckerInverse) -> KroneckerInverse:
    """The inverse; sides that were made together with others, and would keep these in memory, as copies."""
    both = inverse.rows, inverse.columns
    rows, columns = (side.clone() if side.untyped_storage().nbytes() > side.nbytes else side for side in both)
    return replace(inverse, rows=rows, columns=columns)


def kept_bytes(scheme: Scheme, side: int) -> int:
    """Of the running average of the side of outputs (0) or inputs (1)."""
    cut, groups = cuts_of(scheme)[side], scheme.arrangement.groups
    if scheme.diagonal[side] or scheme.sketched[side]:
        return scheme.sides[side] * scheme.dtype.itemsize
    entries = entries_of(cut)
    is_triangle = entries < sum(cut) ** 2
    return groups * (2 * (entries + 1) if scheme.compact and is_triangle else entries * scheme.dtype.itemsize)
