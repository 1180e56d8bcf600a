"""Matrices by their rows ``v^T J_n``, kept as activations and backprops, where the data have few of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from curvature.gradients import Jacobian
from curvature.losses import Injection
from curvature.matrices.accumulators import Accumulator, Chunk
from curvature.matrices.block_structure import Passes, collected
from curvature.matrices.passes import RecordedBatch
from curvature.operators import Operator, SampleSpace, Space
from curvature.terms import DenseGradients, Term, promote


class NotFewRows(Exception):
    """There are more rows than asked for, or the matrix is no sum of squares of known rows."""


class RowAccumulator(Accumulator[SampleSpace]):
    """The rows of all chunks, whose vectors hold the roots of their weights."""

    def __init__(self, space: Space) -> None:
        super().__init__(space)
        self.parts: list[tuple[int, dict[str, list[Term]]]] = []

    def add(self, chunk: Chunk) -> None:
        count, dtype, devices = len(chunk.weights), self.space.dtype, self.space.devices
        for k in range(chunk.vectors):
            zeros = {name: torch.zeros((), dtype=dtype, device=d) for name, d in devices.items()}
            none = {name: [DenseGradients(zeros[name].expand(count, *shape))] for name, shape in self.entries()}
            terms = {name: chunk.left[name][k] if name in chunk.left else none[name] for name in self.names}
            self.parts.append((count, {name: [promote(t, dtype) for t in own] for name, own in terms.items()}))

    def result(self, scale: float) -> SampleSpace:
        zero = torch.zeros((), dtype=self.space.dtype, device=self.space.device)
        shapes = dict(self.entries())
        return SampleSpace(self.space, Jacobian(self.parts, shapes, zero).stacked(), scale)


def in_sample_space(passes: Passes, inject: Injection, seed: int, space: Space, limit: int) -> Operator | None:
    """The matrix by its rows; None if there are more than `limit`, or the loss has no known root of its Hessian."""
    found = 0

    def chunks(run: RecordedBatch, inject: Injection, generator: torch.Generator) -> Iterator[Chunk]:
        nonlocal found
        dims, count = run.batch.dims, run.batch.count
        output, loss, target = run.samples_first()
        found += inject.number(output, count) * count
        if found > limit:
            raise NotFewRows
        weights = run.weights(inject)
        roots = weights.sqrt().repeat_interleave(len(output) // count).reshape(-1, *[1] * (output.ndim - 1))
        sent = inject.pairs(output, loss, target, count=count, size=run.chunk_size, generator=generator)
        for number, (left, right) in enumerate(sent):
            if right is not None:
                raise NotFewRows
            for k, part in enumerate((left * roots).to(left).movedim(1, dims[1] + 1).split(run.cached_size)):
                terms = run.terms(part)
                yield run.chunk(len(part), terms, terms, weights, number == k == 0)

    try:
        return collected(passes, inject, seed, RowAccumulator(space), chunks)
    except NotFewRows:
        return None
