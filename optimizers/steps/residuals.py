"""Steps on a closure of residuals r, the loss being ``1/2 ||r||^2``, and KFAC for physics-informed networks.

The Gauss-Newton matrix ``J^T J`` has Kronecker factors layer by layer (`curvature.preconditioners.residual_blocks`;
arXiv:2405.15603). What these make of the gradient, and of what the first directions leave of it, spans a space together
with the last displacements. The step is the minimum of the exact damped quadratic model
``1/2 ||r + J d||^2 + damping/2 ||d||^2`` in that space. Each direction takes one product with J, however many layers
get a step size of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from curvature.functional import ExactNorms
from curvature.gradients import Jacobian
from curvature.linalg import stack, to_host, widen
from curvature.preconditioners import ResidualBlock, residual_blocks, residual_inverses
from curvature.recording import ModelState, warn_once
from optimizers.distributed.processes import Processes
from optimizers.model_optimizer import check_trained, shared_option
from optimizers.report import FROZEN, Row
from optimizers.steps.adaptive import grouped
from optimizers.steps.closures import WITHOUT_THE_MODEL, check_computed
from optimizers.steps.layer_vector import inner
from optimizers.steps.quadratic_model import Quadratic, first_accepted, largest_curvature
from optimizers.steps.rule import (
    Evaluation,
    Named,
    Origin,
    Outcome,
    StepContext,
    StepRule,
    all_finite,
    kept_by_decay,
)

DIRECTIONS = 4  # that the Kronecker factors give
REMEMBERED = 3  # displacements that are directions again
FIRST_DAMPING = 1e-3  # relative to the curvature along the gradient
SINGLE_PRECISION = (
    "%s: the residuals are %s; the square of their Jacobian's condition number decides how far the loss falls, so that "
    "steps may soon stop helping: take double precision, model.double() and inputs of torch.float64"
)
SHRINK = 0.5  # of the damping after a good step: no noise in the batch calls for caution


def call_residuals(closure: Callable[[], Any]) -> Tensor:
    """The residuals (M,) of a closure, with their graph; refuses anything else."""
    with torch.enable_grad(), ExactNorms():
        residuals = closure()
    if not isinstance(residuals, Tensor):
        raise TypeError(f"closure: expected the residuals, a tensor (M,), found {type(residuals).__name__}")
    if residuals.ndim != 1 or not len(residuals):
        is_loss = ", which is a loss: return the vector that it is the sum of squares of" if not residuals.ndim else ""
        raise ValueError(f"closure: expected the residuals (M,), found shape {tuple(residuals.shape)}{is_loss}")
    return residuals


def loss_of(residuals: Tensor) -> Tensor:
    """``1/2 ||r||^2``, (); infinite where it is not finite."""
    return widen(residuals.square().sum()).nan_to_num(math.inf, math.inf, math.inf) / 2


class ResidualReplay:
    """Calls a closure of residuals for every tried step, with the same random numbers and buffers."""

    def __init__(self, model: nn.Module, closure: Callable[[], Any], processes: Processes) -> None:
        self.closure, self.before, self.processes = closure, ModelState(model), processes
        start = torch.autograd._get_sequence_nr()
        self.own = call_residuals(closure)  # residuals of this process
        if self.own.requires_grad and not check_computed([self.own], model, start, "residuals"):
            raise RuntimeError(WITHOUT_THE_MODEL.format("residuals"))
        self.values = processes.concatenated(self.own.detach())  # of all
        self.order: Tensor | None = None
        self.after = ModelState(model)

    def jacobian(self, model: nn.Module) -> Jacobian:
        """The Jacobian of all processes' residuals; reorders `values` to match its rows."""
        with torch.enable_grad():
            jacobian = Jacobian.of(self.own, model)
        if self.processes.size == 1:
            return jacobian
        whole, self.order = jacobian.gathered(self.processes.all_gather_objects)
        self.values = self.values[self.order]
        return whole

    def residuals(self) -> Tensor:
        """The residuals at the current parameters."""
        self.before.restore()
        residuals = self.processes.concatenated(call_residuals(self.closure).detach())
        return residuals if self.order is None else residuals[self.order]

    def loss(self) -> Tensor:
        """The loss () at the current parameters; infinite if it is not finite."""
        return loss_of(self.residuals())


class ResidualStep(StepRule):
    """Computes the Jacobian of a closure's residuals; subclasses step. Checkpoints take its public attributes."""

    differentiates_model = True
    otherwise: ClassVar[tuple[str, str]]  # how parameters outside of blocks are preconditioned, and why

    def __init__(self) -> None:
        self.damping = -1.0  # unknown
        self.moves: list[dict[str, Tensor]] = []  # the last displacements
        self._blocks: list[ResidualBlock] = []  # of the last step, for reports
        self._known: set[int] = set()  # numbers of residuals whose Jacobian was found before

    def move(self, jacobian: Jacobian, replay: ResidualReplay, context: StepContext, loss: float) -> dict[str, Any]:
        """Take the step, or leave the parameters, where that is their loss, as they are; the entry for the history."""
        raise NotImplementedError

    def step(self, context: StepContext, evaluation: Evaluation) -> Outcome:
        preconditioner = context.preconditioner
        if context.closure is None:
            raise TypeError(
                f"{preconditioner.owner}.step: the closure returned residuals before; pass it at every step"
            )
        model, timed = preconditioner.recorder.model, preconditioner.monitor.timed
        with timed("closure"):
            replay = ResidualReplay(model, context.closure, preconditioner.team.processes)
        if torch.finfo(replay.values.dtype).bits < 64:
            warn_once(SINGLE_PRECISION, preconditioner.owner, str(replay.values.dtype), logger="optimizers")
        loss = replay.values.square().sum() / 2
        if len(replay.values) not in self._known and not bool(loss.isfinite()):  # nothing can be learnt of the Jacobian
            replay.before.restore(numbers=False)
            return Outcome(loss, is_skipped=True)
        for name in ("damping", "momentum"):
            shared_option(context.options, name)
        try:
            with timed("jacobian"):
                jacobian = replay.jacobian(model)
            check_trained(jacobian.shapes, context.trained)
            self._known.add(len(replay.values))
            with timed("step"):
                # a root of zero has no derivative
                good = all_finite([loss, *jacobian.transposed(replay.values).values()])
                is_good, value = map(float, to_host([good, loss]))
                move = lambda: {"loss": value} | self.move(jacobian, replay, context, value) if is_good else None
                entry = preconditioner.monitor.attempt(move)
        finally:
            replay.after.restore()
        if entry is not None:
            return Outcome(loss, entry=entry, rollbacks=entry.pop("rollbacks"))
        if not bool(loss.isfinite()):
            replay.before.restore(numbers=False)
        return Outcome(loss, is_skipped=True)

    def state_dict(self) -> dict[str, Any]:
        state = {k: v for k, v in vars(self).items() if not k.startswith("_")}
        return state | {"moves": [dict(move) for move in state["moves"]]}

    def load_state_dict(self, state: Mapping[str, Any], trained: Named) -> None:
        like_parameters = lambda move: {name: d.to(trained[name]) for name, d in move.items() if name in trained}
        for name, value in {**state, "moves": [like_parameters(move) for move in state["moves"]]}.items():
            setattr(self, name, value)

    def rows(self, model: nn.Module) -> list[Row]:
        """How every parameter is preconditioned: a row for each block, and for each parameter outside."""
        rows = [Row(block.names, block.structure, block.describe(), reason=block.reason) for block in self._blocks]
        seen = {name for block in self._blocks for name in block.names}
        left = [(name, p) for name, p in model.named_parameters() if name not in seen]
        outside = [(name, self.otherwise if p.requires_grad else ("not trained", FROZEN)) for name, p in left]
        return rows + [Row([name], what, reason=why) for name, (what, why) in outside]


class Subspace:
    """Directions, each cut into groups of parameters, and the quadratic model over all that they span, in float64."""

    def __init__(
        self, jacobian: Jacobian, values: Tensor, groups: Sequence[Sequence[str]], is_careful: bool = False
    ) -> None:
        self.jacobian, self.values, self.groups, self.is_careful = jacobian, values, groups, is_careful
        self.flags: list[Tensor] = []  # whether minima on an accelerator are right
        self.directions: list[Named] = []
        self.residuals = widen(values)
        self.columns = self.residuals.new_zeros(jacobian.shape[0], 0)
        self.curvature = self.norms = self.residuals.new_zeros(0, 0)
        self.dtype = torch.float64

    def add(self, *directions: Named) -> None:
        if not directions:
            return
        self.directions += directions
        products = torch.cat([self.jacobian.columns(d, self.groups) for d in directions], 1)
        self.dtype = products.dtype
        columns = widen(products)
        self.columns = torch.cat([self.columns, columns], 1)
        self.curvature = _border(self.curvature, self.columns.mT @ columns)
        blocks = [[torch.diag(self._inner(d, other)) for other in self.directions] for d in directions]
        self.norms = _border(self.norms, torch.cat([torch.cat(row) for row in blocks], 1))

    def _inner(self, one: Named, other: Named) -> Tensor:
        products = stack(stack(widen(inner(one[k], other[k])) for k in group).sum() for group in self.groups)
        return products.to(self.residuals.device)

    def bring_to_host(self) -> bool:
        """The model from now on is on the host, which waits once; returns whether the minima so far can be used."""
        mine = [self.residuals, self.columns, self.curvature, self.norms]
        self.residuals, self.columns, self.curvature, self.norms, *flags = to_host([*mine, *self.flags])
        return all(flags)

    def minimum(self, damping: float) -> Tensor:
        """The coefficients of the damped minimum; on an accelerator about those, as long as nothing has failed."""
        model = Quadratic(self.columns.mT @ self.residuals, self.curvature, self.norms)
        least = 4 * torch.finfo(self.dtype).eps
        if self.is_careful or model.curvature.device.type == "cpu":
            return model.minimum(damping, least)
        alpha, ok = model.minimum_nearby(damping, least)
        self.flags.append(ok)
        return alpha

    def loss(self, alpha: Tensor) -> float:
        """``1/2 ||r + J d||^2`` of a combination, on the host."""
        return float((self.residuals + self.columns @ alpha).square().sum()) / 2

    def left(self, alpha: Tensor) -> Tensor:
        """``r + J d`` (M,) of a combination, where the residuals are."""
        return (self.residuals + self.columns @ alpha).to(self.values)

    def combined(self, alpha: Tensor) -> dict[str, Tensor]:
        """``d``, in the shapes of the parameters."""
        whole = alpha.reshape(len(self.directions), len(self.groups))
        rows: Any = whole.tolist() if alpha.device.type == "cpu" else whole
        total: dict[str, Tensor] = {}
        for direction, row in zip(self.directions, rows, strict=True):
            for group, factor in zip(self.groups, row, strict=True):
                for name in group:
                    d = direction[name]
                    d = d * (factor.to(d.device) if isinstance(factor, Tensor) else factor)
                    total[name] = total[name].add_(d) if name in total else d
        return total


class SubspaceStep(ResidualStep):
    """The damped minimum over what Kronecker factors make of the gradient, and the last displacements."""

    otherwise = "nothing yet", "known after the first step"

    def __init__(self) -> None:
        super().__init__()
        self._tries = 1  # of dampings, at the last step

    def move(self, jacobian: Jacobian, replay: ResidualReplay, context: StepContext, loss: float) -> dict[str, Any]:
        """See `ResidualStep`. The largest lr shortens the step, the others, relative to it, the directions."""
        jacobian, values, options = jacobian.merged(), replay.values, context.options
        parameters = {name: context.trained[name] for name in jacobian.shapes}
        self.moves = aligned(self.moves, parameters)
        rates = {name: float(options[name]["lr"]) for name in parameters}
        lr, blocks = max(rates.values()), residual_blocks(jacobian)
        if lr == 0 or loss == 0:  # a schedule that starts at zero, or nothing left to do
            entry = {"accepted": True, "rollbacks": 0}
            return entry | {"step_size": 0.0, "damping": self.damping, "ratio": math.nan}
        given = next(iter(options.values()))["damping"]
        gradient, self._blocks = jacobian.transposed(values), blocks
        if given is not None:
            self.damping = float(given)
        elif self.damping < 0:
            norm = max(sum(float(inner(g, g)) for g in gradient.values()), 1e-30)
            self.damping = FIRST_DAMPING * (max(float(jacobian.times(gradient).square().sum()), 1e-30) / norm)
        scales = {name: rate / lr for name, rate in rates.items()}
        space = self._span(jacobian, values, gradient, scales)
        if not space.bring_to_host():
            space = self._span(jacobian, values, gradient, scales, is_careful=True)
            space.bring_to_host()
        return self._first_accepted(space, replay, context, lr, loss)

    def _span(
        self, jacobian: Jacobian, values: Tensor, gradient: Named, scales: Mapping[str, float], is_careful: bool = False
    ) -> Subspace:
        """The last displacements, and what the factors make of what is left of the gradient, again and again."""
        layers = [{name: gradient[name] for name in block.names} for block in self._blocks]
        space = Subspace(jacobian, values, [list(group) for group in grouped(layers)], is_careful)
        space.add(*self.moves)
        inverses = residual_inverses(self._blocks, self.damping)
        left: Named = gradient
        for k in range(DIRECTIONS):
            if k:
                alpha = space.minimum(self.damping)
                d = space.combined(alpha)
                remaining = jacobian.transposed(space.left(alpha))
                left = {name: g.add(d[name], alpha=self.damping) for name, g in remaining.items()}
            solved: dict[str, Tensor] = {}
            for block, inverse in zip(self._blocks, inverses, strict=True):
                solved |= block.solve(inverse, left)
            space.add({name: d * -scales[name] for name, d in solved.items()})
        return space

    def _first_accepted(
        self, space: Subspace, replay: ResidualReplay, context: StepContext, lr: float, loss: float
    ) -> dict[str, Any]:
        """Take the minimum for the least of the tried dampings for which the loss falls."""
        options, origin = context.options, Origin({name: context.trained[name] for name in space.jacobian.shapes})
        kept = {name: kept_by_decay(options[name]) for name in origin.values}

        def attempt(damping: float) -> tuple[Tensor | float, tuple[Tensor, Named]]:
            alpha = lr * space.minimum(damping)
            move = space.combined(alpha)
            expected = loss - space.loss(alpha)
            origin.move(move, kept)
            return (loss - replay.loss()) / expected if expected > 0 else math.nan, (alpha, move)

        with origin:
            trial = first_accepted(attempt, self.damping, device=space.values.device, first=self._tries)
        self._tries = trial.rollbacks + 1
        if next(iter(options.values()))["damping"] is None:
            self.damping = trial.next_damping(largest_curvature(space.curvature, space.norms), SHRINK)
        if not trial.is_accepted:
            origin.move({})
            self.moves = []
            return trial.entry | {"step_size": 0.0}
        alpha, move = trial.step
        origin.move(move, kept)  # another one may have been tried since
        remembers = options[next(iter(move))]["momentum"] != 0
        self.moves = [*self.moves, move][-REMEMBERED:] if remembers else []
        first = alpha.reshape(-1, len(space.groups))[-DIRECTIONS]
        return trial.entry | {"step_size": float(first.mean())}


def aligned(moves: Sequence[Named], trained: Named) -> list[dict[str, Tensor]]:
    """Displacements of what is trained now; what was frozen did not move."""
    return [{name: move.get(name, torch.zeros_like(p)) for name, p in trained.items()} for move in moves]


def _border(matrix: Tensor, columns: Tensor) -> Tensor:
    """A symmetric matrix with new columns (all rows) and the rows that mirror them."""
    old = len(matrix)
    return torch.cat([torch.cat([matrix, columns[:old].mT]), columns], 1)
