"""Blocks for the curvature of parameters together, without approximation: ``G = 1/N sum_nk J_n^T v_nk v_nk^T J_n``.

J_n is the Jacobian of the outputs of sample n with respect to them, all of the model or those of a layer, and v_nk are
the vectors sent back; with exact vectors G is the Fisher or Gauss-Newton matrix of the batch, or its block. The (N k,
P) rows ``v_nk^T J_n`` are stored as activations and backprops.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from curvature.gradients import Jacobian
from curvature.linalg import full_precision, to_host, widen
from curvature.operators import Named
from curvature.preconditioners.block import Block, CurvatureStatistics, Due
from curvature.preconditioners.least_squares import Damping, LeastSquares, at


class FullBlock(Block):
    """Base: keeps the rows of the last batch in the form that its sub-class solves with."""

    layout_fields = ("shapes", "trace", "rank", "is_sum")
    broadcast_fields = ()  # every process solves for itself

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], is_sum: bool = False) -> None:
        super().__init__(list(shapes))
        self.shapes, self.is_sum = dict(shapes), is_sum
        self.trace = torch.zeros((), device="cpu")
        self.rank = 1  # an upper bound
        self.count = 1.0  # divisor of the sum over the last rows
        self.damping: Damping | None = None

    @staticmethod
    def update_all(blocks: Sequence[Any], statistics: CurvatureStatistics, decay: float) -> None:
        """Update blocks with the rows of a batch, if what they see is finite; the host asks once for all."""
        rows = statistics.rows
        if rows is None:
            return
        there = [block for block in blocks if all(rows.shapes.get(k) == shape for k, shape in block.shapes.items())]
        whole = rows.jacobian
        jacobians = [whole.restricted(block.names) for block in there]
        seen = [
            (block, restricted, *block.summarize(restricted))
            for block, restricted in zip(there, jacobians, strict=True)
        ]
        numbers = map(float, to_host([trace for *_, trace in seen]))
        for (block, jacobian, new, trace), number in zip(seen, numbers, strict=True):
            if not math.isfinite(number):
                continue
            block.count = (1 if block.is_sum else rows.samples) / rows.times**2
            block.trace, block.rank = widen(trace) / block.count, min(jacobian.shape)
            block.absorb(new)
            block.updates += 1

    def summarize(self, jacobian: Jacobian) -> tuple[Any, Tensor]:
        """What to keep of a batch, and the trace of ``J^T J``."""
        raise NotImplementedError

    def absorb(self, new: Any) -> None:
        """Keep the result of `summarize`, which is finite."""
        raise NotImplementedError

    def solve_named(self, gradient: dict[str, Tensor], damping: Damping) -> Named:
        """``(G + damping)^-1 gradient``."""
        raise NotImplementedError

    @full_precision()
    def solve(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        assert self.damping is not None
        given = dict(zip(self.names, gradients, strict=True))
        named = {name: g.to(torch.promote_types(g.dtype, torch.float32)) for name, g in given.items()}
        solution = self.solve_named(named, self.damping)
        return [solution[name].to(g.dtype) for name, g in given.items()]

    def decompose(self, damping: Damping) -> None:
        """Prepare `solve` with the damped curvature; if that fails, it raises before anything has changed."""
        self.damping = damping

    @staticmethod
    def invert(blocks: Sequence[Any], share: float, damping: float | None, due: Due) -> None:
        for block in blocks:
            block.decompose(block.own_damping(share) if damping is None else damping)

    def own_damping(self, share: float) -> Tensor:
        """A share of the mean eigenvalue that is not zero; without curvature 1, along the gradient."""
        damping = share * self.trace / self.rank
        return torch.where(damping != 0, damping, 1.0)

    @property
    def is_ready(self) -> bool:
        return self.damping is not None and self.updates > 0

    @property
    def mean_eigenvalue(self) -> Tensor:
        return self.trace / self.dimension

    def state(self) -> dict[str, Any]:
        return super().state() | {"trace": float(self.trace)}

    def after_restore(self) -> None:
        self.damping = None
        self.trace = torch.tensor(float(self.trace), dtype=torch.float64, device="cpu")
        self.shapes = {name: tuple(shape) for name, shape in self.shapes.items()}


class WoodburyBlock(FullBlock):
    """The last batch alone, solved in parameter or sample space, whichever is smaller (Woodbury's identity)."""

    structure = "woodbury"
    fresh: LeastSquares | None = None  # of the last batch, until `invert`
    problem: LeastSquares | None = None  # of the last batch whose decomposition succeeded
    divisor = 1.0  # its `count`
    scaled: Damping = 0.0  # its damping
    squares: Named | None = None  # the diagonal, if no decomposition has succeeded

    def summarize(self, jacobian: Jacobian) -> tuple[LeastSquares, Tensor]:
        problem = LeastSquares(jacobian)
        return problem, problem.trace

    def absorb(self, new: LeastSquares) -> None:
        self.fresh = new

    @staticmethod
    def invert(blocks: Sequence[Any], share: float, damping: float | None, due: Due) -> None:
        """The host asks once for all blocks whether decompositions have succeeded."""
        dampings = [block.own_damping(share) if damping is None else damping for block in blocks]
        new = [(b, added * b.count) for b, added in zip(blocks, dampings, strict=True) if b.fresh is not None]
        LeastSquares.prepare_all([block.fresh for block, _ in new], [scaled for _, scaled in new])
        for block, scaled in new:
            block.scaled, block.problem, block.divisor, block.fresh = scaled, block.fresh, block.count, None
        for block, added in zip(blocks, dampings, strict=True):
            block.damping = added

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
