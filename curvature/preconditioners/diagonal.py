"""The running diagonal of one parameter's curvature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from curvature.kronecker import nonzero_or_one
from curvature.preconditioners.block import Due, MeanFacts, group
from curvature.preconditioners.structure_block import StructureBlock
from curvature.structures import Structure


class DiagonalBlock(StructureBlock):
    """The diagonal of one parameter's block: mean over samples of its squared per-sample gradients."""

    structure = "diagonal"
    state_fields = ("average", "inverse")

    @property
    def values(self) -> Tensor:
        """The diagonal, of the parameter's shape."""
        assert self.average is not None
        return self.average.tensors[self.names[0]]

    def facts(self, mean: Structure) -> MeanFacts:
        return MeanFacts([list(mean.tensors.values())])

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
