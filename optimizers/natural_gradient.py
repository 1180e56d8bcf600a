"""The natural gradient without an approximation of the curvature, for small and medium networks."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from curvature import Jacobian, LeastSquares
from optimizers.base import ModelOptimizer, check_arguments
from optimizers.quadratic import next_damping
from optimizers.replay import State
from optimizers.residuals import called as _called

HALVINGS = 30  # of the step, at most
TRIES = 12  # dampings tried before a step is given up
FIRST = 1e-3  # the first damping, relative to the largest eigenvalue
GROW = 4.0  # of the damping, after a step that was no good


class NaturalGradient(ModelOptimizer):
    """Gauss-Newton steps for a loss ``1/2 ||r||^2`` whose closure returns the residuals r (M,).

    Usage:
        opt = NaturalGradient(model)
        def closure():
            return torch.cat([interior(model) / len(x) ** 0.5, boundary(model) / len(y) ** 0.5])
        for _ in range(60):
            loss = opt.step(closure)

    The residuals may differentiate the model by ``torch.autograd.grad(..., create_graph=True)``, to any order. The step
    ``d = -J^+ r`` is solved for exactly, in the smaller of parameter and sample space (energy natural gradient,
    arXiv:2302.13163; in sample space arXiv:2402.10680), and halved until the loss stops falling, up to 30 times.
    Double precision is recommended: the condition number of the problem is squared.

    Args:
        model: its parameters that require a gradient are trained.
        lr: multiplies the step; the first that is tried.
        damping: added to ``J^T J``, in units of residual^2 / parameter^2. With zero the step is the shortest of all
            that solve the linear problem, and eigenvalues below 50 eps of the largest are left out.
        momentum: of the displacement, 0 to 1: the step solves for what it leaves (SPRING, arXiv:2401.10190).
        weight_decay: decoupled, ``p -= lr * weight_decay * p`` a step.
        adaptive: no line search; the damping follows the reduction ratio (Levenberg-Marquardt), a step that makes the
            loss worse is tried again with more.

    Raises:
        TypeError, ValueError: an argument of the wrong kind or out of range, by name.
    """

    def __init__(
        self, model: nn.Module, lr: float = 1.0, *, damping: float = 0.0, momentum: float = 0.0,
        weight_decay: float = 0.0, adaptive: bool = False,
    ) -> None:  # fmt: skip
        options = {"lr": lr, "damping": damping, "momentum": momentum, "weight_decay": weight_decay}
        check_arguments(model, options)
        if not isinstance(adaptive, bool):
            raise TypeError(f"adaptive: expected True or False, found {adaptive!r:.80}")
        super().__init__(model, options)
        self.is_adaptive = adaptive
        self.damping: float | None = None  # of an adaptive run

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor:  # type: ignore[override]
        """One step of all parameters.

        Args:
            closure: computes the residuals r (M,), M at least 1, and does not call ``backward``. It is called again for
                every length that is tried, with the same random numbers; buffers are as after the first call.

        Returns:
            The loss ``1/2 ||r||^2`` before the step.

        Raises:
            TypeError: there is no closure, or it returns no tensor.
            ValueError: what it returns is not (M,), or was computed without gradients.
        """
        if closure is None:
            raise TypeError(
                "NaturalGradient.step: pass a closure that returns the residuals (M,) of the loss 1/2 ||r||^2"
            )
        start = time.perf_counter()
        before = State(self.model)
        with self.health.timed("closure"):
            residuals = _called(closure)
        after = State(self.model)
        values = residuals.detach()
        loss = values.square().sum() / 2
        if not bool(torch.isfinite(loss)):
            self.skipped += 1
            self.health.entries.append({"step": self.steps, "accepted": False})
            return loss
        with self.health.timed("jacobian"), torch.enable_grad():
            problem = LeastSquares(Jacobian.of(residuals, self.model))
        del residuals

        def tried() -> float:
            with self.health.timed("trials"):
                before.restore()
                value = float(_called(closure).detach().square().sum()) / 2
            return value if math.isfinite(value) else math.inf

        search = self._by_damping if self.is_adaptive else self._by_length
        try:
            entry = search(problem, values, float(loss), tried)
        finally:
            after.restore()
        self.health.counts["failures"] += not entry["accepted"]
        self.health.entries.append(
            {"step": self.steps, "loss": float(loss), "seconds": time.perf_counter() - start} | entry
        )
        self.steps += 1
        return loss

    def _direction(self, problem: LeastSquares, values: Tensor, damping: float) -> dict[str, Tensor]:
        """``-J^+ r``, or with momentum what is left to solve for after the last displacement, and that."""
        momentum = self.param_groups[0]["momentum"]
        trained = self._trained()
        last = {
            name: self.state[p].get("displacement") for name, p in trained.items() if name in problem.jacobian.shapes
        }
        if not momentum or any(d is None for d in last.values()):
            return problem.solve(-values, damping)
        carried = {name: momentum * d for name, d in last.items()}
        rest = problem.solve(-values - problem.times(carried), damping)
        return {name: d + carried[name] for name, d in rest.items()}

    def _by_length(
        self, problem: LeastSquares, values: Tensor, loss: float, tried: Callable[[], float]
    ) -> dict[str, Any]:
        """Halve the step until the loss has fallen and falls no more."""
        with self.health.timed("solve"):
            direction = self._direction(problem, values, self.param_groups[0]["damping"])
        origin = {name: self._trained()[name].detach().clone() for name in direction}
        best, found = loss, 0.0
        for k in range(HALVINGS + 1):
            self._move(origin, direction, 0.5**k)
            value = tried()
            if value < best:
                best, found = value, 0.5**k
            elif found:
                break
        self._move(origin, direction, found)
        self._keep(direction, found)
        entry = {"accepted": found > 0, "step_size": found, "damping": self.param_groups[0]["damping"]}
        return entry | {"after": best}

    def _by_damping(
        self, problem: LeastSquares, values: Tensor, loss: float, tried: Callable[[], float]
    ) -> dict[str, Any]:
        """More damping until the loss falls."""
        if self.damping is None:
            self.damping = FIRST * problem.largest
        _ = problem.spectrum  # every damping is solved for with the same
        ratio = math.nan
        origin: dict[str, Tensor] = {}
        for _ in range(TRIES):
            with self.health.timed("solve"):
                direction = self._direction(problem, values, self.damping)
            origin = origin or {name: self._trained()[name].detach().clone() for name in direction}
            expected = loss - float((values + problem.times(direction)).square().sum()) / 2
            self._move(origin, direction, 1.0)
            ratio = (loss - tried()) / expected if expected > 0 else math.nan
            if ratio > 0:
                self._keep(direction, 1.0)
                entry = {"accepted": True, "step_size": 1.0, "damping": self.damping, "ratio": ratio}
                self.damping = next_damping(self.damping, ratio)
                return entry
            self.damping *= GROW
            self.health.counts["rollbacks"] += 1
        self._move(origin, direction, 0.0)
        self._keep(direction, 0.0)
        return {"accepted": False, "step_size": 0.0, "damping": self.damping, "ratio": ratio}

    def _move(self, origin: Mapping[str, Tensor], direction: Mapping[str, Tensor], length: float) -> None:
        """To a part of the step from where it begins."""
        options, trained = self._options(), self._trained()
        for name, start in origin.items():
            group, p = options[name], trained[name]
            decay = group["lr"] * group["weight_decay"] if length else 0.0
            p.copy_(start).mul_(1 - decay).add_(direction[name], alpha=length * group["lr"])

    def _keep(self, direction: Mapping[str, Tensor], length: float) -> None:
        """What the next step's momentum is of."""
        if self.param_groups[0]["momentum"]:
            for name, d in direction.items():
                self.state[self._trained()[name]]["displacement"] = d * length

    def report(self) -> str:
        """How every parameter is preconditioned."""
        return "\n".join(
            f"{name}  exact Gauss-Newton" if p.requires_grad else f"{name}  not trained"
            for name, p in self.model.named_parameters()
        )

    def state_dict(self) -> dict[str, Any]:
        """As for any optimizer, with the course of the run: plain tensors and numbers."""
        own = {"steps": self.steps, "skipped": self.skipped, "damping": self.damping}
        return super().state_dict() | {"natural_gradient": own | {"health": self.health.state()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = dict(state_dict)
        own = state_dict.pop("natural_gradient")
        super().load_state_dict(state_dict)
        self.steps, self.skipped, self.damping = own["steps"], own["skipped"], own["damping"]
        self.health.restore(own["health"])

    def __deepcopy__(self, memo: dict[int, Any]) -> NaturalGradient:
        """A copy that trains a copy of the model (the same copy, where both are copied together)."""
        new = type(self)(copy.deepcopy(self.model, memo), adaptive=self.is_adaptive)
        memo[id(self)] = new
        new.param_groups = [g | {"params": [memo[id(p)] for p in g["params"]]} for g in self.param_groups]
        new.load_state_dict(copy.deepcopy(self.state_dict()))
        return new
