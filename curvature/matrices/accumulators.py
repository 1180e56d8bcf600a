"""What builders add up over data beside structures: all layers, row ranges of one, a second pass over the data."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from curvature.gradients import layers_of
from curvature.kronecker import Basis
from curvature.operators import BlockDiagonal, Diagonal, EigenKronecker, Kronecker, Operator, RowBlocks, Space
from curvature.recording import Tape
from curvature.structures import Accumulator, Chunk, DiagonalStructure, EigenStructure, KroneckerStructure, Vectors
from curvature.terms import Term, name_of_rows, row_ranges

Range = tuple[int, int]  # the first row, and the one after the last


class FixedOperator(Accumulator):
    """A block that a second pass leaves as it is."""

    def __init__(self, block: Operator) -> None:
        super().__init__(block.space)
        self.block = block

    def add(self, chunk: Chunk) -> None:
        pass

    def result(self, scale: float) -> Operator:
        return self.block


class LayersAccumulator(Accumulator):
    """One accumulator for each layer, made from the first chunk that has vectors for it; others have zero blocks."""

    def __init__(
        self, space: Space, make: Callable[[tuple[str, ...], Chunk], Accumulator], alone: Collection[str]
    ) -> None:
        super().__init__(space)
        self.make, self.alone = make, alone  # which parameters have a block of their own
        self.parts: dict[tuple[str, ...], Accumulator] = {}
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
        zeros = [DiagonalStructure(space) for space in unread]
        return BlockDiagonal(self.space, [part.result(scale) for part in [*self.parts.values(), *zeros]])

    def refine(self, factors: BlockDiagonal) -> LayersAccumulator:
        """An accumulator for the second pass, given the result of the first; ValueError if it does not fit."""
        if not isinstance(factors, BlockDiagonal) or factors.space != self.space:
            raise ValueError(f"factors: expected those of {self.space}, as kfac gives them, found {factors!r}")

        def make(names: tuple[str, ...], chunk: Chunk) -> Accumulator:
            block = factors.blocks.get(names[0])
            if block is None or block.space.names != names:
                raise ValueError(f"factors: there is no block of {', '.join(names)}")
            return refine(self.make(names, chunk), block)

        return LayersAccumulator(self.space, make, self.alone)


class RowRangeAccumulator(Accumulator):
    """One accumulator for each range of rows of a weight and its bias that is read apart; they cover all, in order."""

    def __init__(self, space: Space, parts: Mapping[Range, Accumulator]) -> None:
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
        names = self.space.names
        read = ((name, part) for name in names for terms in vectors.get(name, ()) for part in row_ranges(terms))
        for name, part in read:
            if (part.start, part.stop) not in self.parts:
                raise ValueError(
                    f"{name}: rows {part.start} to {part.stop} are read together, which was not so in the "
                    f'first batch; choose structure={{"{name}": "dense"}} or "diagonal"'
                )
            by_rows.setdefault(name_of_rows(name, part.start, part.stop), []).append(part.terms)
        return by_rows

    def result(self, scale: float) -> RowBlocks:
        each = zip(self.space.names, self.space.shapes, strict=True)
        where = [self.space.positions([name]).reshape(shape) for name, shape in each]
        order = [positions[slice(*rows)].flatten() for rows in self.parts for positions in where]
        blocks = [part.result(scale) for part in self.parts.values()]
        names = [name for block in blocks for name in block.space.names]
        shapes = [shape for block in blocks for shape in block.space.shapes]
        inner = Space(tuple(names), tuple(shapes), self.space.dtype, self.space.device)
        return RowBlocks(self.space, BlockDiagonal(inner, blocks), torch.cat(order))

    def refine(self, block: Any) -> RowRangeAccumulator:
        ranges = [part.space.names[0] for part in self.parts.values()]
        if not isinstance(block, RowBlocks) or list(block.blocks) != ranges:
            raise ValueError(f"factors: expected blocks of {', '.join(ranges)}, which are read apart, found {block!r}")
        pairs = zip(self.parts.items(), block.blocks.values(), strict=True)
        return RowRangeAccumulator(self.space, {rows: refine(part, of_rows) for (rows, part), of_rows in pairs})


def refine(total: Accumulator, block: Any) -> Accumulator:
    """What a second pass over the data adds up to improve `block`, which is the result of the first."""
    if isinstance(total, RowRangeAccumulator):
        return total.refine(block)
    is_factored = isinstance(block, Kronecker | EigenKronecker)
    name = total.space.names[0]
    if isinstance(total, KroneckerStructure):
        if not is_factored or block.arrangement != total.scheme.arrangement:
            raise ValueError(f"factors: expected Kronecker factors of {name} as it is read, found {block!r}")
        eigen = block if isinstance(block, EigenKronecker) else block.eigen
        basis = Basis(total.scheme, eigen.row_vectors, eigen.column_vectors)
        return EigenStructure(block.space, total.scheme, basis)
    if is_factored or isinstance(block, RowBlocks):
        raise ValueError(
            f"factors: found {block!r}, but these data read {name} in a way that has no such factors; make them of all "
            "data, or choose structure= for both"
        )
    # what no data of the first has reached is zero there, and data of the second may reach it
    is_zero = isinstance(block, Diagonal) and not bool(block.diagonal().any())
    return total if is_zero else FixedOperator(block)
