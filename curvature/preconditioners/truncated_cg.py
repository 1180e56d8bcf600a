"""Curvature of the last batch, solved by conjugate gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvature.gradients import Jacobian
from curvature.operators import truncated_conjugate_gradient
from curvature.preconditioners.block_diagonal import BlockDiagonalCurvature
from curvature.preconditioners.full import FullBlock, Named
from curvature.preconditioners.inversion import invert
from curvature.preconditioners.least_squares import Damping
from curvature.preconditioners.statistics import CurvatureStatistics

WARM_START_FACTOR = 0.95  # times the last solution is where iterations start


class ConjugateGradientBlock(FullBlock):
    """The last batch alone, matrix-free: conjugate gradients preconditioned by running Kronecker factors.

    They start from the shortened last solution and stop when the quadratic model hardly decreases any more, as in
    Hessian-free optimization (Martens 2010, section 4; Martens and Sutskever 2012, section 8).
    """

    structure = "cg"
    state_fields = ("last", "factors")
    jacobian: Jacobian | None = None
    last: Tensor | None = None
    iterations: Tensor | int = 0  # for the last solution

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], is_sum: bool = False) -> None:
        super().__init__(shapes, is_sum)
        self.factors = BlockDiagonalCurvature()

    @staticmethod
    def update_all(blocks: Sequence[Any], statistics: CurvatureStatistics, decay: float) -> None:
        before = [block.updates for block in blocks]
        FullBlock.update_all(blocks, statistics, decay)
        for block, updates in zip(blocks, before, strict=True):
            if block.updates > updates:
                block.factors.update_average(statistics, decay)

    def summarize(self, jacobian: Jacobian) -> tuple[Jacobian, Tensor]:
        return jacobian, jacobian.norms().sum()

    def absorb(self, new: Jacobian, trace: float, decay: float) -> None:
        self.jacobian = new.merged()

    def decompose(self, damping: Damping) -> None:
        number = float(damping)
        invert(self.factors.blocks, 0.0, number)
        self.damping = number

    def solve_named(self, gradient: dict[str, Tensor], damping: Damping) -> Named:
        jacobian, count = self.jacobian, self.count
        assert jacobian is not None

        def product(v: Tensor) -> Tensor:
            return jacobian.flat(jacobian.transposed(jacobian.times(jacobian.split(v)))) / count + damping * v

        def precondition(v: Tensor) -> Tensor:
            named = jacobian.split(v)
            for block in self.factors.blocks:
                if block.is_ready and all(name in named for name in block.names):
                    named |= dict(zip(block.names, block.solve([named[name] for name in block.names]), strict=True))
            return jacobian.flat(named)

        right = jacobian.flat(gradient)
        start = None if self.last is None else WARM_START_FACTOR * self.last.to(right)
        self.last, self.iterations = truncated_conjugate_gradient(product, right, start, precondition)
        return jacobian.split(self.last.clone())  # the step scales the solution in place

    @property
    def is_ready(self) -> bool:
        return super().is_ready and self.jacobian is not None

    @property
    def bytes(self) -> int:
        """Memory of the batch and of the preconditioner."""
        own = 0 if self.jacobian is None else self.jacobian.bytes
        return own + super().bytes + sum(block.bytes for block in self.factors.blocks)

    def describe(self) -> str:
        return f"{super().describe()}, {int(self.iterations)} iterations"

    def state(self) -> dict[str, Any]:
        return super().state() | {"factors": self.factors.state_dict()}

    def after_restore(self) -> None:
        super().after_restore()
        state: Any = self.factors
        self.factors = BlockDiagonalCurvature()
        device = torch.device("cpu") if self.last is None else self.last.device
        self.factors.load_state_dict(state, dict.fromkeys(state, device))
