"""Steps for a closure of residuals r, the loss being ``1/2 ||r||^2``: KFAC for physics-informed networks.

The Gauss-Newton matrix ``J^T J`` has Kronecker factors by layer (`residual_blocks`; arXiv:2405.15603). What
these make of the gradient, layer by layer, and of what the first directions leave of it, spans a space with the last
displacements; the step is the minimum of the exact damped quadratic model ``1/2 ||r + J d||^2 + damping/2 ||d||^2`` in
that space. Each direction is one product with J, however many layers get a step size of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvature import Jacobian, isotropic
from curvature.functional import ExactNorms
from curvature.preconditioners import ResidualBlock, residual_blocks
from optimizers.distributed.processes import Processes
from optimizers.steps.adaptive import Adaptive, put
from optimizers.steps.closure_replay import State
from optimizers.steps.quadratic_model import GROW, Quadratic, next_damping
from optimizers.steps.updates import inner

DIRECTIONS = 4  # that the Kronecker factors give
MEMORY = 3  # displacements that are directions again
FIRST = 1e-3  # the first damping, relative to the curvature along the gradient
SHRINK = 0.5  # of the damping after a good step: no noise in the batch calls for caution
TRIES = 12  # dampings tried before a step is given up

Named = Mapping[str, Tensor]


class FoundResiduals(Exception):
    """A closure that was called for a loss has returned residuals."""


def called(closure: Callable[[], Any]) -> Tensor:
    """The residuals (M,) of a closure, with their graph.

    Raises:
        TypeError: it returns no tensor.
        ValueError: what it returns is not (M,).
    """
    with torch.enable_grad(), ExactNorms():
        residuals = closure()
    if not isinstance(residuals, Tensor):
        raise TypeError(f"closure: expected the residuals, a tensor (M,), found {type(residuals).__name__}")
    if residuals.ndim != 1 or not len(residuals):
        raise ValueError(f"closure: expected the residuals (M,), found shape {tuple(residuals.shape)}")
    return residuals


def loss_of(residuals: Tensor) -> float:
    """``1/2 ||r||^2``; infinite where it is not finite."""
    value = float(residuals.square().sum()) / 2
    return value if math.isfinite(value) else math.inf


def without_residuals(closure: Callable[[], Any]) -> Callable[[], Any]:
    """The closure of a loss; `FoundResiduals` where it returns a vector instead, TypeError for a matrix."""

    def watched() -> Any:
        value = closure()
        if isinstance(value, Tensor) and value.ndim == 1:
            raise FoundResiduals
        if isinstance(value, Tensor) and value.ndim > 1:
            raise TypeError(f"closure: expected the loss, or residuals (M,), found shape {tuple(value.shape)}")
        return value

    return watched


def refuse_arguments(arguments: Mapping[str, Any], block: str) -> None:
    """Raise where an argument of KFAC says what residuals have no place for."""
    if block != "kronecker":
        raise ValueError("EKFAC: the closure returned residuals, which KFAC and NaturalGradient take")
    if arguments["loss"] is not None:
        raise ValueError("loss: the closure returned residuals r, whose loss is 1/2 ||r||^2; leave loss= out")
    if not isinstance(arguments["inject"], type(isotropic())):
        raise ValueError(f"inject: nothing is sent back but the residuals themselves, found {arguments['inject']!r}")
    if arguments["sharing"] != "expand":
        raise ValueError(f'sharing: expected "expand" for residuals, found {arguments["sharing"]!r}')


def described(blocks: Sequence[ResidualBlock], model: nn.Module) -> str:
    """A line for each block of parameters: how it is preconditioned, and why where it has no Kronecker products."""
    rows = [f"{', '.join(block.names)}  {block.describe()}  {block.reason}".rstrip() for block in blocks]
    seen = {name for block in blocks for name in block.names}
    rest = [(name, p) for name, p in model.named_parameters() if name not in seen]
    return "\n".join(rows + [f"{name}  {'needs a step' if p.requires_grad else 'not trained'}" for name, p in rest])


class Trials:
    """A closure of residuals, called again for every step that is tried, as if for the first time."""

    def __init__(self, model: nn.Module, closure: Callable[[], Any], processes: Processes) -> None:
        self.closure, self.before, self.processes = closure, State(model), processes
        self.own = called(closure)  # residuals of this process
        self.values = processes.joined(self.own.detach())  # of all
        self.order: Tensor | None = None
        self.after = State(model)

    def jacobian(self, model: nn.Module) -> Jacobian:
        """Of the residuals of all processes; `values` are in the order of its rows from now on."""
        with torch.enable_grad():
            own = Jacobian.of(self.own, model)
        if self.processes.size == 1:
            return own
        whole, self.order = own.gathered(self.processes.objects)
        self.values = self.values[self.order]
        return whole

    def again(self) -> Tensor:
        """The residuals with the parameters as they are now."""
        self.before.restore()
        found = self.processes.joined(called(self.closure).detach())
        return found if self.order is None else found[self.order]

    def loss(self) -> float:
        """With the parameters as they are now; infinite where it is not finite."""
        return loss_of(self.again())


class Subspace:
    """Directions, each cut into groups of parameters, and the quadratic model over all that they span."""

    def __init__(self, jacobian: Jacobian, groups: Sequence[Sequence[str]]) -> None:
        self.jacobian, self.groups = jacobian, groups
        self.directions: list[Named] = []
        self.columns = torch.zeros(jacobian.shape[0], 0, dtype=torch.float64, device="cpu")
        self.curvature = self.norms = torch.zeros(0, 0, dtype=torch.float64, device="cpu")
        self.dtype = torch.float64

    def add(self, direction: Named) -> None:
        found = self.jacobian.columns(direction, self.groups)
        self.dtype = found.dtype
        columns = found.double().cpu()
        both = torch.cat([self.columns, columns], 1)
        self.directions.append(direction)
        norms = [torch.diag(self._inner(direction, other)) for other in self.directions]
        self.curvature = _bordered(self.curvature, both.mT @ columns)
        self.norms, self.columns = _bordered(self.norms, torch.cat(norms)), both

    def _inner(self, one: Named, other: Named) -> Tensor:
        found = [torch.stack([inner(one[k], other[k]).double() for k in group]).sum() for group in self.groups]
        return torch.stack(found).cpu()

    def minimum(self, residuals: Tensor, damping: float) -> Tensor:
        """The coefficients of the damped minimum."""
        model = Quadratic(self.columns.mT @ residuals.double().cpu(), self.curvature, self.norms)
        return model.minimum(damping, least=4 * torch.finfo(self.dtype).eps)

    def change(self, alpha: Tensor, like: Tensor) -> Tensor:
        """``J d`` (M,) of a combination."""
        return (self.columns @ alpha).to(like)

    def combined(self, alpha: Tensor) -> dict[str, Tensor]:
        """``d``, in the shapes of the parameters."""
        rows = alpha.reshape(len(self.directions), len(self.groups)).tolist()
        found: dict[str, Tensor] = {}
        for direction, row in zip(self.directions, rows, strict=True):
            for group, factor in zip(self.groups, row, strict=True):
                for name in group:
                    d = direction[name]
                    found[name] = found[name].add_(d, alpha=factor) if name in found else d * factor
        return found


class ResidualSteps:
    """What such a run remembers from step to step: the damping and the last displacements."""

    def __init__(self) -> None:
        self.damping = -1.0  # unknown
        self.moves: list[dict[str, Tensor]] = []
        self.wait, self.pause = 0, 1  # steps to go without coarser tries, and how many the next time that they are vain
        self.blocks: list[ResidualBlock] = []  # of the last step, for reports

    def move(
        self, jacobian: Jacobian, trials: Trials, parameters: Named, options: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Move the parameters so that the loss falls, or leave them as they are.

        Args:
            options: of each parameter's group. The largest lr shortens the step, the others, relative to it, the
                directions. A damping that is given stays.

        Returns:
            What to remember of the step.
        """
        jacobian, values = jacobian.merged(), trials.values
        self.align({name: parameters[name] for name in jacobian.shapes})
        rates = {name: float(options[name]["lr"]) for name in jacobian.shapes}
        lr = max(rates.values())
        entry: dict[str, Any] = {"loss": float(values.square().sum()) / 2, "accepted": True, "rollbacks": 0}
        if lr == 0 or entry["loss"] == 0:  # a schedule that starts at zero, or nothing left to do
            return entry | {"step_size": 0.0, "damping": self.damping, "ratio": math.nan}
        scales = {name: rate / lr for name, rate in rates.items()}
        given = next(iter(options.values()))["damping"]
        gradient = jacobian.transposed(values)
        if given is not None:
            self.damping = float(given)
        elif self.damping < 0:
            self.damping = FIRST * _curvature_along(jacobian, gradient)
        self.blocks = residual_blocks(jacobian)
        space = self._spanned(jacobian, values, gradient, scales)
        return entry | self._searched(space, trials, parameters, options, (lr, entry["loss"], given is not None))

    def align(self, trained: Named) -> None:
        """Keep of the displacements what is trained now; what was frozen did not move."""
        self.moves = [{name: move.get(name, torch.zeros_like(p)) for name, p in trained.items()} for move in self.moves]

    def _spanned(self, jacobian: Jacobian, values: Tensor, gradient: Named, scales: Mapping[str, float]) -> Subspace:
        """The last displacements, and what the factors make of what is left of the gradient, again and again."""
        layers = [{name: gradient[name] for name in block.names} for block in self.blocks]
        space = Subspace(jacobian, [list(group) for group in Adaptive.grouped(layers)])
        for move in self.moves:
            space.add(move)
        inverses = [block.inverse(self.damping) for block in self.blocks]
        left: Named = gradient
        for k in range(DIRECTIONS):
            if k:
                alpha = space.minimum(values, self.damping)
                d = space.combined(alpha)
                found = jacobian.transposed(values + space.change(alpha, values))
                left = {name: g.add(d[name], alpha=self.damping) for name, g in found.items()}
            solved: dict[str, Tensor] = {}
            for block, inverse in zip(self.blocks, inverses, strict=True):
                solved |= block.solve(inverse, left)
            space.add({name: d * -scales[name] for name, d in solved.items()})
        return space

    def _searched(
        self, space: Subspace, trials: Trials, parameters: Named, options: Mapping[str, Mapping[str, Any]],
        known: tuple[float, float, bool],
    ) -> dict[str, Any]:  # fmt: skip
        """The first minimum on a ladder of dampings that makes the loss fall."""
        lr, loss, is_fixed = known
        values, damping, ratio = trials.values, self.damping, math.nan
        start = {name: parameters[name].detach().clone() for name in space.jacobian.shapes}
        for rollbacks in range(TRIES):
            alpha = lr * space.minimum(values, damping)
            move = space.combined(alpha)
            expected = loss - float((values + space.change(alpha, values)).double().square().sum()) / 2
            try:
                for name, d in move.items():
                    group = options[name]
                    decay = group["lr"] * group["weight_decay"]
                    parameters[name].copy_(start[name]).mul_(1 - decay).add_(d)
                ratio = (loss - trials.loss()) / expected if expected > 0 else math.nan
            except BaseException:
                put(parameters, start)
                raise
            if math.isfinite(ratio) and ratio > 0:
                kept = MEMORY if options[next(iter(move))]["momentum"] else 0
                self.moves = [*self.moves, move][-kept:] if kept else []
                if not is_fixed:
                    self.damping = next_damping(damping, ratio, SHRINK)
                first = alpha.reshape(-1, len(space.groups))[-DIRECTIONS]
                entry = {"step_size": float(first.mean()), "damping": damping, "ratio": ratio}
                return entry | {"rollbacks": rollbacks}
            damping *= GROW
        put(parameters, start)
        self.moves = []
        if not is_fixed:
            self.damping = damping
        return {"accepted": False, "step_size": 0.0, "damping": damping, "ratio": ratio, "rollbacks": TRIES}

    def state(self) -> dict[str, Any]:
        own = {"damping": self.damping, "wait": self.wait, "pause": self.pause}
        return own | {"moves": [dict(move) for move in self.moves]}

    def restore(self, state: Mapping[str, Any], parameters: Named) -> None:
        self.damping, self.wait, self.pause = state["damping"], state["wait"], state["pause"]
        own = lambda move: {name: d.to(parameters[name]) for name, d in move.items() if name in parameters}
        self.moves = [own(move) for move in state["moves"]]


def _bordered(matrix: Tensor, columns: Tensor) -> Tensor:
    """A symmetric matrix with new columns (all rows) and the rows that mirror them."""
    old = len(matrix)
    return torch.cat([torch.cat([matrix, columns[:old].mT]), columns], 1)


def _curvature_along(jacobian: Jacobian, d: Named) -> float:
    """``|J d|^2 / |d|^2``, and no less than the least number that is not zero."""
    norm = sum(float(inner(x, x)) for x in d.values())
    return max(float(jacobian.times(d).square().sum()), 1e-30) / max(norm, 1e-30)
