"""The store for the curvature of all parameters of a model together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvature.gradients import Jacobian
from curvature.linalg import full_precision
from curvature.preconditioners.block import Block
from curvature.preconditioners.block_diagonal import NOTHING, CurvatureStore, Named
from curvature.preconditioners.full import DenseFullBlock, DiagonalFullBlock, FullBlock
from curvature.preconditioners.statistics import CurvatureStatistics, RowStatistics
from curvature.preconditioners.truncated_cg import ConjugateGradientBlock
from curvature.preconditioners.woodbury import WoodburyBlock
from curvature.recording import Tape


class FullCurvature(CurvatureStore):
    """One block for all parameters.

    Args:
        model: whose parameters they are.
        solver: "woodbury", "dense", "diagonal" or "cg".
        is_sum: whether G is a sum over samples, not a mean.
    """

    def __init__(self, model: nn.Module, solver: str, is_sum: bool = False) -> None:
        if not isinstance(solver, str) or solver not in SOLVERS:
            raise ValueError(f"solver: expected one of {', '.join(SOLVERS)}, found {solver!r:.80}")
        super().__init__()
        self.blocks: list[FullBlock] = []  # type: ignore[assignment]
        self.model, self.solver, self.is_sum = model, solver, is_sum
        self.kind = SOLVERS[solver]

    def measure(
        self,
        tape: Tape,
        outputs: Sequence[Tensor],
        vectors: Sequence[Tensor],
        count: int,
        rank: int = 0,
        world_size: int = 1,
        displacement: Named = NOTHING,
    ) -> CurvatureStatistics:
        """The rows of a recorded pass, arguments as for `CurvatureStore.measure`. Rows need no `displacement`."""
        jacobian = Jacobian.recorded(tape, outputs, vectors, self.model)
        block = self._block_of(jacobian.shapes)
        found = CurvatureStatistics(rows=RowStatistics([jacobian], count))
        if isinstance(block, ConjugateGradientBlock):
            for k, (_, terms) in enumerate(jacobian.parts):
                found.add_(block.factors.measure_terms(tape, dict(terms), count if k == 0 else 0))
        return found

    @full_precision()
    def update_average(self, statistics: CurvatureStatistics, decay: float) -> None:
        for block in self.blocks:
            block.update_average(statistics, decay)

    def right_hand_sides(self, gradients: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Parameters that the batch did not use have a gradient of zero.

        Raises:
            RuntimeError: nothing was seen since a state was loaded.
        """
        if not all(block.is_ready for block in self.blocks):
            raise RuntimeError(
                f'NaturalGradient(solver="{self.solver}").step: no forward pass of the model since the state was loaded'
            )
        unused = {name for block in self.blocks for name in block.names} - gradients.keys()
        return {**gradients, **{name: torch.zeros_like(trained[name]) for name in unused}}

    def _block_of(self, shapes: Mapping[str, tuple[int, ...]]) -> FullBlock:
        """The block of these parameters, a new one if others were trained before."""
        if not self.blocks or self.blocks[0].shapes != shapes:
            self.blocks = [self.kind(shapes, self.is_sum)]
        return self.blocks[0]

    def gather(self, statistics: CurvatureStatistics, objects: Callable[[Any], Sequence[Any]]) -> None:
        """Replace local rows by those of all processes, each of which then solves the whole problem."""
        own = statistics.rows
        known = [x for x in objects(own and (own.shapes, own.samples, own.times)) if x is not None]
        if not known:
            return
        shapes, _, times = known[0]
        device = next(self.model.parameters()).device
        rows = own.jacobian if own is not None else Jacobian((), shapes, torch.zeros((), device=device))
        rows, _ = rows.gathered(objects)
        self._block_of(shapes)
        statistics.rows = RowStatistics([rows], sum(samples for _, samples, _ in known), times)

    def summed_blocks(self) -> list[Block]:
        """The blocks of a preconditioner."""
        return [
            own for block in self.blocks if isinstance(block, ConjugateGradientBlock) for own in block.factors.blocks
        ]

    def complete(self, states: Sequence[Mapping[str, Any]], device: torch.device) -> None:
        for block in self.blocks:
            if isinstance(block, ConjugateGradientBlock):
                block.factors.complete(states, device)


SOLVERS: dict[str, type[FullBlock]] = {
    "woodbury": WoodburyBlock, "dense": DenseFullBlock, "diagonal": DiagonalFullBlock, "cg": ConjugateGradientBlock,
}  # fmt: skip
