"""The exact curvature of all parameters together, or of each layer: ``G = 1/N sum_nk J_n^T v_nk v_nk^T J_n``.

J_n is the Jacobian of the outputs of sample n with respect to the parameters, and v_nk are the vectors sent back; with
exact vectors G is the Fisher or Gauss-Newton matrix of the batch, or its block. The (N k, P) rows ``v_nk^T J_n`` are
stored as activations and backprops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from curvature.gradients import Jacobian, layers_of
from curvature.linalg import full_precision, to_host, widen
from curvature.operators import Named, truncated_conjugate_gradient
from curvature.preconditioners.block import (
    BatchFacts,
    Block,
    CurvatureStatistics,
    Due,
    RowStatistics,
    SquaredChange,
    invert,
)
from curvature.preconditioners.block_diagonal import BlockDiagonalCurvature, CurvatureStore
from curvature.preconditioners.least_squares import Damping, LeastSquares, at
from curvature.recording import Tape

WARM_START_FACTOR = 0.95  # times the last solution is where iterations start


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

    @staticmethod
    def invert(blocks: Sequence[Any], share: float, damping: float | None, due: Due) -> None:
        for block in blocks:
            number = float(block.own_damping(share) if damping is None else damping)
            invert(block.factors.blocks, 0.0, number)
            block.damping = number

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
