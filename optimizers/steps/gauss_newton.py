"""Gauss-Newton steps on residuals, solved exactly, for losses ``1/2 ||r||^2``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from curvature.gradients import Jacobian
from curvature.preconditioners import LeastSquares
from optimizers.steps.line_search import LinePoint, LineSearch, accept, times_lr
from optimizers.steps.quadratic_model import first_accepted
from optimizers.steps.residuals import ResidualReplay, ResidualStep, aligned, loss_of
from optimizers.steps.rule import StepContext

FIRST_DAMPING = 1e-3  # relative to the largest eigenvalue
CUTOFFS = 0.0, 1e-12, 1e-10, 1e-8, 1e-6  # eigenvalues left out, relative to the largest: first those that are rounding
LEAST_PROGRESS = 0.03  # part of the decrease promised by the linear problem below which the next cutoff is tried
NEAR_MINIMUM = 0.01  # promised part of the loss below which a straight step will do
LONGEST_PAUSE = 16  # steps without another try after so many in vain
BEND_STEP = 0.1  # part of a step over which its curvature is seen
LEAST_STEP = 2.0**-10  # for that, where no step was better


class GaussNewtonStep(ResidualStep):
    """``d = -J^+ r`` in the smaller of parameter and sample space.

    Without `by_damping` the step is bent to second order (geodesic acceleration, arXiv:1201.5885) and halved until the
    loss stops falling; coarser pseudo-inverses are tried where that brings little. With `by_damping` the damping
    follows the reduction ratio (Levenberg-Marquardt), and there is no line search.
    """

    otherwise = "exact Gauss-Newton", ""

    def __init__(self, by_damping: bool) -> None:
        super().__init__()
        self._by_damping = by_damping
        self.wait, self.pause = 0, 1  # steps to go without coarser tries, and how many after the next tries in vain
        self._counts: dict[str, int] = {}  # of a `LineSearch`

    def move(self, jacobian: Jacobian, replay: ResidualReplay, context: StepContext, loss: float) -> dict[str, Any]:
        if not any(group["lr"] for group in context.options.values()):  # a schedule that begins at zero
            return {"accepted": True, "step_size": 0.0, "rollbacks": 0}
        shared = next(iter(context.options.values()))  # the groups agree: `ResidualStep` has asked
        with context.preconditioner.monitor.timed("gram"):
            problem = LeastSquares(jacobian)
            problem.prepare(0.0 if self._by_damping else shared["damping"] or 0.0)
        parameters = {name: context.trained[name] for name in jacobian.shapes}
        self.moves = aligned(self.moves, parameters)

        def evaluate() -> tuple[Tensor, Tensor]:
            residuals = replay.residuals()
            return residuals.square().sum() / 2, residuals

        search = LineSearch(parameters, loss, evaluate, self._counts)
        step = _Step(self, problem, replay.values, search, context)
        with search.start:
            entry, point = step.levenberg_marquardt() if self._by_damping else step.line_search()
            accept(search, point, context.options)
        is_kept = shared["momentum"] and point.step_size
        self.moves = [problem.jacobian.split(point.displacement)] if is_kept else []
        return entry | {"accepted": point.step_size > 0, "step_size": point.step_size}


class _Step:
    """One step: the linear problem, the residuals that it is of, and how far to go along its solutions."""

    def __init__(
        self, memory: GaussNewtonStep, problem: LeastSquares, values: Tensor, search: LineSearch, context: StepContext
    ) -> None:
        self.memory, self.problem, self.values, self.search = memory, problem, values, search
        self.options, self.timed = context.options, context.preconditioner.monitor.timed
        shared = next(iter(context.options.values()))
        self.damping, self.momentum = shared["damping"] or 0.0, shared["momentum"] or 0.0

    def line_search(self) -> tuple[dict[str, Any], LinePoint]:
        """The lowest loss along steps bent to second order: by ``J^+``, or coarser ones where that brings little."""
        memory, loss = self.memory, self.search.origin.loss
        best, count = self.search.origin, 0
        d = self._direction(self.damping)
        left = self._linear_loss(d)
        memory.wait = max(0, memory.wait - 1)
        for cutoff in CUTOFFS if self.damping == 0 and not memory.wait else CUTOFFS[:1]:
            if cutoff:
                d = self._direction(self.damping, cutoff)
            with self.timed("trials"):
                lowest = self.search.lowest(d.mul, self.search.origin, "straight")
                promised = loss - float(left)
                if promised >= NEAR_MINIMUM * loss:
                    lowest = self._bend(d, lowest, cutoff)
            best = min(best, lowest, key=lambda point: point.loss)
            if loss - best.loss > LEAST_PROGRESS * promised:
                memory.pause = 1
                break
            count += 1
        if count == len(CUTOFFS):  # in vain: not again at once
            memory.wait, memory.pause = memory.pause + 1, min(2 * memory.pause, LONGEST_PAUSE)
        return {"damping": self.damping, "after": best.loss, "coarser": count, "rollbacks": 0}, best

    def levenberg_marquardt(self) -> tuple[dict[str, Any], LinePoint]:
        """More damping until the loss falls; it follows the reduction ratio."""
        memory, loss, largest = self.memory, self.search.origin.loss, self.problem.largest
        if memory.damping <= 0:
            memory.damping = FIRST_DAMPING * largest

        def attempt(damping: float) -> tuple[Tensor, LinePoint]:
            d = self._direction(damping)
            expected = loss - self._linear_loss(d)
            with self.timed("trials"):
                after, _ = self.search.evaluated(d)
            return torch.where(expected > 0, (loss - after) / expected, math.nan), LinePoint(d, math.nan, None, 1.0)

        trial = first_accepted(attempt, memory.damping, device=self.values.device)
        memory.damping = trial.next_damping(largest)
        return trial.entry, trial.step if trial.is_accepted else self.search.origin

    def _direction(self, damping: float, cutoff: float = 0.0) -> Tensor:
        """``-J^+ r``, or with momentum the last displacement and what it leaves to solve for (SPRING)."""
        problem, memory = self.problem, self.memory
        with self.timed("solve"):
            if not memory.moves:
                return times_lr(problem.solve(-self.values, damping, cutoff), self.options)
            carried = {name: self.momentum * d for name, d in memory.moves[-1].items()}
            rest = problem.solve(-self.values - problem.times(carried), damping, cutoff)
            return times_lr({name: d + carried[name] for name, d in rest.items()}, self.options)

    def _linear_loss(self, d: Tensor) -> Tensor:
        """The loss () after a step, were the residuals linear."""
        return loss_of(self.values + self._times(d))

    def _times(self, d: Tensor) -> Tensor:
        return self.problem.times(self.problem.jacobian.split(d))

    def _bend(self, d: Tensor, best: LinePoint, cutoff: float) -> LinePoint:
        """The better of the best straight step ``t d`` and a bent one ``t d + t^2/2 a``, corrected once."""
        solve = lambda v: times_lr(self.problem.solve(-v, self.damping, cutoff), self.options)
        search, origin = self.search, self.search.origin
        t = BEND_STEP * (best.step_size or LEAST_STEP)
        _, seen = search.evaluated(t * d)
        assert seen is not None
        # residuals bend by r'', seen by a difference; a = -J^+ r'' bends the step back (arXiv:1201.5885, equation 3)
        a = solve(2 / t * ((seen - self.values) / t - self._times(d)))
        a = torch.where(torch.isfinite(a).all(), a, 0)  # straight again
        best = min(best, search.lowest(lambda t: t * d + t * t / 2 * a, origin, "bent"), key=lambda point: point.loss)
        if best is origin:
            return best
        assert best.residuals is not None
        correction = solve(best.residuals)
        corrected = search.lowest(lambda t: best.displacement + t * correction, best, "corrected")
        return LinePoint(corrected.displacement, corrected.loss, corrected.residuals, best.step_size)
