"""What builders add up over data beside structures: blocks of layers and of rows that are read apart, a second pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from curvature.gradients import layers_of
from curvature.kronecker import Basis
from curvature.operators import BlockDiagonal, Diagonal, EigenKronecker, Kronecker, Operator, Space
from curvature.structures import Accumulator, Chunk, DiagonalStructure, EigenStructure, KroneckerStructure


class FixedOperator(Accumulator):
    """A block that a second pass leaves as it is."""

    def __init__(self, block: Operator) -> None:
        super().__init__(block.space)
        self.block = block

    def add(self, chunk: Chunk) -> None:
        pass

    def result(self, scale: float) -> Operator:
        return self.block


class BlocksAccumulator(Accumulator):
    """One accumulator for each block; together they cover the parameters, or the rows of a weight and its bias."""

    def __init__(self, space: Space, parts: Iterable[Accumulator] = ()) -> None:
        super().__init__(space)
        self.parts = {part.space.names: part for part in parts}

    def add(self, chunk: Chunk) -> None:
        for part in self.parts.values():
            part.add(chunk.on(part.space.device))

    def result(self, scale: float) -> BlockDiagonal:
        return BlockDiagonal(self.space, [part.result(scale) for part in self.parts.values()])

    def refine(self, factors: Any) -> BlocksAccumulator:
        """An accumulator for the second pass, given the result of the first; ValueError if it does not fit."""
        blocks = {block.space.names: block for block in getattr(factors, "blocks", {}).values()}
        if blocks.keys() != self.parts.keys():
            ranges = ", ".join(first for first, *_ in self.parts)
            raise ValueError(f"factors: expected blocks of {ranges}, which are read apart, found {factors!r}")
        return BlocksAccumulator(self.space, [refine(part, blocks[names]) for names, part in self.parts.items()])


class LayersAccumulator(BlocksAccumulator):
    """Blocks of layers, made from the first chunk that has vectors for them; others are zero."""

    def __init__(
        self, space: Space, make: Callable[[tuple[str, ...], Chunk], Accumulator], alone: Collection[str]
    ) -> None:
        super().__init__(space)
        self.make, self.alone = make, alone  # which parameters have a block of their own
        self.waiting = list(space.names)

    def add(self, chunk: Chunk) -> None:
        arrived = [name for name in self.waiting if chunk.of(name) is not None]
        if arrived:
            self.waiting = [name for name in self.waiting if name not in arrived]
            layers = layers_of(chunk.tape, arrived, self.alone)
            self.parts |= {names: self.make(names, chunk) for names in layers}
        super().add(chunk)

    def result(self, scale: float) -> BlockDiagonal:
        unread = map(self.space.subspace, layers_of(None, self.waiting, self.alone))
        self.parts |= {space.names: DiagonalStructure(space) for space in unread}
        return super().result(scale)

    def refine(self, factors: BlockDiagonal) -> LayersAccumulator:
        if not isinstance(factors, BlockDiagonal) or factors.space != self.space:
            raise ValueError(f"factors: expected those of {self.space}, as kfac gives them, found {factors!r}")

        def make(names: tuple[str, ...], chunk: Chunk) -> Accumulator:
            block = factors.blocks.get(names[0])
            if block is None or block.space.names != names:
                raise ValueError(f"factors: there is no block of {', '.join(names)}")
            return refine(self.make(names, chunk), block)

        return LayersAccumulator(self.space, make, self.alone)


def refine(total: Accumulator, block: Any) -> Accumulator:
    """What a second pass over the data adds up to improve `block`, which is the result of the first."""
    if isinstance(total, BlocksAccumulator):
        return total.refine(block)
    is_factored = isinstance(block, Kronecker | EigenKronecker)
    name = total.space.names[0]
    if isinstance(total, KroneckerStructure):
        if not is_factored or block.arrangement != total.scheme.arrangement:
            raise ValueError(f"factors: expected Kronecker factors of {name} as it is read, found {block!r}")
        eigen = block if isinstance(block, EigenKronecker) else block.eigen
        basis = Basis(total.scheme, eigen.row_vectors, eigen.column_vectors)
        return EigenStructure(block.space, total.scheme, basis)
    if is_factored or isinstance(block, BlockDiagonal):
        raise ValueError(
            f"factors: found {block!r}, but these data read {name} in a way that has no such factors; make them of all "
            "data, or choose structure= for both"
        )
    # what no data of the first has reached is zero there, and data of the second may reach it
    is_zero = isinstance(block, Diagonal) and not bool(block.diagonal().any())
    return total if is_zero else FixedOperator(block)
