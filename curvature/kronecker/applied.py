"""Matrices that a step multiplies gradients (g, o, i) with, from the left and from the right, and inverses made of two.

Each kind of matrix is a type with the same methods; x is changed in place where it is the caller's own, because
allocating memory costs more than arithmetic.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from curvature.linalg import ByDevice, eigenvalues_of, matmul, own_precision

STACKED_MAX_SIDE = ByDevice(256, 4096)  # rows up to which copying inverses costs less than a call for each


@dataclass(frozen=True, eq=False)
class Matrix:
    """Base: symmetric, or orthogonal, matrices (d, d), one for each of g groups."""

    entries: Tensor

    name: ClassVar[str]  # of the kind, in checkpoints

    def __init_subclass__(cls) -> None:
        MATRICES[cls.name] = cls

    @property
    def vectors(self) -> Tensor | None:
        """Of a basis, as columns (g, d, d); None where these are the axes."""
        return None

    def left(self, x: Tensor, in_place: bool = False) -> Tensor:
        """The product with x (g, d, i) from the left."""
        raise NotImplementedError

    def right(self, x: Tensor, in_place: bool = False) -> Tensor:
        """The product with x (g, o, d) from the right."""
        raise NotImplementedError

    @property
    def T(self) -> Matrix:
        """The transpose."""
        return self

    def spectrum(self) -> Tensor:
        """Eigenvalues (g, d) of a symmetric one, in any order."""
        raise NotImplementedError

    @property
    def form(self) -> Hashable:
        """Equal for matrices that can be stacked; None if this one cannot, or is so large that it does not pay."""
        is_small = self.entries.shape[-1] <= STACKED_MAX_SIDE.at(self.entries.device)
        return (type(self), self.entries.shape, self.entries.device) if is_small else None

    def outlined(self, values: Tensor) -> tuple[Tensor, Matrix]:
        """Of an eigenbasis the eigenvalues (1, r + 1), the last for all directions outside, and the `PartialBasis`."""
        vectors = torch.diag_embed(self.entries) if self.vectors is None else self.vectors
        return torch.cat([values, values[:, -1:]], 1), PartialBasis(vectors)  # none is outside: any value would do

    def owned(self) -> Matrix:
        """The same; a copy, if it was made together with others, and would keep these in memory."""
        is_part = self.entries.untyped_storage().nbytes() > self.entries.nbytes
        return replace(self, entries=self.entries.clone()) if is_part else self

    def state(self) -> dict[str, Any]:
        """For a checkpoint: plain tensors, numbers and names."""
        return {"kind": self.name, **vars(self)}


MATRICES: dict[str, type[Matrix]] = {}  # by name


class DiagonalMatrix(Matrix):
    """A diagonal, entries (g, d); as a basis ones: the axes."""

    name = "diagonal"

    def left(self, x: Tensor, in_place: bool = False) -> Tensor:
        return self.entries[:, :, None] * x

    def right(self, x: Tensor, in_place: bool = False) -> Tensor:
        return x * self.entries[:, None, :]

    def spectrum(self) -> Tensor:
        return self.entries


class DenseMatrix(Matrix):
    """All entries (g, d, d)."""

    name = "dense"

    @staticmethod
    def of(entries: Tensor, sizes: Sequence[int]) -> DenseMatrix:
        """Entries that are zero outside of the diagonal blocks of these sizes."""
        return BlockMatrix(entries, tuple(sizes)) if len(sizes) > 1 else DenseMatrix(entries)

    @property
    def vectors(self) -> Tensor:
        return self.entries

    def left(self, x: Tensor, in_place: bool = False) -> Tensor:
        return torch.bmm(self.entries, x)

    def right(self, x: Tensor, in_place: bool = False) -> Tensor:
        return torch.bmm(x, self.entries)

    @property
    def T(self) -> Matrix:
        return replace(self, entries=self.entries.mT)

    def spectrum(self) -> Tensor:
        return eigenvalues_of(self.entries)


@dataclass(frozen=True, eq=False)
class BlockMatrix(DenseMatrix):
    """Entries (g, d, d) that are zero outside of diagonal blocks, of as many rows as `sizes` says."""

    sizes: tuple[int, ...]

    name = "blocks"

    def left(self, x: Tensor, in_place: bool = False) -> Tensor:
        return torch.cat([self.entries[:, rows, rows] @ x[:, rows] for rows in ranges(self.sizes)], 1)

    def right(self, x: Tensor, in_place: bool = False) -> Tensor:
        return torch.cat([x[:, :, rows] @ self.entries[:, rows, rows] for rows in ranges(self.sizes)], 2)

    @property
    def form(self) -> Hashable:
        form = super().form
        return form and (form, self.sizes)


class PartialBasis(DenseMatrix):
    """Fewer orthonormal columns than rows: entries (1, d, r)."""

    name = "partial"

    def outlined(self, values: Tensor) -> tuple[Tensor, Matrix]:
        return values, self


@dataclass(frozen=True, eq=False)
class LowRankMatrix(Matrix):
    """``scale (I - V V^T)``, entries being V (g, d, r) with orthogonal columns; scale (g,)."""

    scale: Tensor

    name = "low rank"

    def left(self, x: Tensor, in_place: bool = False) -> Tensor:
        out = x if in_place else x.clone()
        return out.baddbmm_(self.entries, self.entries.mT @ x, alpha=-1).mul_(self.scale)

    def right(self, x: Tensor, in_place: bool = False) -> Tensor:
        out = x if in_place else x.clone()
        return out.baddbmm_(x @ self.entries, self.entries.mT, alpha=-1).mul_(self.scale)

    def spectrum(self) -> Tensor:
        inside = 1 - self.entries.square().sum(1)
        return self.scale[:, None] * torch.cat([inside, torch.ones_like(self.scale)[:, None]], 1)

    form = None


@dataclass(frozen=True, eq=False)
class KroneckerInverse:
    """``rows X columns``: the inverse of a product of sides is that of its sides."""

    rows: Matrix
    columns: Matrix

    name: ClassVar[str] = "factored"

    def __call__(self, x: Tensor, in_place: bool = False) -> Tensor:
        """The product with x (g, o, i), in place if x is our own."""
        with own_precision(x):
            return self.columns.right(self.rows.left(x, in_place), True)

    def transposed(self) -> Any:
        """The same for transposed matrices (g, i, o)."""
        return replace(self, rows=self.columns, columns=self.rows)

    def condition(self) -> float:
        """Largest over smallest nonzero eigenvalue, the maximum over groups."""
        spreads = [s.amax(1) / s.amin(1) for s in (self.rows.spectrum(), self.columns.spectrum())]
        return float((spreads[0] * spreads[1]).max())

    @property
    def form(self) -> Hashable:
        """Equal for inverses that can be stacked; None if this one cannot."""
        forms = type(self), self.rows.form, self.columns.form
        return None if None in forms else forms

    def tensors(self) -> list[Tensor]:
        return [x.entries if isinstance(x, Matrix) else x for x in vars(self).values()]

    def with_tensors(self, rows: Tensor, columns: Tensor, *values: Tensor) -> Any:
        """One of this form, with other `tensors`."""
        return type(self)(replace(self.rows, entries=rows), replace(self.columns, entries=columns), *values)

    def stacked(self, others: Sequence[Any]) -> Any:
        """One inverse for this one and others of its form, their groups one after the other."""
        return self.with_tensors(*map(torch.cat, zip(self.tensors(), *(o.tensors() for o in others), strict=True)))

    def parts(self, count: int) -> list[Any]:
        """What was `stacked`, in its memory."""
        chunks = (t.chunk(count) for t in self.tensors())
        return [self.with_tensors(*tensors) for tensors in zip(*chunks, strict=True)]

    def owned(self) -> Any:
        """The same with `Matrix.owned`."""
        return replace(self, rows=self.rows.owned(), columns=self.columns.owned())

    def state(self) -> dict[str, Any]:
        """For a checkpoint, see `inverse_of_state`."""
        plain = {key: x.state() if isinstance(x, Matrix) else x for key, x in vars(self).items()}
        return {"kind": self.name, **plain}


@dataclass(frozen=True, eq=False)
class EigenInverse(KroneckerInverse):
    """``rows ((rows^T X columns) * values) columns^T``, in an orthogonal basis if the inverse is of one product."""

    values: Tensor

    name = "eigen"

    def __call__(self, x: Tensor, in_place: bool = False) -> Tensor:
        with own_precision(x):
            inner = self.columns.right(self.rows.T.left(x)).mul_(self.values)
            return self.columns.T.right(self.rows.left(inner))

    def transposed(self) -> Any:
        return replace(super().transposed(), values=self.values.mT)

    def condition(self) -> float:
        spread = self.values.flatten(1)
        least = torch.where(spread > 0, spread, torch.inf).amin(1)
        return float((spread.amax(1) / least).max())


class PartialEigenInverse(EigenInverse):
    """In partial bases (1, o, r) and (1, i, s): the last of each axis of values (1, r + 1, s + 1) is for the rest."""

    name = "partial eigen"
    form = None

    def __call__(self, x: Tensor, in_place: bool = False) -> Tensor:
        """The product outside both bases, plus the differences within the one, the other, and both."""
        rows, columns, values = self.rows.entries, self.columns.entries, self.values
        outside, row, column = values[:, -1:, -1:], values[:, :-1, -1:], values[:, -1:, :-1]
        left, right = matmul(rows.mT, x), matmul(x, columns)
        both = (values[:, :-1, :-1] - row - column + outside) * matmul(left, columns)
        within = matmul(rows, (row - outside) * left + matmul(both, columns.mT))
        return outside * x + within + matmul((column - outside) * right, columns.mT)


INVERSES = {kind.name: kind for kind in (KroneckerInverse, EigenInverse, PartialEigenInverse)}


def inverse_of_state(state: Mapping[str, Any]) -> KroneckerInverse:
    """The inverse with this `state`."""
    made = lambda kinds, kind, **fields: kinds[kind](**fields)
    parts = {key: made(MATRICES, **x) if isinstance(x, Mapping) else x for key, x in state.items()}
    return cast("KroneckerInverse", made(INVERSES, **parts))


def two_sided(left: Tensor | None, x: Tensor, right: Tensor | None) -> Tensor:
    """``left @ x @ right`` for x (*batch, g, o, i); matrices are (g, d, d), or None for the identity."""
    x = x if left is None else matmul(left, x)
    return x if right is None else matmul(x, right)


def ranges(blocks: Sequence[int]) -> Iterator[slice]:
    """The rows of each diagonal block."""
    return (slice(end - n, end) for n, end in zip(blocks, itertools.accumulate(blocks), strict=True))
