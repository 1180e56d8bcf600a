"""Sides of Kronecker products in the memory of a triangle.

A symmetric side (g, d, d) is kept as its distinct entries (g, d (d + 1) / 2), in the rectangular full packed format of
LAPACK (Gustavson, Wasniewski, Dongarra and Langou, 2010, ACM Trans. Math. Softw. 37): the left half of the lower
triangle as it is, and the rest of it transposed into the corner above. Of a side that is zero outside of diagonal
blocks, each block is kept so, one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvature.linalg import is_sketch, moment_diagonal

PACKED_MIN_SIDE = 64  # rows from which the memory is worth the calls


@dataclass(frozen=True)
class Packed:
    """A symmetric side (g, d, d).

    Attributes:
        entries: of the lower triangles of its diagonal blocks, (g, length).
        cut: the numbers of rows of these.
    """

    entries: Tensor
    cut: tuple[int, ...]

    @staticmethod
    def of(side: Tensor, cut: Sequence[int]) -> Packed:
        """What is above the diagonal, and outside of the blocks, is not looked at."""
        blocks = (_packed(side[:, end - n : end, end - n : end]) for n, end in _blocks(cut))
        return Packed(torch.cat([x.flatten(1) for x in blocks], 1), tuple(cut))

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.entries), sum(self.cut), sum(self.cut)))

    ndim = 3

    @property
    def dtype(self) -> torch.dtype:
        return self.entries.dtype

    @property
    def device(self) -> torch.device:
        return self.entries.device

    def __len__(self) -> int:
        return len(self.entries)

    def whole(self) -> Tensor:
        """The side, in memory of its own."""
        parts = self.entries.split([_length(n) for n in self.cut], 1)
        if len(self.cut) == 1:
            return _unpacked(parts[0], self.cut[0])
        found = self.entries.new_zeros(self.shape)
        for part, (n, end) in zip(parts, _blocks(self.cut), strict=True):
            found[:, end - n : end, end - n : end] = _unpacked(part, n)
        return found

    def diagonal(self) -> Tensor:
        """(g, d)."""
        parts = self.entries.split([_length(n) for n in self.cut], 1)
        return torch.cat([x for part, n in zip(parts, self.cut, strict=True) for x in _diagonals(part, n)], 1)

    @staticmethod
    def stacked(sides: Sequence[Packed]) -> Packed:
        """Sides of one form, their groups one after the other."""
        return Packed(torch.cat([side.entries for side in sides]), sides[0].cut)


Side = Tensor | Packed  # (g, d, d), a diagonal (g, d), or a sketch


def whole(side: Side) -> Tensor:
    """A side as a tensor."""
    return side.whole() if isinstance(side, Packed) else side


def diagonal_of(side: Side) -> Tensor:
    """The diagonal (g, d) of a side."""
    return side.diagonal() if isinstance(side, Packed) else moment_diagonal(side)


def pack(side: Tensor, cut: Sequence[int]) -> Tensor:
    """The entries of a large symmetric side; small ones, diagonals and sketches as they are."""
    if side.ndim == 2 or is_sketch(side):
        return side
    if side.shape[1] >= PACKED_MIN_SIDE:
        return Packed.of(side, cut).entries
    return side if len(cut) == 1 else Packed.of(side, cut).whole()  # zeros outside of the blocks


def as_packed(side: Tensor, cut: Sequence[int]) -> Side:
    """What `pack` has made of a side: a diagonal has as many entries as rows, a triangle has more."""
    return Packed(side, tuple(cut)) if side.ndim == 2 and side.shape[1] != sum(cut) else side


def entries_of(cut: Sequence[int]) -> int:
    """How many numbers `pack` keeps of a symmetric side, for each group."""
    return sum(map(_length, cut)) if sum(cut) >= PACKED_MIN_SIDE else sum(cut) ** 2


def _blocks(cut: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Rows of each block, and the end of its rows."""
    return zip(cut, itertools.accumulate(cut), strict=True)


def _length(d: int) -> int:
    return d * (d + 1) // 2


def _rectangle(d: int) -> tuple[int, int, int]:
    """Columns on the left, rows on the right, and 1 where the left starts in the second row (d is even)."""
    left = (d + 1) // 2
    return left, d - left, 1 - d % 2


def _packed(side: Tensor) -> Tensor:
    left, right, down = _rectangle(side.shape[1])
    found = side.new_empty(len(side), side.shape[1] + down, left)
    found[:, down:] = side[:, :, :left]
    corner = found[:, :right, 1 - down :]
    corner.copy_(torch.where(_upper(right, side), side[:, left:, left:].mT, corner))
    return found


def _unpacked(entries: Tensor, d: int) -> Tensor:
    left, right, down = _rectangle(d)
    rectangle = entries.view(len(entries), d + down, left)
    found = entries.new_empty(len(entries), d, d)
    found[:, left:, :left] = rectangle[:, down + left :]
    found[:, :left, left:] = rectangle[:, down + left :].mT
    lower, upper = rectangle[:, down : down + left], rectangle[:, :right, 1 - down :]
    torch.where(_upper(left, entries), lower.mT, lower, out=found[:, :left, :left])
    torch.where(_upper(right, entries), upper, upper.mT, out=found[:, left:, left:])
    return found


def _diagonals(entries: Tensor, d: int) -> tuple[Tensor, Tensor]:
    left, right, down = _rectangle(d)
    rectangle = entries.view(len(entries), d + down, left)
    lower, upper = rectangle[:, down : down + left], rectangle[:, :right, 1 - down :]
    return lower.diagonal(dim1=1, dim2=2), upper.diagonal(dim1=1, dim2=2)


def _upper(d: int, like: Tensor) -> Tensor:
    """A mask (d, d) of the upper triangle with the diagonal."""
    return torch.ones(d, d, dtype=torch.bool, device=like.device).triu()
