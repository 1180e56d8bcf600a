"""The running diagonal of one parameter's curvature."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvature.kronecker import nonzero_or_one
from curvature.preconditioners.block import Block, Due, grouped
from curvature.terms import Term, sum_in_place


@dataclass
class DiagonalStatistics:
    """The sum over samples of squared gradients."""

    samples: float
    sum: Tensor

    def add_(self, other: DiagonalStatistics) -> None:
        self.samples += other.samples
        self.sum.add_(other.sum)

    def scale_vectors_(self, times: float) -> None:
        self.sum = self.sum * times**2

    def sums(self, rank: int, size: int) -> dict[str, Tensor]:
        return {"sum": self.sum, "samples": self.sum.new_tensor(self.samples)}


class DiagonalBlock(Block):
    """The diagonal of one parameter's block: mean over samples of its squared per-sample gradients."""

    structure = "diagonal"
    broadcast_fields = ()  # cheap enough for every process
    state_fields = ("values", "inverse")
    layout_fields = ("shape", "dtype")

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, reason: str) -> None:
        super().__init__([name], reason)
        self.shape, self.dtype = shape, torch.promote_types(dtype, torch.float32)
        self.values: Tensor | None = None

    def measure(self, terms: Sequence[Term], samples: float, rank: int = 0, world_size: int = 1) -> DiagonalStatistics:
        """Gradients of terms with the same number of samples are summed before they are squared."""
        found: dict[int, Tensor] = {}
        for term in terms:
            g = term.gradients().to(self.dtype)
            found[len(g)] = found[len(g)] + g if len(g) in found else g
        return DiagonalStatistics(samples, sum_in_place(g.square().sum(0) for g in found.values()))

    def statistics_from(self, sums: Mapping[str, Tensor]) -> DiagonalStatistics:
        return DiagonalStatistics(float(sums["samples"]), sums["sum"])

    def means(self, statistics: DiagonalStatistics) -> tuple[Tensor, list[Tensor], list[Tensor]] | None:
        if not statistics.samples:
            return None
        mean = statistics.sum / statistics.samples
        return mean, [mean.sum()], []

    def update(self, statistics: Any, means: Tensor, decay: float, weight: float) -> list[tuple[Tensor, Tensor]]:
        old, self.values = self.values, means if self.values is None else self.values.lerp(means, weight)
        self.updates += 1
        return [] if old is None else [(old, self.values)]

    def empty_like(self) -> Block:
        return DiagonalBlock(self.names[0], self.shape, self.dtype, self.reason)

    @staticmethod
    def invert(blocks: Sequence[Any], share: float, damping: float | None, due: Due) -> None:
        for places in grouped([(b.dtype, b.values.device) for b in blocks]):
            alike = [blocks[k] for k in places]
            damped = torch.cat([b.values.flatten() for b in alike])
            if damping is None:
                means = nonzero_or_one(torch.stack([b.mean_eigenvalue for b in alike]))
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
        wide = [own[0].to(block.dtype) for block, own in zip(blocks, gradients, strict=True)]
        found = torch._foreach_mul(wide, [block.inverse for block in blocks])
        return [[u.to(own[0].dtype)] for u, own in zip(found, gradients, strict=True)]

    @property
    def mean_eigenvalue(self) -> Tensor:
        assert self.values is not None
        return self.values.mean()

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return {self.names[0]: tuple(self.shape)}

    @property
    def expected_bytes(self) -> int:
        return 2 * self.dimension * self.dtype.itemsize

    def condition(self) -> float:
        return math.nan if self.inverse is None else float(self.inverse.amax() / self.inverse.amin())

    def describe(self) -> str:
        return "x".join(map(str, self.shape)) or "1"
