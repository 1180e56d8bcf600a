"""Sides of Kronecker products: symmetric positive semi-definite matrices (d, d), one for each of g groups.

Each form of storage is a type, and all have the methods of `Side`, which says what a new one needs. A side that is too
large to store is a sketch, that of one-hot vectors a diagonal. Large ones are stored as triangles, in the rectangular
full packed format of LAPACK (Gustavson, Wasniewski, Dongarra and Langou, 2010, ACM Trans. Math. Softw. 37): the left
half of the lower triangle as it is, and the rest of it transposed into the corner above.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from curvature.kronecker.applied import DiagonalMatrix, LowRankMatrix, Matrix, PartialBasis, ranges
from curvature.linalg import count_recovery, matmul, psd_eigh

PACKED_MIN_SIDE = 64  # rows from which the memory is worth the calls
SKETCH_RANK = 128  # directions kept
# Rows kept of a batch; random signs mix more into these, which does not change the expected moment.
MAX_SKETCH_ROWS = 2 * SKETCH_RANK
MAX_DENSE_SIDE = 2 * MAX_SKETCH_ROWS + 1  # a dense side of at most this size is no larger than its sketch

Kind = TypeVar("Kind", bound="Side")


@dataclass(frozen=True, eq=False)
class Side:
    """Base: matrices that are linear in the numbers that are stored.

    A new form of storage has a name, `of`, `diagonal` and `dense`, and where its entries do not tell its size, `size`
    and `of_entries`. It is inverted by the Cholesky decomposition of `dense`, unless it has an `inverse` and an
    `eigenbasis` of its own. Weights get it where `storage_of` chooses it.
    """

    entries: Tensor  # the numbers, (g, ...)

    name: ClassVar[str] = ""  # in `Scheme.storage` and in checkpoints; without one it is a variant of another form
    is_diagonal: ClassVar[bool] = False  # whether a moment's diagonal says all, and the axes are its eigenvectors
    takes_rows: ClassVar[bool] = False  # whether it is made `of_rows`, before these are multiplied

    def __init_subclass__(cls) -> None:
        if cls.name:
            STORAGES[cls.name] = cls

    @classmethod
    def of(cls, moment: Tensor, blocks: Sequence[int]) -> Side:
        """Of a second moment (g, d, d), or its diagonal (g, d), with diagonal blocks of these sizes."""
        return cls(moment)

    @classmethod
    def of_rows(cls, rows: Tensor) -> Side:
        """That of ``rows^T rows`` for rows (n, d)."""
        raise NotImplementedError

    @classmethod
    def of_entries(cls, entries: Tensor, blocks: Sequence[int]) -> Side:
        """The side with these `entries`."""
        return cls(entries)

    @classmethod
    def of_sum(cls, total: Tensor, blocks: Sequence[int]) -> Side:
        """The side that is a sum over processes of `to_sum`."""
        return cls.of_entries(total, blocks)

    @staticmethod
    def most_entries(groups: int, blocks: Sequence[int]) -> int:
        """How many numbers it and its inverse have, at most."""
        return 2 * groups * sum(blocks) ** 2

    def __len__(self) -> int:
        """Number of groups."""
        return self.entries.shape[0]  # Python's `len` of a tensor takes several times as long

    @property
    def size(self) -> int:
        """Number of rows d."""
        return self.entries.shape[-1]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of rows of the diagonal blocks outside of which the matrix is zero."""
        return (self.size,)

    @property
    def form(self) -> Hashable:
        """Equal for sides that can be stacked."""
        return type(self), self.sizes, self.entries.shape[1:], self.entries.dtype, self.entries.device

    def with_entries(self: Kind, entries: Tensor) -> Kind:
        """One of this form."""
        return replace(self, entries=entries)

    def stacked(self: Kind, others: Sequence[Any]) -> Kind:
        """The groups of this side and of others of its form, one after the other."""
        return self.with_entries(torch.cat([self.entries, *(side.entries for side in others)])) if others else self

    def scaled(self: Kind, factor: float | Tensor) -> Kind:
        """Times a number, or one for each group (g,)."""
        return self.with_entries(self.entries * for_groups(factor, self.entries))

    def add_(self: Kind, other: Any) -> Kind:
        """The sum with a side of the same form, in the memory of this one if it has the space."""
        self.entries.add_(other.entries)
        return self

    def averaged(self: Kind, old: Any, weight: float | Tensor) -> Kind:
        """``(1 - weight) old + weight self``; without an old side this one."""
        return self if old is None else self.with_entries(old.entries.lerp(self.entries, weight))

    def diagonal(self) -> Tensor:
        """(g, d)."""
        raise NotImplementedError

    def diagonal_parts(self) -> list[Tensor]:
        """The same in as many tensors as are in memory."""
        return [self.diagonal()]

    def dense(self) -> Tensor:
        """(g, d, d), where that can be stored."""
        raise NotImplementedError

    def lower(self) -> Tensor:
        """The same without a promise of what is above the diagonal."""
        return self.dense()

    def left(self, x: Tensor) -> Tensor:
        """The product with x (*batch, g, d, i) from the left."""
        return matmul(self.dense(), x)

    def right(self, x: Tensor) -> Tensor:
        """The product with x (*batch, g, o, d) from the right."""
        return matmul(x, self.dense())

    def mean_eigenvalue(self) -> Tensor:
        """Of each group (g,), nonzero."""
        return nonzero_or_one(self.diagonal().mean(1))

    def inverse(self, share: float) -> Matrix | None:
        """The inverse with `share` times the mean eigenvalue added; None where that takes a decomposition."""
        return None

    def eigenbasis(self) -> tuple[Tensor, Matrix] | None:
        """As `eigenbases` has it; None where that takes a decomposition."""
        return None

    def compared(self) -> Tensor:
        """What shows how far it has moved."""
        return self.entries

    def to_sum(self, rank: int, world_size: int) -> Tensor:
        """What adds up over processes, of which this one is `rank`, for `of_sum`."""
        return self.entries

    @property
    def cost(self) -> int:
        """Operations of a decomposition, up to a constant factor."""
        return len(self) * sum(n**3 for n in self.sizes)

    def describe(self) -> str:
        """Its shape, for reports."""
        return f"{self.size}x{self.size}"


STORAGES: dict[str, type[Side]] = {}  # by name
Product = tuple[Side, Side]  # the side of the outputs, and that of the inputs


class DiagonalSide(Side):
    """A diagonal, entries (g, d)."""

    name = "diagonal"
    is_diagonal = True

    @staticmethod
    def most_entries(groups: int, blocks: Sequence[int]) -> int:
        return 2 * groups * sum(blocks)

    def diagonal(self) -> Tensor:
        return self.entries

    def dense(self) -> Tensor:
        return torch.diag_embed(self.entries)

    def left(self, x: Tensor) -> Tensor:
        return self.entries[..., None] * x

    def right(self, x: Tensor) -> Tensor:
        return x * self.entries[:, None, :]

    def inverse(self, share: float) -> Matrix:
        return DiagonalMatrix(1 / (self.entries + share * self.mean_eigenvalue()[:, None]))

    def eigenbasis(self) -> tuple[Tensor, Matrix]:
        return self.entries.clamp(min=0), DiagonalMatrix(torch.ones_like(self.entries))

    @property
    def cost(self) -> int:
        return self.entries.numel()

    def describe(self) -> str:
        return super().describe() + " diagonal"


class UncorrelatedSide(DiagonalSide):
    """The diagonal (g, d) of a matrix whose other entries are zero in the mean, as of noise that is sent back."""

    name = "uncorrelated"


class DenseSide(Side):
    """All entries (g, d, d)."""

    name = "dense"

    def with_entries(self, entries: Tensor) -> DenseSide:
        return DenseSide(entries)  # quicker than `replace`

    def diagonal(self) -> Tensor:
        return self.entries.diagonal(dim1=1, dim2=2)

    def dense(self) -> Tensor:
        return self.entries


@dataclass(frozen=True, eq=False)
class PackedSide(Side):
    """Diagonal blocks, usually one, whose lower triangles are stored one after the other: (g, entries of all)."""

    blocks: tuple[int, ...]  # their numbers of rows

    name = "packed"

    @classmethod
    def of(cls, moment: Tensor, blocks: Sequence[int]) -> PackedSide:
        """Of matrices (g, d, d), whose entries above the diagonal and outside of the blocks are not looked at."""
        packed = [_pack(moment[:, rows, rows]) for rows in ranges(blocks)]
        return cls(torch.cat(packed, 1) if len(blocks) > 1 else packed[0], tuple(blocks))

    @classmethod
    def of_entries(cls, entries: Tensor, blocks: Sequence[int]) -> PackedSide:
        return cls(entries, tuple(blocks))

    @staticmethod
    def most_entries(groups: int, blocks: Sequence[int]) -> int:
        return groups * (sum(blocks) ** 2 + sum(map(triangle, blocks)))

    @property
    def size(self) -> int:
        return sum(self.blocks)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.blocks

    def with_entries(self, entries: Tensor) -> PackedSide:
        return PackedSide(entries, self.blocks)

    def diagonal(self) -> Tensor:
        return torch.cat(self.diagonal_parts(), 1)

    def diagonal_parts(self) -> list[Tensor]:
        parts = zip(self._triangles(), self.blocks, strict=True)
        return [x for part, n in parts for x in _diagonals(part, n)]

    def dense(self) -> Tensor:
        return self._matrix(_unpack)

    def lower(self) -> Tensor:
        return self._matrix(_lower)

    def _matrix(self, unpack: Callable[[Tensor, int], Tensor]) -> Tensor:
        if len(self.blocks) == 1:
            return unpack(self.entries, self.size)
        matrix = self.entries.new_zeros(len(self), self.size, self.size)
        for part, rows, n in zip(self._triangles(), ranges(self.blocks), self.blocks, strict=True):
            matrix[:, rows, rows] = unpack(part, n)
        return matrix

    def describe(self) -> str:
        return super().describe() + (f" in {len(self.blocks)} blocks" if len(self.blocks) > 1 else "")

    def _triangles(self) -> Sequence[Tensor]:
        sizes = [triangle(n) for n in self.blocks]
        return self.entries.split_with_sizes(sizes, 1) if len(sizes) > 1 else [self.entries]


class SketchSide(Side):
    """Rows (1, r + 1, d) that stand for ``sum_k s_k s_k^T + |s_last|^2 / d I``, k over all but the last.

    The trace is the sum of their squares. `of_rows` leaves the last row zero; `compress` makes the rest orthogonal.
    """

    name = "sketch"
    takes_rows = True

    @classmethod
    def of_rows(cls, rows: Tensor) -> SketchSide:
        if len(rows) > MAX_SKETCH_ROWS:
            generator = torch.Generator(rows.device).manual_seed(0)
            signs = torch.randint(2, (MAX_SKETCH_ROWS, len(rows)), generator=generator, device=rows.device)
            signs = signs.to(rows.dtype) * 2 - 1
            rows = matmul(signs, rows) / MAX_SKETCH_ROWS**0.5
        return cls(torch.cat([rows, torch.zeros_like(rows[:1])])[None])

    @classmethod
    def of_sum(cls, total: Tensor, blocks: Sequence[int]) -> SketchSide:
        return functools.reduce(SketchSide.add_, map(SketchSide, total))

    @staticmethod
    def most_entries(groups: int, blocks: Sequence[int]) -> int:
        return 2 * sum(blocks) * (SKETCH_RANK + 1)

    def scaled(self, factor: float | Tensor) -> SketchSide:
        return SketchSide(self.entries * factor**0.5)

    def add_(self, other: SketchSide) -> SketchSide:
        one, two = self.entries, other.entries
        last = (one[:, -1:].square() + two[:, -1:].square()).sqrt()
        both = SketchSide(torch.cat([one[:, :-1], two[:, :-1], last], 1))
        return both._compressed(None) if both.entries.shape[1] > 2 * MAX_SKETCH_ROWS else both

    def averaged(self, old: SketchSide | None, weight: float | Tensor) -> SketchSide:
        new = self if old is None else old.scaled(1 - weight).add_(self.scaled(weight))
        return new._compressed(old)

    def diagonal(self) -> Tensor:
        return self.entries.square().sum(1)

    def inverse(self, share: float) -> Matrix:
        vectors, values, rest = sketch_spectrum(self.entries)
        damping = share * self.mean_eigenvalue()
        root = (1 - (rest + damping) / (values + damping)).clamp(min=0).sqrt()
        return LowRankMatrix((vectors * root)[None], 1 / (rest + damping))

    def eigenbasis(self) -> tuple[Tensor, Matrix]:
        vectors, values, rest = sketch_spectrum(self.entries)
        return torch.cat([values, rest[None]])[None], PartialBasis(vectors[None])

    def compared(self) -> Tensor:
        """A sketch turns without a change."""
        return self.diagonal()

    @property
    def cost(self) -> int:
        return self.entries.numel() * self.entries.shape[1]

    def to_sum(self, rank: int, world_size: int) -> Tensor:
        """Zeros but for this sketch, in a place of its own."""
        small = compress(self.entries)
        places = small.new_zeros(world_size, 1, SKETCH_RANK + 1, self.size)
        places[rank, :, : small.shape[1] - 1], places[rank, :, -1] = small[:, :-1], small[:, -1]
        return places

    def _compressed(self, old: SketchSide | None) -> SketchSide:
        """`compress`; if that fails, the old sketch, or without one a multiple of the identity of the same trace."""
        try:
            return SketchSide(compress(self.entries))
        except torch.linalg.LinAlgError:
            count_recovery("diagonal" if old is None else "kept")
        if old is not None:
            return old
        identity = torch.zeros_like(self.entries[:, : SKETCH_RANK + 1])
        identity[:, -1] = (self.entries.square().sum() / self.size).sqrt()
        return SketchSide(identity)


def storage_of(
    blocks: Sequence[int], largest: float, is_one_hot: bool, can_be_sketched: bool, is_noise: bool = False
) -> str:
    """The form for a side with diagonal blocks of so many rows, of one-hot inputs or not, of noise or not.

    At most `largest` rows are kept whole, as triangles where these take so much less memory that it matters. Without a
    limit no memory is saved: to add triangles up over data takes longer.
    """
    rows = sum(blocks)
    if is_noise:
        return UncorrelatedSide.name
    if can_be_sketched and rows > max(largest, MAX_DENSE_SIDE):
        return SketchSide.name
    if is_one_hot or rows > largest:
        return DiagonalSide.name
    is_packed = largest < math.inf and (len(blocks) > 1 or rows >= PACKED_MIN_SIDE)
    return PackedSide.name if is_packed else DenseSide.name


def scale_all(sides: Sequence[Side], factors: Sequence[float | Tensor], in_place: bool = False) -> list[Side]:
    """`Side.scaled` of each, of those that are scaled by plain numbers in one call, which may be `in_place`."""
    is_plain = lambda x, by: isinstance(by, float) and type(x).scaled is Side.scaled
    each: list[tuple[Side, Any]] = list(zip(sides, factors, strict=True))
    plain = [(x.entries, by) for x, by in each if is_plain(x, by)]
    entries, plain_factors = [x for x, _ in plain], [by for _, by in plain]
    if in_place and plain:
        torch._foreach_mul_(entries, plain_factors)
    scaled = iter(torch._foreach_mul(entries, plain_factors) if plain and not in_place else entries)
    return [x.with_entries(next(scaled)) if is_plain(x, by) else x.scaled(by) for x, by in each]


def average_all(sides: Sequence[Side], before: Sequence[Side | None], weights: Sequence[float]) -> list[Side]:
    """`Side.averaged` of each, of those that are linear in their entries in one call."""
    each = list(zip(sides, before, weights, strict=True))
    joint = [(old.entries, x.entries, weight) for x, old, weight in each if old is not None and _is_linear(x)]
    olds, news, shares = [x for x, _, _ in joint], [x for _, x, _ in joint], [weight for *_, weight in joint]
    averages = iter(torch._foreach_lerp(olds, news, shares) if joint else ())
    return [
        x.averaged(old, weight) if old is None or not _is_linear(x) else x.with_entries(next(averages))
        for x, old, weight in each
    ]


def _is_linear(side: Side) -> bool:
    return type(side).averaged is Side.averaged


def merge_products(products: Sequence[Product]) -> Product:
    """One product for the sum of several (tied weights), with the same trace.

    Each side is the sum over the products, weighted by the trace of the other side. Products are those of one `Scheme`.
    """
    traces = [(rows.diagonal().sum(1), columns.diagonal().sum(1)) for rows, columns in products]
    total = torch.stack([r * c for r, c in traces]).sum(0)
    total = total.clamp(min=torch.finfo(total.dtype).tiny).sqrt()

    def merged(k: int) -> Side:
        sides = [product[k].scaled(trace[1 - k]).entries for product, trace in zip(products, traces, strict=True)]
        summed = torch.stack(sides).sum(0)
        return products[0][k].with_entries(summed / for_groups(total, summed))

    return merged(0), merged(1)


def compress(sketch: Tensor) -> Tensor:
    """At most `SKETCH_RANK` orthogonal rows, largest first; the last row holds what they leave out."""
    rows, rest = sketch[0, :-1], sketch[0, -1].square().sum()
    values, vectors = psd_eigh(matmul(rows, rows.mT))
    kept = matmul(vectors[:, -SKETCH_RANK:].flip(1).mT, rows)
    rest = rest + (rows.square().sum() - kept.square().sum()).clamp(min=0)
    last = (rest / rows.shape[1]).sqrt().expand(1, rows.shape[1])
    return torch.cat([kept, last])[None]


def sketch_spectrum(sketch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of a compressed sketch: eigenvectors (d, r), their eigenvalues (r,), and that of all other directions."""
    rows, rest = sketch[0, :-1], sketch[0, -1].square().mean()
    squares = rows.square().sum(1)
    tiny = torch.finfo(rows.dtype).tiny ** 0.5
    # a row that is zero up to rounding has no direction
    nonzero = squares > torch.finfo(rows.dtype).eps * squares.sum()
    unit = torch.where(nonzero[:, None], rows / squares.clamp(min=tiny).sqrt()[:, None], torch.zeros_like(rows))
    return unit.mT, torch.where(nonzero, squares, torch.zeros_like(squares)) + rest, rest


def triangle(d: int) -> int:
    """Number of entries of a triangle with its diagonal."""
    return d * (d + 1) // 2


def for_groups(factor: Any, entries: Tensor) -> Any:
    """A number, or one for each group (g,), by which entries (g, ...) can be multiplied."""
    is_by_group = isinstance(factor, Tensor) and factor.ndim == 1
    return factor.reshape(-1, *[1] * (entries.ndim - 1)) if is_by_group else factor


def nonzero_or_one(mean: Tensor) -> Tensor:
    """Mean eigenvalues to divide by, with 1 in place of zero.

    A layer without curvature may get a gradient before its curvature is renewed; its step must stay finite.
    """
    return mean.clamp(min=torch.finfo(mean.dtype).tiny ** 0.5).masked_fill_(mean <= 0, 1)


def _rectangle(d: int) -> tuple[int, int, int]:
    """Columns on the left, rows on the right, and 1 where the left starts in the second row (d is even)."""
    left = (d + 1) // 2
    return left, d - left, 1 - d % 2


def _pack(matrix: Tensor) -> Tensor:
    left, right, down = _rectangle(matrix.shape[1])
    packed = matrix.new_empty(matrix.shape[0], matrix.shape[1] + down, left)
    packed.narrow(1, down, matrix.shape[1]).copy_(matrix.narrow(2, 0, left))
    packed[:, :right, 1 - down :].tril_(-1).add_(matrix[:, left:, left:].mT.triu())
    return packed.flatten(1)


def _lower(entries: Tensor, d: int) -> Tensor:
    left, right, down = _rectangle(d)
    rectangle = entries.view(-1, d + down, left)
    matrix = entries.new_empty(entries.shape[0], d, d)
    matrix.narrow(2, 0, left).copy_(rectangle.narrow(1, down, d))
    matrix[:, left:, left:] = rectangle[:, :right, 1 - down :].mT
    return matrix


def _unpack(entries: Tensor, d: int) -> Tensor:
    left, right, down = _rectangle(d)
    rectangle = entries.view(-1, d + down, left)
    matrix = entries.new_empty(entries.shape[0], d, d)
    matrix[:, left:, :left] = rectangle[:, down + left :]
    matrix[:, :left, left:] = rectangle[:, down + left :].mT
    lower, upper = rectangle[:, down : down + left], rectangle[:, :right, 1 - down :]
    torch.where(_upper(left, entries), lower.mT, lower, out=matrix[:, :left, :left])
    torch.where(_upper(right, entries), upper, upper.mT, out=matrix[:, left:, left:])
    return matrix


def _diagonals(entries: Tensor, d: int) -> tuple[Tensor, Tensor]:
    left, right, down = _rectangle(d)
    start, step = down * left, left + 1
    return entries[:, start : start + left * step : step], entries[:, 1 - down : right * step : step]


def _upper(d: int, like: Tensor) -> Tensor:
    """A mask (d, d) of the upper triangle with the diagonal."""
    return torch.ones(d, d, dtype=torch.bool, device=like.device).triu()
