"""Accumulators of a layer's curvature over data: of a `Structure`, of Kronecker factors, of their eigenvalues.

Each is fed with `Chunk` after `Chunk`, and gives its operator in the end: ``scale * sum_n weights[n] sum_k u_kn
w_kn^T`` or an approximation of that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from curvature.gradients import layers_of
from curvature.kronecker import Affine, Basis, DenseSide, DiagonalSide, KroneckerStatistics, Reading, Scheme, Side
from curvature.operators import BlockDiagonal, Diagonal, EigenKronecker, Kronecker, Operator, RowBlocks, Space
from curvature.recording import Tape
from curvature.structures import Chunk, DiagonalStructure, Structure, Vectors
from curvature.terms import Term, TermsByVector, name_of_rows, row_ranges

Result = TypeVar("Result", bound=Operator)
Range = tuple[int, int]  # the first row, and the one after the last


class Accumulator(Generic[Result]):
    """Base: the sum for one block, whose parameters form a space."""

    def __init__(self, space: Space) -> None:
        self.space = space

    @property
    def names(self) -> tuple[str, ...]:
        return self.space.names

    def entries(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes."""
        return zip(self.space.names, self.space.shapes, strict=True)

    def add(self, chunk: Chunk) -> None:
        raise NotImplementedError

    def result(self, scale: float) -> Result:
        """The operator on the block's parameters; the sum is used up."""
        raise NotImplementedError

    def refine(self, block: Any) -> Accumulator[Any]:
        """An accumulator for a second pass over the data, which improves `block`, the result of the first."""
        if isinstance(block, Kronecker | EigenKronecker | RowBlocks):
            raise ValueError(
                f"factors: found {block!r}, but these data read {self.names[0]} in a way that has no such factors; "
                "make them of all data, or choose structure= for both"
            )
        # what no data of the first has reached is zero there, and data of the second may reach it
        is_zero = isinstance(block, Diagonal) and not bool(block.diagonal().any())
        return self if is_zero else FixedOperator(block)


class FixedOperator(Accumulator[Operator]):
    """A block that a second pass leaves as it is."""

    def __init__(self, block: Operator) -> None:
        super().__init__(block.space)
        self.block = block

    def add(self, chunk: Chunk) -> None:
        pass

    def result(self, scale: float) -> Operator:
        return self.block


class StructureAccumulator(Accumulator[Operator]):
    """The sum of a `Structure`."""

    def __init__(self, total: Structure) -> None:
        super().__init__(total.space)
        self.total = total

    def add(self, chunk: Chunk) -> None:
        self.total.add(chunk)

    def result(self, scale: float) -> Operator:
        self.total.scale_(scale)
        return self.total.operator()


class KroneckerAccumulator(Accumulator[Kronecker]):
    """One Kronecker product per group for each reading of the weight, merged into one at the end."""

    def __init__(self, space: Space, scheme: Scheme) -> None:
        super().__init__(space)
        self.total = KroneckerStatistics(scheme)

    def add(self, chunk: Chunk) -> None:
        vectors_of_weight = chunk.by_sample(self.names[0])
        if vectors_of_weight is None:
            return
        new, same = KroneckerStatistics(self.total.scheme), chunk.right is chunk.left
        left = self._readings(vectors_of_weight[0])
        right = left if same else self._readings(vectors_of_weight[1])
        for reading, vectors in left.items():
            if chunk.first:
                moment, number = new.scheme.activations(vectors[0])
                new.activations[reading] = _whole_side(moment), number
            part = new.scheme.backprops(vectors, None if same else right[reading], chunk.scales)
            if not same and part.ndim == 3:  # symmetric up to rounding of the right vectors
                part = (part + part.mT) / 2
            new.backprops[reading] = _whole_side(part)
        self.total.add_(new)

    def _readings(self, vectors: TermsByVector) -> dict[Reading, Sequence[Sequence[Affine]]]:
        """The terms of each vector by their reading of the weight: those of one pass are the same for all vectors."""
        try:
            first = self.total.scheme.readings(vectors[0])
        except ValueError as error:
            layer = self.names[0].rpartition(".")[0] or self.names[0]
            raise ValueError(
                f"{', '.join(self.names)}: a batch reads it in another form than the first one, as where only some of "
                f'the samples reach an expert; choose structure={{"{layer}": "dense"}} or "diagonal"'
            ) from error
        if len(first) == 1:
            return {reading: cast("Sequence[Sequence[Affine]]", vectors) for reading in first}
        by_reading: dict[Reading, list[list[Affine]]] = {}
        for terms in vectors:
            for reading, parts in self.total.scheme.readings(terms).items():
                by_reading.setdefault(reading, []).append(parts)
        return dict(by_reading)

    def result(self, scale: float) -> Kronecker:
        rows, columns = (side.unpacked().entries for side in self.total.factors(scale))
        return Kronecker(self.space, self.total.scheme.arrangement, rows, columns, is_symmetric=True)

    def refine(self, block: Any) -> Accumulator[Any]:
        if not isinstance(block, Kronecker | EigenKronecker) or block.arrangement != self.total.scheme.arrangement:
            raise ValueError(f"factors: expected Kronecker factors of {self.names[0]} as it is read, found {block!r}")
        return EigenAccumulator(self.total.scheme, block)


def _whole_side(moment: Tensor) -> Side:
    """All entries of a moment: sums over data are not stored as triangles."""
    return DiagonalSide(moment) if moment.ndim == 2 else DenseSide(moment)


class EigenAccumulator(Accumulator[EigenKronecker]):
    """The diagonal in the eigenbasis of Kronecker factors (arXiv:1806.03884, equation 11)."""

    def __init__(self, scheme: Scheme, factors: Kronecker | EigenKronecker) -> None:
        super().__init__(factors.space)
        eigen = factors if isinstance(factors, EigenKronecker) else factors.eigen
        self.basis = Basis(scheme, eigen.row_vectors, eigen.column_vectors)
        self.sum = torch.zeros_like(eigen.values)

    def add(self, chunk: Chunk) -> None:
        vectors = chunk.by_sample(self.names[0])
        if vectors is not None:
            self.sum += self.basis.products(*vectors, chunk.weights)

    def result(self, scale: float) -> EigenKronecker:
        rows, columns = self.basis.rows, self.basis.columns
        return EigenKronecker(self.space, self.basis.scheme.arrangement, rows, columns, scale * self.sum)


class LayersAccumulator(Accumulator[BlockDiagonal]):
    """One accumulator for each layer, made from the first chunk that has vectors for it; others have zero blocks."""

    def __init__(
        self, space: Space, make: Callable[[tuple[str, ...], Chunk], Accumulator[Any]], alone: Collection[str]
    ) -> None:
        super().__init__(space)
        self.make, self.alone = make, alone  # which parameters have a block of their own
        self.parts: dict[tuple[str, ...], Accumulator[Any]] = {}
        self.waiting = list(space.names)

    def add(self, chunk: Chunk) -> None:
        arrived = [name for name in self.waiting if chunk.of(name) is not None]
        if arrived:
            self.waiting = [name for name in self.waiting if name not in arrived]
            self.parts |= {names: self.make(names, chunk) for names in self._by_layer(chunk.tape, arrived)}
        for part in self.parts.values():
            part.add(chunk.on(part.space.device))

    def _by_layer(self, tape: Tape | None, names: Collection[str]) -> list[tuple[str, ...]]:
        """The names of each block; without a tape, of parameters that no data have met."""
        together = layers_of(tape, [name for name in names if name not in self.alone])
        return together + [(name,) for name in names if name in self.alone]

    def result(self, scale: float) -> BlockDiagonal:
        unread = map(self.space.subspace, self._by_layer(None, self.waiting))
        zeros = [StructureAccumulator(DiagonalStructure(space)) for space in unread]
        return BlockDiagonal(self.space, [part.result(scale) for part in [*self.parts.values(), *zeros]])

    def within(self, factors: BlockDiagonal) -> LayersAccumulator:
        """An accumulator for the second pass alone, given what the first has found; ValueError if it does not fit."""
        if not isinstance(factors, BlockDiagonal) or factors.space != self.space:
            raise ValueError(f"factors: expected those of {self.space}, as kfac gives them, found {factors!r}")

        def make(names: tuple[str, ...], chunk: Chunk) -> Accumulator[Any]:
            block = factors.blocks.get(names[0])
            if block is None or block.space.names != names:
                raise ValueError(f"factors: there is no block of {', '.join(names)}")
            return self.make(names, chunk).refine(block)

        return LayersAccumulator(self.space, make, self.alone)

    def refine(self, block: BlockDiagonal) -> LayersAccumulator:
        again = LayersAccumulator(self.space, self.make, self.alone)
        again.waiting = list(self.waiting)
        again.parts = {names: part.refine(block.blocks[names[0]]) for names, part in self.parts.items()}
        return again


class RowRangeAccumulator(Accumulator[RowBlocks]):
    """One accumulator for each range of rows of a weight and its bias that is read apart; they cover all, in order."""

    def __init__(self, space: Space, parts: Mapping[Range, Accumulator[Any]]) -> None:
        super().__init__(space)
        self.parts = dict(parts)

    def add(self, chunk: Chunk) -> None:
        left = self._split(chunk.left)
        whole = replace(chunk, left=left, right=left if chunk.right is chunk.left else self._split(chunk.right))
        for part in self.parts.values():
            part.add(whole)

    def _split(self, vectors: Vectors) -> Vectors:
        """The terms of each range, as if it were a parameter of its own."""
        by_rows: dict[str, list[Sequence[Term]]] = {}
        read = ((name, part) for name in self.names for terms in vectors.get(name, ()) for part in row_ranges(terms))
        for name, part in read:
            if (part.start, part.stop) not in self.parts:
                raise ValueError(
                    f"{name}: rows {part.start} to {part.stop} are read together, which was not so in the "
                    f'first batch; choose structure={{"{name}": "dense"}} or "diagonal"'
                )
            by_rows.setdefault(name_of_rows(name, part.start, part.stop), []).append(part.terms)
        return by_rows

    def result(self, scale: float) -> RowBlocks:
        where = {name: self.space.positions([name]).reshape(shape) for name, shape in self.entries()}
        order = [where[name][slice(*rows)].flatten() for rows in self.parts for name in self.names]
        blocks = [part.result(scale) for part in self.parts.values()]
        names = [name for block in blocks for name in block.space.names]
        shapes = [shape for block in blocks for shape in block.space.shapes]
        inner = Space(tuple(names), tuple(shapes), self.space.dtype, self.space.device)
        return RowBlocks(self.space, BlockDiagonal(inner, blocks), torch.cat(order))

    def refine(self, block: Any) -> Accumulator[Any]:
        ranges = [part.names[0] for part in self.parts.values()]
        if not isinstance(block, RowBlocks) or list(block.blocks) != ranges:
            raise ValueError(f"factors: expected blocks of {', '.join(ranges)}, which are read apart, found {block!r}")
        pairs = zip(self.parts.items(), block.blocks.values(), strict=True)
        return RowRangeAccumulator(self.space, {rows: part.refine(of_rows) for (rows, part), of_rows in pairs})
