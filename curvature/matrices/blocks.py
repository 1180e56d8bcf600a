"""What builders add up over data: which structure each layer's block has, the pass over the data, and a second one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from curvature.arguments import uncalled
from curvature.gradients import layers_of
from curvature.kronecker import Basis, Scheme
from curvature.linalg import without_autocast
from curvature.losses import SEED, Injection, require_terms
from curvature.matrices.passes import DataSource, RecordedBatch
from curvature.matrices.products import Repeated
from curvature.operators import (
    DENSE_LIMIT,
    BlockDiagonal,
    Diagonal,
    EigenKronecker,
    Kronecker,
    Operator,
    Space,
    name_of_rows,
)
from curvature.structures import (
    Accumulator,
    Choice,
    Choices,
    Chunk,
    DenseStructure,
    DiagonalStructure,
    EigenStructure,
    KroneckerStructure,
)
from curvature.terms import Term, row_ranges

MAX_EXACT_SIZE = 1024  # up to this size a layer without Kronecker factors gets its exact block
Chunks = Callable[[RecordedBatch, Injection, torch.Generator], Iterator[Chunk]]
Passes = DataSource | Repeated  # the latter also checks that data are the same every time


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


def require_injection(inject: Any) -> None:
    """Raise TypeError for what is no injection."""
    if not isinstance(inject, Injection):
        raise TypeError(
            f"inject: expected exact(), sampled(), propagated(), isotropic() or empirical(), found {uncalled(inject)}"
        )


def seed_of(generator: torch.Generator | None) -> int:
    """A seed for several passes with equal draws, from the caller's generator if there is one."""
    if generator is None:
        return SEED
    return int(torch.randint(2**62, (), generator=generator, device=generator.device))


def collect(
    passes: Passes, inject: Injection, seed: int, accumulator: Accumulator, chunks: Chunks = RecordedBatch.chunks
) -> Any:
    """The operator of an accumulator, after one pass over the data: see `add_up`."""
    return accumulator.result(add_up(passes, inject, seed, accumulator, chunks))


def add_up(
    passes: Passes,
    inject: Injection,
    seed: int,
    accumulator: Accumulator,
    chunks: Chunks = RecordedBatch.chunks,  # sends back the injection's vectors, or others with the same result
) -> float:
    """Add up an accumulator in one pass over the data; returns what to multiply its sums with."""
    require_injection(inject)
    generator = torch.Generator(accumulator.space.device).manual_seed(seed)
    total = 0.0  # what the samples count for together

    def visit(run: RecordedBatch) -> None:
        nonlocal total
        for chunk in chunks(run.as_seen_by(inject), inject, generator):
            if chunk.first:
                total += float(chunk.weights.sum())
            with without_autocast(accumulator.space.devices.values()):
                accumulator.add(chunk)

    passes.each(visit)
    if passes.masses.is_sum:
        return 1.0
    require_terms(total)
    return 1 / total


def by_layers(space: Space, default: Choice, sharing: str, structure: Mapping[str, Choice] | None) -> LayersAccumulator:
    """An accumulator of the blocks of all layers, some of which have a structure that the caller has chosen."""
    choices = Choices(structure, space.names)

    def make(names: tuple[str, ...], chunk: Chunk) -> Accumulator:
        choice = choices.of(names)
        return _of_layer(space.subspace(names), chunk, choice or default, sharing, choice is not None)

    return LayersAccumulator(space, make, choices.alone)


def _of_layer(space: Space, chunk: Chunk, structure: Choice, sharing: str, is_chosen: bool) -> Accumulator:
    if not isinstance(structure, str):
        if not is_chosen:
            _require_held_size(space, "the exact block", space.size, "dense")
        return structure(space)
    vectors = chunk.of(space.names[0])
    factored = None if vectors is None else _kronecker(space, vectors[0][0], sharing)
    if factored is None and is_chosen:
        raise ValueError(
            f"structure: {space.names[0]} has no Kronecker factors (it is a bias alone, or read otherwise than by a "
            'layer\'s affine map); choose "dense" or "diagonal"'
        )
    if isinstance(factored, KroneckerStructure) and not is_chosen:
        scheme = factored.scheme
        for what, rows, kind in zip(("outputs", "inputs"), scheme.arrangement.sides[1:], scheme.kinds, strict=True):
            if not kind.is_diagonal:
                _require_held_size(space, f"the factor of its {what}", rows, "kronecker")
    return _exact(space) if factored is None else factored


def _require_held_size(space: Space, what: str, rows: int, structure: str) -> None:
    """Refuse more than `DENSE_LIMIT` rows, unless this structure is chosen."""
    if rows > DENSE_LIMIT:
        layer = space.names[0].rpartition(".")[0] or space.names[0]
        gigabytes = rows**2 * space.dtype.itemsize / 1e9
        other = " or 'kronecker'" if structure == "dense" else ""
        raise ValueError(
            f"{layer}: {what} would have {rows} x {rows} entries ({gigabytes:.0f} GB), over the limit of {DENSE_LIMIT} "
            f"rows; choose structure={{{layer!r}: 'diagonal'}}{other}, or {structure!r} to build it all the same"
        )


def _exact(space: Space) -> Accumulator:
    return (DenseStructure if space.size <= MAX_EXACT_SIZE else DiagonalStructure)(space)


def _kronecker(space: Space, terms: Sequence[Term], sharing: str) -> Accumulator | None:
    """An accumulator of Kronecker factors for a weight, or for each range of its rows; None if there are none."""
    scheme = Scheme.of(terms, space.shapes, space.dtype, sharing)
    if scheme is not None:
        return KroneckerStructure(space, scheme)
    apart = row_ranges(terms)
    if apart[0].terms is terms:
        return None
    parts: list[Accumulator] = []
    rows_of = lambda start, stop: space.subspace([name_of_rows(name, start, stop) for name in space.names])
    read, end = 0, space.shapes[0][0]
    for start, stop, of_rows in [*apart, (end, end, ())]:
        if start > read:
            parts.append(DiagonalStructure(rows_of(read, start)))
        if of_rows:
            part = rows_of(start, stop)
            scheme = Scheme.of(of_rows, part.shapes, space.dtype, sharing)
            parts.append(_exact(part) if scheme is None else KroneckerStructure(part, scheme))
        read = stop
    has_factors = any(isinstance(part, KroneckerStructure) for part in parts)
    return BlocksAccumulator(space, parts) if has_factors else None
