"""The running mean of a `Structure`, for some parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from curvature.kronecker import nonzero_or_one
from curvature.operators import Diagonal, Operator
from curvature.preconditioners.block import STRUCTURES, Block, Due, MeanFacts, group
from curvature.structures import FORMS, Structure, average_structures, averaged_sparsity, scale_structures, shrinkage


class StructureBlock(Block):
    """The mean over samples of a structure.

    Args:
        form: its class.
        shapes: of the parameters, by name.
        dtype: of the parameters.
        reason: see `Block`.
    """

    broadcast_fields = ()  # every process inverts for itself
    state_fields: tuple[str, ...] = ("average", "inverted", "damping", "sparsity")
    layout_fields = ("shapes", "dtype")
    inverted: Structure | None = None  # the average at the last inversion
    damping = 0.0  # of that
    sparsity = 0.0  # one over the number of rows that the average rests on
    has_correlations = True
    scale_all = staticmethod(scale_structures)

    def __init__(
        self, form: type[Structure], shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, reason: str = ""
    ) -> None:
        super().__init__(list(shapes), reason)
        self.kind, self.structure = form, form.name
        self.shapes, self.dtype = dict(shapes), torch.promote_types(dtype, torch.float32)
        self.average: Structure | None = None

    def empty(self, device: torch.device) -> Structure:
        return self.kind(self.space(device))

    def facts(self, statistics: Structure, means: Structure) -> MeanFacts:
        return MeanFacts([[means.trace()]])

    @staticmethod
    def averages_all(blocks: Sequence[Any], means: Sequence[Structure], weights: Sequence[float]) -> list[Structure]:
        return average_structures(means, [block.average for block in blocks], weights)

    def update(
        self, statistics: Structure, averages: Structure, decay: float, weight: float
    ) -> list[tuple[Tensor, Tensor]]:
        old, self.average = self.average, averages
        self.sparsity = averaged_sparsity(self.sparsity, weight, statistics.counts[1])
        self.updates += 1
        return [] if old is None else [(old.flat(), self.average.flat())]

    @staticmethod
    def invert(blocks: Sequence[Any], share: float, damping: float | None, due: Due) -> None:
        dampings = [block.own_damping(share) if damping is None else damping for block in blocks]
        inverses = [block.inverse_of(block.average, added) for block, added in zip(blocks, dampings, strict=True)]
        for block, inverse, added in zip(blocks, inverses, dampings, strict=True):
            block.inverse, block.inverted, block.damping = inverse, block.average, added

    def own_damping(self, share: float) -> float:
        """A share of the mean eigenvalue, and more where few rows were seen."""
        rank = self.kind.rank(self.space(torch.device("cpu")))
        return (share + shrinkage(rank, self.sparsity)) * float(nonzero_or_one(self.mean_eigenvalue))

    def inverse_of(self, average: Structure, damping: float) -> Operator:
        if self.has_correlations:
            return average.inverse(damping)
        return Diagonal(average.space, average.operator().diagonal()).inverse(damping)

    @contextmanager
    def without_correlations(self) -> Iterator[None]:
        self.has_correlations = False
        try:
            yield
        finally:
            self.has_correlations = True

    def solve(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        assert self.inverse is not None
        flat = torch.cat([g.reshape(-1) for g in gradients]).to(self.dtype)
        parts = (self.inverse @ flat).split([g.numel() for g in gradients])
        return [part.view_as(g).to(g.dtype) for part, g in zip(parts, gradients, strict=True)]

    @property
    def mean_eigenvalue(self) -> Tensor:
        assert self.average is not None
        return self.average.trace() / self.dimension

    @property
    def expected_bytes(self) -> int:
        return 2 * self.kind.most_entries(self.space(torch.device("cpu"))) * self.dtype.itemsize

    def condition(self) -> float:
        if self.inverse is None:
            return float("nan")
        values = self.inverse.eigenvalues()
        return float(values[-1] / values[0])

    def describe(self) -> str:
        return self.kind.describe(self.space(torch.device("cpu")))

    def empty_like(self) -> Block:
        return type(self)(self.kind, self.shapes, self.dtype, self.reason)

    def state(self) -> dict[str, Any]:
        plain = lambda x: x.tensors if isinstance(x, Structure) else x
        return {key: plain(x) for key, x in super().state().items()}

    def after_restore(self) -> None:
        self.kind = FORMS[self.structure]
        self.shapes = {name: tuple(shape) for name, shape in self.shapes.items()}
        self.average, self.inverted = map(self._restore, (self.average, self.inverted))
        if self.inverted is not None:
            self.inverse = self.inverse_of(self.inverted, self.damping)

    def _restore(self, tensors: Any) -> Structure | None:
        if not tensors:
            return None
        return self.kind(self.space(next(iter(tensors.values())).device), tensors)


STRUCTURES["structure"] = StructureBlock  # of all forms that have no block of their own


class DiagonalBlock(StructureBlock):
    """The diagonal of one parameter's block: mean over samples of its squared per-sample gradients."""

    structure = "diagonal"
    state_fields = ("average", "inverse")

    @property
    def values(self) -> Tensor:
        """The diagonal, of the parameter's shape."""
        assert self.average is not None
        return self.average.tensors[self.names[0]]

    def facts(self, statistics: Structure, means: Structure) -> MeanFacts:
        return MeanFacts([list(means.tensors.values())])

    @staticmethod
    def invert(blocks: Sequence[Any], share: float, damping: float | None, due: Due) -> None:
        for places in group([(b.dtype, b.values.device) for b in blocks]):
            alike = [blocks[k] for k in places]
            damped = torch.cat([b.values.flatten() for b in alike])
            if damping is None:
                sums = torch._foreach_norm([b.values for b in alike], 1)
                means = nonzero_or_one(torch.stack(torch._foreach_div(sums, [float(b.values.numel()) for b in alike])))
                damped += torch.cat([m.expand(b.values.numel()) for m, b in zip(means, alike, strict=True)]).mul_(share)
            else:
                damped += damping
            # without damping, what has shown no curvature stays where it is: the pseudo-inverse
            whole = torch.where(damped > torch.finfo(damped.dtype).tiny, 1 / damped, 0.0)
            parts = torch._foreach_mul(whole.split([b.values.numel() for b in alike]), 1.0)  # each in memory of its own
            for block, inverse in zip(alike, parts, strict=True):
                block.inverse = inverse.view_as(block.values)

    def solve(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        return self.solve_all([self], [gradients])[0]

    @staticmethod
    def solve_all(blocks: Sequence[Any], gradients: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        wide = [right[0].to(block.dtype) for block, right in zip(blocks, gradients, strict=True)]
        solutions = torch._foreach_mul(wide, [block.inverse for block in blocks])
        return [[u.to(right[0].dtype)] for u, right in zip(solutions, gradients, strict=True)]

    def condition(self) -> float:
        return math.nan if self.inverse is None else float(self.inverse.amax() / self.inverse.amin())
