"""The running diagonal of one parameter's curvature."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvature.kronecker import not_zero, wide
from curvature.preconditioners.block import Block
from curvature.terms import Term


class DiagonalBlock(Block):
    """The diagonal of one parameter's block: mean over samples of its squared per-sample gradients."""

    structure = "diagonal"
    handed_on = ()  # every process can do that
    kept = ("values", "inverse")
    form = ("shape", "dtype")
    waiting = ("samples", "sum")

    def __init__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, reason: str) -> None:
        super().__init__([name], reason)
        self.shape, self.dtype = shape, wide(dtype)
        self.values: Tensor | None = None
        self.inverse: Tensor | None = None
        self.sum: Tensor | None = None

    def measured(self, terms: Sequence[Term]) -> Any:
        """The sum over a batch's samples of squared gradients, terms of one number of samples together."""
        found: dict[int, Tensor] = {}
        for term in terms:
            g = term.gradients().to(self.dtype)
            found[len(g)] = found[len(g)] + g if len(g) in found else g
        return torch.stack([g.square().sum(0) for g in found.values()]).sum(0)

    def take(self, found: Any, samples: float) -> None:
        self.samples += samples
        self.sum = found if self.sum is None else self.sum + found

    def join(self, found: dict[str, Any]) -> None:
        if found["sum"] is not None:
            self.take(found["sum"], found["samples"])

    def discard(self) -> None:
        self.sum, self.samples = None, 0

    def anew(self) -> Block:
        return DiagonalBlock(self.names[0], self.shape, self.dtype, self.reason)

    def sums(self, rank: int, size: int) -> dict[str, Tensor]:
        return {} if self.sum is None else {"sum": self.sum, "samples": self.sum.new_tensor(self.samples)}

    def take_sums(self, sums: Mapping[str, Tensor]) -> None:
        self.sum, self.samples = sums.get("sum"), float(sums.get("samples", 0))

    def fold(self, decay: float) -> None:
        new = None if self.sum is None or not self.samples else self.sum / self.samples
        self.discard()
        if new is not None:
            self.values = self.mixed(self.values, new, decay)
            self.updates += 1

    @property
    def is_ready(self) -> bool:
        return self.inverse is not None

    @property
    def smoothed(self) -> Tensor:
        """Few random vectors say little of single entries: the mean of all stands in until there are more."""
        assert self.values is not None
        return self.values.lerp(self.values.mean(), 1 / (1 + self.updates / 2))

    def decompose(self, damping: float) -> None:
        if self.values is not None:
            self.inverse = 1 / (self.smoothed + damping)

    @staticmethod
    def invert(blocks: Sequence[Any], share: float) -> None:
        for block in blocks:
            block.inverse = 1 / (block.smoothed + share * not_zero(block.mean_eigenvalue))

    @property
    def prepared(self) -> list[Tensor]:
        return [] if self.inverse is None else [self.inverse]

    def solve(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        assert self.inverse is not None
        return [(gradients[0].to(self.dtype) * self.inverse).to(gradients[0].dtype)]

    @property
    def mean_eigenvalue(self) -> Tensor:
        assert self.values is not None
        return self.values.mean()

    @property
    def dimension(self) -> int:
        return math.prod(self.shape)

    @property
    def expected(self) -> int:
        return 2 * self.dimension * self.dtype.itemsize

    def condition(self) -> float:
        return math.nan if self.inverse is None else float(self.inverse.amax() / self.inverse.amin())

    def describe(self) -> str:
        return "x".join(map(str, self.shape)) or "1"
