"""Line search by halving along curves through parameter space, and a step rule that uses it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvature.linalg import widen
from optimizers.steps.closure_checks import checked_value
from optimizers.steps.descent import DescentRule
from optimizers.steps.rule import Evaluation, Named, Options, Outcome, StepContext, StepRule
from optimizers.steps.updates import are_finite, kept_by_decay

MOST_HALVINGS = 30  # of a step
MOST_AT_ONCE = 4  # points that an accelerator evaluates before the host reads their losses


@dataclass(frozen=True)
class LinePoint:
    """A point of a line search: displacement from the origin, loss, residuals (if any), step size along the curve."""

    displacement: Tensor
    loss: float
    residuals: Tensor | None = None
    step_size: float = 0.0


class LineSearch:
    """Moves parameters about their origin; displacements (P,) are flat, in the order of `parameters`.

    Args:
        evaluate: loss and residuals (if any) with the parameters as they are now.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], loss: float, evaluate: Callable[[], tuple[Tensor, Tensor | None]]
    ) -> None:
        self.parameters, self.evaluate = parameters, evaluate
        self.starts = [p.detach().clone() for p in parameters.values()]
        self.origin = LinePoint(torch.cat([torch.zeros_like(x).flatten() for x in self.starts]), loss)

    def point_at(self, displacement: Tensor, step_size: float = 0.0) -> LinePoint:
        """Move the parameters and evaluate the loss there."""
        return self._points_at([displacement], [step_size])[0]

    def residuals_at(self, displacement: Tensor) -> Tensor | None:
        """Move the parameters and evaluate the residuals there."""
        self.move_to(displacement)
        return self.evaluate()[1]

    def _points_at(self, displacements: Sequence[Tensor], step_sizes: Sequence[float]) -> list[LinePoint]:
        """The points one after the other; the host waits once for all."""
        losses, residuals = [], []
        for displacement in displacements:
            self.move_to(displacement)
            loss, own = self.evaluate()
            losses.append(widen(loss).reshape(()))
            residuals.append(own)
        values = [x if math.isfinite(x) else math.inf for x in torch.stack(losses).tolist()]
        return [LinePoint(*own) for own in zip(displacements, values, residuals, step_sizes, strict=True)]

    def move_to(self, displacement: Tensor) -> None:
        pieces = displacement.split([x.numel() for x in self.starts])
        with torch.no_grad():
            for p, start, piece in zip(self.parameters.values(), self.starts, pieces, strict=True):
                p.copy_(start).add_(piece.reshape(p.shape))

    def lowest(self, curve: Callable[[float], Tensor], start: LinePoint) -> LinePoint:
        """Halve the step until the loss is below that of `start` and stops falling; `start` if it never is below."""
        best = start
        for step_sizes in self._halvings():
            for seen in self._points_at([curve(t) for t in step_sizes], step_sizes):
                if seen.loss < best.loss:
                    best = seen
                elif best is not start:
                    return best
        return best

    def _halvings(self) -> Iterator[list[float]]:
        """Step sizes that are tried together: on an accelerator more and more, so that the host seldom waits."""
        is_cpu = self.origin.displacement.device.type == "cpu"
        first, count = 0, 1
        while first <= MOST_HALVINGS:
            last = min(first + count, MOST_HALVINGS + 1)
            yield [0.5**k for k in range(first, last)]
            first, count = last, 1 if is_cpu else min(2 * count, MOST_AT_ONCE)

    def straight(self, step: Tensor) -> LinePoint:
        """The lowest along a step from the origin."""
        return self.lowest(lambda t: t * step, self.origin)

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """After an exception the parameters are at the origin."""
        try:
            yield
        except BaseException:
            self.move_to(self.origin.displacement)
            raise


class LineSearchStep(StepRule):
    """Halves the step along a direction until the loss of the batch stops falling; needs a closure of the loss.

    Args:
        descent: makes the direction.
    """

    needs_closure = True
    differentiates_model = True

    def __init__(self, descent: DescentRule) -> None:
        self.descent = descent

    def evaluate(self, context: StepContext) -> Evaluation:
        """
        Raises:
            TypeError: there is no closure.
        """
        if context.closure is None:
            raise TypeError("NaturalGradient(line_search=True).step: pass a closure that computes the loss")
        replay = context.replay()
        with context.monitor.timed("closure"):
            return Evaluation(checked_value(replay.first()), replay)

    def step(self, context: StepContext, evaluation: Evaluation) -> Outcome:
        loss, gradients, replay = evaluation.value, context.gradients(), evaluation.replay
        assert replay is not None
        if not gradients or not are_finite([loss, *gradients.values()]):
            return Outcome(loss, is_skipped=True)
        renewal = context.renew(gradients)
        with context.monitor.timed("solve"):
            good = context.unscale_and_check_finite(gradients)
            directions = self.descent(context, context.stack(gradients), good).directions
        own = {name: context.trained[name] for name in directions}
        search = LineSearch(own, float(loss), lambda: (replay.loss(), None))
        step = -times_lr(directions, context.options)
        with context.monitor.timed("trials"), search.restoring():
            found = search.straight(step)
            accept(search, found, context.options)
        entry = {"loss": loss, "accepted": found.step_size > 0, "step_size": found.step_size}
        entry |= {"renewed": renewal.renewed, "inverted": renewal.inverted}
        return Outcome(loss, entry=entry, renewal=renewal)

    def empty_state(self, p: Tensor, options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return self.descent.empty_state(p, options) | {"displacement": torch.zeros_like(p)}

    def state_dict(self) -> dict[str, Any]:
        return {}


def times_lr(direction: Named, options: Options) -> Tensor:
    """A direction times the learning rates, flat (P,)."""
    return torch.cat([d.flatten() * options[name]["lr"] for name, d in direction.items()])


@torch.no_grad()
def accept(search: LineSearch, point: LinePoint, options: Options) -> None:
    """Move to a point; apply weight decay unless it is the origin."""
    search.move_to(point.displacement)
    for name, p in search.parameters.items():
        if point.step_size and options[name]["weight_decay"]:
            p.mul_(kept_by_decay(options[name]))
