"""Curvature of all parameters of a model together as a store that recorded passes feed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvature.gradients import Jacobian
from curvature.preconditioners.block import Block
from curvature.preconditioners.block_diagonal import Blocks
from curvature.preconditioners.full import DenseWhole, DiagonalWhole, WholeBlock
from curvature.preconditioners.truncated_cg import ConjugateGradients
from curvature.preconditioners.woodbury import Woodbury
from curvature.recording import Tape


class WholeCurvature(Blocks):
    """One block for all parameters.

    Args:
        model: whose parameters they are.
        solver: "woodbury", "dense", "diagonal" or "cg".
        is_sum: whether G is the sum over samples, not the mean.
    """

    def __init__(self, model: nn.Module, solver: str, is_sum: bool = False) -> None:
        if not isinstance(solver, str) or solver not in SOLVERS:
            raise ValueError(f"solver: expected one of {', '.join(SOLVERS)}, found {solver!r:.80}")
        super().__init__()
        self.blocks: list[WholeBlock] = []  # type: ignore[assignment]
        self.model, self.kind, self.is_sum = model, SOLVERS[solver], is_sum

    def record(self, tape: Tape, outputs: Sequence[Tensor], vectors: Sequence[Tensor], count: int) -> None:
        """Take the rows of vectors (k, *shape) sent back from the outputs of a recorded pass over `count` samples."""
        jacobian = Jacobian.recorded(tape, outputs, vectors, self.model)
        block = self.blocks[0] if self.blocks else None
        if block is None or block.shapes != jacobian.shapes:  # or other parameters are trained now
            block = self.kind(jacobian.shapes, self.is_sum)
            self.blocks = [block]
        block.add_rows(tape, jacobian, count)

    def gather(self, objects: Callable[[Any], Sequence[Any]]) -> None:
        """Have the rows of all processes: each then solves the whole problem, all alike."""
        own = self.blocks[0] if self.blocks and self.blocks[0].samples else None
        known = [x for x in objects(own and (own.shapes, own.samples, own.times)) if x is not None]
        if not known:
            return
        shapes, _, times = known[0]
        device = next(self.model.parameters()).device
        rows = own.whole() if own is not None else Jacobian((), shapes, torch.zeros((), device=device))
        rows, _ = rows.gathered(objects)
        if own is None:
            own = self.kind(shapes, self.is_sum)
            self.blocks = [own]
        own.new, own.samples, own.times = [rows], sum(samples for _, samples, _ in known), times

    def holders(self) -> dict[str, Block]:
        """The blocks of a preconditioner."""
        inner = [block.factors.holders() for block in self.blocks if isinstance(block, ConjugateGradients)]
        return inner[0] if inner else {}

    def complete(self, states: Sequence[Mapping[str, Any]], device: torch.device) -> None:
        for block in self.blocks:
            if isinstance(block, ConjugateGradients):
                block.factors.complete(states, device)


SOLVERS: dict[str, type[WholeBlock]] = {
    "woodbury": Woodbury, "dense": DenseWhole, "diagonal": DiagonalWhole, "cg": ConjugateGradients,
}  # fmt: skip
