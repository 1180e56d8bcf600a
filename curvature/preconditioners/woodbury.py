"""Curvature of the last batch, solved in parameter or sample space, whichever is smaller."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from curvature.gradients import Jacobian
from curvature.preconditioners.full import FullBlock, Named
from curvature.preconditioners.least_squares import Damping, LeastSquares, at


class WoodburyBlock(FullBlock):
    """The last batch alone, solved in parameter or sample space, whichever is smaller (Woodbury's identity)."""

    structure = "woodbury"
    fresh: LeastSquares | None = None  # of the last batch, until `invert`
    problem: LeastSquares | None = None  # of the last batch whose decomposition succeeded
    divisor = 1.0  # its `count`
    scaled: Damping = 0.0  # its damping
    squares: Named | None = None  # the diagonal, if no decomposition has succeeded

    def summarize(self, jacobian: Jacobian) -> tuple[LeastSquares, Tensor]:
        found = LeastSquares(jacobian)
        return found, found.trace

    def absorb(self, new: LeastSquares, decay: float) -> None:
        self.fresh = new

    @staticmethod
    def decompose_each(blocks: Sequence[Any], dampings: Sequence[Damping]) -> None:
        """The host asks once for all blocks whether decompositions have succeeded."""
        new = [(b, damping * b.count) for b, damping in zip(blocks, dampings, strict=True) if b.fresh is not None]
        LeastSquares.prepare_all([block.fresh for block, _ in new], [scaled for _, scaled in new])
        for block, scaled in new:
            block.scaled, block.problem, block.divisor, block.fresh = scaled, block.fresh, block.count, None
        for block, damping in zip(blocks, dampings, strict=True):
            block.damping = damping

    @contextmanager
    def without_correlations(self) -> Iterator[None]:
        assert self.fresh is not None
        squares, self.fresh = self.fresh.jacobian.squares(), None
        self.squares = {name: x / self.count for name, x in squares.items()}
        yield

    def solve_named(self, gradient: dict[str, Tensor], damping: Damping) -> Named:
        if self.problem is None:
            assert self.squares is not None
            return {name: g / (self.squares[name] + at(damping, g)) for name, g in gradient.items()}
        scaled = {name: g * self.divisor for name, g in gradient.items()}
        return self.problem.precondition(scaled, self.scaled)

    @property
    def is_ready(self) -> bool:
        return super().is_ready and (self.problem is not None or self.squares is not None)

    @property
    def bytes(self) -> int:
        """Memory of the batch and of the decomposed matrix."""
        if self.problem is None:
            return 0
        matrices = [x for x in (self.problem.matrix, self.problem.dense) if x is not None]
        return self.problem.jacobian.bytes + sum(x.numel() * x.element_size() for x in matrices)

    def describe(self) -> str:
        kept = "" if self.problem is None else f", {len(self.problem.matrix)}x{len(self.problem.matrix)}"
        return super().describe() + kept
