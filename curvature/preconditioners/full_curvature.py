"""The store for the exact curvature of all parameters of a model together, or of each layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvature.gradients import Jacobian, layers_of
from curvature.linalg import full_precision
from curvature.operators import truncated_conjugate_gradient
from curvature.preconditioners.block import BatchFacts, Block, CurvatureStatistics, RowStatistics, SquaredChange, invert
from curvature.preconditioners.block_diagonal import BlockDiagonalCurvature, CurvatureStore
from curvature.preconditioners.full import FullBlock, Named, WoodburyBlock
from curvature.preconditioners.least_squares import Damping
from curvature.recording import Tape

WARM_START_FACTOR = 0.95  # times the last solution is where iterations start


class FullCurvature(CurvatureStore):
    """One block for all parameters, or for those of each layer: its exact block of the whole matrix.

    Args:
        model: whose parameters they are.
        solver: "woodbury" or "cg".
        is_sum: whether G is a sum over samples, not a mean.
        layerwise: whether each layer has its own block, weight and bias together.
    """

    def __init__(self, model: nn.Module, solver: str, is_sum: bool = False, layerwise: bool = False) -> None:
        if not isinstance(solver, str) or solver not in SOLVERS:
            raise ValueError(f"solver: expected one of {', '.join(SOLVERS)}, found {solver!r:.80}")
        super().__init__()
        self.blocks: list[FullBlock] = []  # type: ignore[assignment]
        self.model, self.solver, self.is_sum, self.layerwise = model, solver, is_sum, layerwise
        self.kind = SOLVERS[solver]

    def measure(
        self, tape: Tape, outputs: Sequence[Tensor], vectors: Sequence[Tensor], batch: BatchFacts
    ) -> CurvatureStatistics:
        """The rows of a recorded pass."""
        jacobian = Jacobian.recorded(tape, outputs, vectors, self.model)
        self._arrange(jacobian.shapes, self._layers(tape, jacobian))
        statistics = CurvatureStatistics(
            rows=RowStatistics([jacobian], batch.count), along=self._along(jacobian, batch)
        )
        for block in self._iterating:
            store = block.factors
            for k, (_, terms) in enumerate(jacobian.restricted(block.names).parts):
                statistics.add_(store.measure_terms(tape, dict(terms), store.index(), batch.count if k == 0 else 0))
        return statistics

    @property
    def _iterating(self) -> list[ConjugateGradientBlock]:
        return [block for block in self.blocks if isinstance(block, ConjugateGradientBlock)]

    def _layers(self, tape: Tape, jacobian: Jacobian) -> list[tuple[str, ...]]:
        """The names of each block: those that there are and, of parameters that are read for the first time, theirs."""
        shapes = jacobian.shapes
        if not self.layerwise:
            return [tuple(shapes)]
        kept = [b.names for b in self.blocks if all(shapes.get(name) == shape for name, shape in b.shapes.items())]
        known = {name for names in kept for name in names}
        new = [name for name in shapes if name not in known and (tape.parameters[name].uses or jacobian.depends(name))]
        return kept + layers_of(tape, new)

    def _along(self, jacobian: Jacobian, batch: BatchFacts) -> SquaredChange:
        """The change along the last step; one block for all parameters needs none, for it predicts the same."""
        blocks = [b.names for b in self.blocks if all(name in batch.displacement for name in b.names)]
        if not self.layerwise or not blocks:
            return SquaredChange()
        changes = jacobian.columns(batch.displacement, blocks) * (batch.count**0.5 if self.is_sum else 1.0)
        return SquaredChange(changes.sum(1).square().sum(), frozenset(names[0] for names in blocks))

    @full_precision()
    def update_average(self, statistics: CurvatureStatistics, decay: float) -> None:
        self.kind.update_all(self.blocks, statistics, decay)

    def right_hand_sides(self, gradients: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Parameters that the batch did not use get zeros; RuntimeError before the first pass with a loaded state."""
        if not all(block.is_ready for block in self.blocks):
            raise RuntimeError(
                f'NaturalGradient(solver="{self.solver}").step: no forward pass of the model since the state was loaded'
            )
        unused = {name for block in self.blocks for name in block.names} - gradients.keys()
        return {**gradients, **{name: torch.zeros_like(trained[name]) for name in unused}}

    def _arrange(self, shapes: Mapping[str, tuple[int, ...]], layers: Iterable[tuple[str, ...]]) -> None:
        """One block for the parameters of each layer: those that there are, new ones where these are of others."""
        known = {block.names: block for block in self.blocks}

        def block(names: tuple[str, ...]) -> FullBlock:
            sizes, block_before = {name: shapes[name] for name in names}, known.get(names)
            if block_before is not None and block_before.shapes == sizes:
                return block_before
            return self.kind(sizes, self.is_sum)

        self.blocks = [block(names) for names in layers]

    def gather(self, statistics: CurvatureStatistics, objects: Callable[[Any], Sequence[Any]]) -> None:
        """Replace local rows by those of all processes, each of which then solves the whole problem."""
        rows_here, layers = statistics.rows, [block.names for block in self.blocks]
        known = [
            x
            for x in objects(rows_here and (rows_here.shapes, rows_here.samples, rows_here.times, layers))
            if x is not None
        ]
        if not known:
            return
        shapes, _, times, _ = known[0]
        device = next(self.model.parameters()).device
        missing = Jacobian((), shapes, torch.zeros((), device=device))
        rows = missing if rows_here is None else rows_here.jacobian.scaled(rows_here.times / times)
        rows, _ = rows.gathered(objects)
        self._arrange(shapes, _disjoint(names for *_, theirs in known for names in theirs))
        statistics.rows = RowStatistics([rows], sum(samples for _, samples, *_ in known), times)

    def load_state_dict(self, state: dict[str, dict[str, Any]], devices: Mapping[str, torch.device]) -> None:
        super().load_state_dict(state, devices)
        for block in self._iterating:  # their factors are where the layers are
            block.factors.load_state_dict(block.factors.state_dict(), devices)

    def summed_blocks(self) -> list[Block]:
        """The blocks of a preconditioner."""
        return [of_layer for block in self._iterating for of_layer in block.factors.blocks]

    def complete(self, states: Sequence[Mapping[str, Any]], device: torch.device) -> None:
        for block in self._iterating:
            of_block = [state for state in states if set(state["names"]) <= set(block.names)]
            block.factors.complete(of_block, device)


def _disjoint(layers: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Those layers that share no parameter with an earlier one: the same on all processes."""
    chosen: list[tuple[str, ...]] = []
    for names in layers:
        if not any(set(names) & set(other) for other in chosen):
            chosen.append(names)
    return chosen


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

    def absorb(self, new: Jacobian) -> None:
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
        of_jacobian = 0 if self.jacobian is None else self.jacobian.bytes
        return of_jacobian + super().bytes + sum(block.bytes for block in self.factors.blocks)

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


SOLVERS: dict[str, type[FullBlock]] = {"woodbury": WoodburyBlock, "cg": ConjugateGradientBlock}
