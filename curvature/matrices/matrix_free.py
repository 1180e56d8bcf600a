"""Matrices of a model, a loss and data by their products: copied and pickled as model, loss and data can be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from curvature.gradients import Jacobian
from curvature.losses import TORCH_LOSSES, Injection, resolve
from curvature.matrices.blocks import collect
from curvature.matrices.passes import NotFewRows, RecordedBatch
from curvature.matrices.products import Repeated, require_symmetric, through_gradient, through_outputs
from curvature.matrices.wide_output import diagonal_chunks
from curvature.operators import MatrixFree, Operator, SampleSpace, Space
from curvature.recording import in_turn
from curvature.structures import Accumulator, Chunk, DenseStructure, DiagonalStructure
from curvature.terms import DenseGradients, Term, promote


def kept(operator: MatrixFree) -> AbstractContextManager[None]:
    """A context in which products with an operator reuse the graphs of its first product there.

    ``with curvature.kept(G):`` pays where many products follow each other while the model stays as it is: in conjugate
    gradients, Lanczos' method, or a loop of your own. Inside, a product does not go over the data, and makes no forward
    pass (several columns through group or batch norms make some); leaving the block frees the graphs. Multiples of G
    and sums with it use G's. `conjugate_gradient` and Lanczos' method do so themselves where the data are one batch and
    none of your code runs between the products.

    Inside, nothing may change that the products depend on: parameters, buffers, training mode, hooks and attributes of
    the model, its code, the loss and the numbers it reads, the data, autocast. Checked at every product are: which
    tensors the model, the loss and the data (tensors in lists and dicts) have, where they are and how often autograd
    has seen them change; training modes; the number of batches; autocast. All else is not: after
    ``parameter.data.mul_(2)``, or another number in the loss, products are those of before, without an error.

    Memory: the graphs of a forward and a backward pass over *all* batches, not over one at a time as outside. Where
    forward passes move buffers (spectral norms in training mode), nothing is kept.

    Args:
        operator: what `gauss_newton`, `fisher`, `empirical_fisher` or `hessian` has returned.

    Raises:
        TypeError: it is another operator.
        RuntimeError: at a product, if what is checked has changed; the message names it.
    """
    passes = operator.passes if isinstance(operator, MatrixFree) else None
    if passes is None:
        raise TypeError(
            "operator: expected what gauss_newton, fisher, empirical_fisher or hessian has returned, found "
            f"{type(operator).__name__}"
        )
    return passes.keeping()


class RowAccumulator(Accumulator):
    """The rows of all chunks, whose vectors hold the roots of their weights."""

    def __init__(self, space: Space) -> None:
        super().__init__(space)
        self.parts: list[tuple[int, dict[str, list[Term]]]] = []

    def add(self, chunk: Chunk) -> None:
        count, dtype, devices = len(chunk.weights), self.space.dtype, self.space.devices
        shapes = zip(self.space.names, self.space.shapes, strict=True)
        zeros = {name: torch.zeros((), dtype=dtype, device=d) for name, d in devices.items()}
        none = {name: [DenseGradients(zeros[name].expand(count, *shape))] for name, shape in shapes}
        for k in range(chunk.vectors):
            terms = {name: chunk.left[name][k] if name in chunk.left else none[name] for name in none}
            self.parts.append((count, {name: [promote(t, dtype) for t in parts] for name, parts in terms.items()}))

    def result(self, scale: float) -> SampleSpace:
        zero = torch.zeros((), dtype=self.space.dtype, device=self.space.device)
        shapes = dict(zip(self.space.names, self.space.shapes, strict=True))
        return SampleSpace(self.space, Jacobian(self.parts, shapes, zero).stacked(), scale)


@dataclass
class ThroughOutputs:
    """``sum_n J_n^T M_n J_n``, M_n the injection's matrix at the output of sample n."""

    passes: Repeated
    inject: Injection
    seed: int
    space: Space

    def operator(self) -> MatrixFree:
        known: Any = {"diagonal": self.diagonal, "dense": self.dense, "in_sample_space": self.in_sample_space}
        return MatrixFree(self.space, self.product, **known, passes=self.passes)

    def product(self, matrix: Tensor) -> Tensor:
        drawn = torch.Generator(self.space.device).manual_seed(self.seed)
        prepare = partial(through_outputs, inject=self.inject, drawn=drawn, passes=self.passes)
        return self.passes.times(prepare, matrix)

    def diagonal(self) -> Tensor:
        sums = DiagonalStructure(self.space)
        return collect(self.passes, self.inject, self.seed, sums, diagonal_chunks).diagonal()

    @in_turn()  # what is summed in place is made outside of inference mode, too
    def dense(self) -> Tensor:
        return collect(self.passes, self.inject, self.seed, DenseStructure(self.space)).to_dense()

    def in_sample_space(self, limit: int) -> Operator | None:
        """The matrix by its rows; None if there are more than `limit`, or the loss has no known root of its Hessian."""
        count = 0

        def chunks(run: RecordedBatch, inject: Injection, generator: torch.Generator) -> Iterator[Chunk]:
            nonlocal count
            count += inject.number(run.samples_first()[0], run.batch.count) * run.batch.count
            if count > limit:
                raise NotFewRows
            yield from run.chunks(inject, generator, as_rows=True)

        try:
            return collect(self.passes, self.inject, self.seed, RowAccumulator(self.space), chunks)
        except NotFewRows:
            return None


@dataclass
class ThroughGradient:
    """The Hessian of the loss."""

    passes: Repeated
    space: Space
    is_checked: bool = False

    def operator(self) -> MatrixFree:
        return MatrixFree(self.space, self.product, passes=self.passes)

    def product(self, matrix: Tensor) -> Tensor:
        if not self.is_checked:
            self._require_symmetric()
            self.is_checked = True
        return self.passes.times(through_gradient, matrix)

    def _require_symmetric(self) -> None:
        source = self.passes.source
        try:
            require_symmetric(self.space, self.passes)
        except RuntimeError as error:
            if source.loss is None or type(resolve(source.loss)) not in TORCH_LOSSES:
                raise
            # at its minimum the Hessian of a loss is rounding: that of other values tells whether torch has it right
            try:
                require_symmetric(self.space, Repeated(replace(source, loss=_waves)))
            except (TypeError, ValueError):  # the output is more than one tensor
                raise error from None


def _waves(output: Tensor, target: Any) -> Tensor:
    return output.sin().sum()
