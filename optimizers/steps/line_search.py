"""Line search by halving along curves through parameter space, and a step rule that uses it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvature.linalg import cat, to_host, widen
from optimizers.preconditioner import Options
from optimizers.steps.directions import Spring
from optimizers.steps.layer_vector import LayerVector
from optimizers.steps.quadratic_model import tried_together
from optimizers.steps.rule import (
    Evaluation,
    Named,
    Origin,
    Outcome,
    StepContext,
    StepRule,
    are_finite,
    kept_by_decay,
    layout_of_step,
)

MOST_HALVINGS = 30  # of a step
FIRST_AT_ONCE = 2  # points on an accelerator: a step and its half, which tells that the former is best


@dataclass(frozen=True)
class LinePoint:
    """A point of a line search: displacement from the origin, loss, residuals (if any), step size along the curve."""

    displacement: Tensor
    loss: float
    residuals: Tensor | None = None
    step_size: float = 0.0


class LineSearch:
    """Moves parameters about their origin; displacements (P,) are flat, in the order of `parameters`."""

    def __init__(
        self, parameters: Mapping[str, Tensor], loss: float, evaluate: Callable[[], tuple[Tensor, Tensor | None]],
        counts: dict[str, int],
    ) -> None:  # fmt: skip
        self.parameters, self.evaluate = parameters, evaluate
        self.counts = counts  # of points that each kind of search saw last, and one more: with how many it begins
        self.start = Origin(parameters)
        self.origin = LinePoint(cat(torch.zeros_like(p).flatten() for p in parameters.values()), loss)

    def evaluated(self, displacement: Tensor) -> tuple[Tensor, Tensor | None]:
        """Move the parameters; the loss there (), infinite if it is not finite, and the residuals (if any)."""
        self.move_to(displacement)
        loss, residuals = self.evaluate()
        return widen(loss).reshape(()).nan_to_num(math.inf, math.inf, math.inf), residuals

    def move_to(self, displacement: Tensor) -> None:
        pieces = displacement.split([p.numel() for p in self.parameters.values()])
        both = zip(self.parameters.items(), pieces, strict=True)
        self.start.move({name: piece.reshape(p.shape).to(p.device) for (name, p), piece in both})

    def lowest(self, curve: Callable[[float], Tensor], start: LinePoint, kind: str) -> LinePoint:
        """Halve the step until the loss is below that of `start` and stops falling; `start` if it never is below."""
        best, seen = start, 0
        halvings = [0.5**k for k in range(MOST_HALVINGS + 1)]
        for some in tried_together(halvings, start.displacement.device, self.counts.get(kind, FIRST_AT_ONCE)):
            points = [self.evaluated(curve(t)) for t in some]
            losses = map(float, to_host([loss for loss, _ in points]))
            for t, loss, (_, residuals) in zip(some, losses, points, strict=True):
                seen += 1
                self.counts[kind] = seen + 1
                if loss < best.loss:
                    best = LinePoint(curve(t), loss, residuals, t)
                elif best is not start:
                    return best
        return best


class LineSearchStep(StepRule):
    """Halves the step along a direction until the loss of the batch stops falling; needs a closure of the loss."""

    needs_closure = True
    argument = "(line_search=True)"
    evaluate = StepRule.replayed
    differentiates_model = True

    def __init__(self, direction: Spring) -> None:
        self.direction = direction
        self.counts: dict[str, int] = {}  # of a `LineSearch`

    def step(self, context: StepContext, evaluation: Evaluation) -> Outcome:
        loss, gradients, replay = evaluation.value, context.gradients(), evaluation.replay
        assert replay is not None
        if not gradients or not are_finite([loss, *gradients.values()]):
            return Outcome(loss, is_skipped=True)
        renewal = context.renew(gradients)
        timed = context.preconditioner.monitor.timed
        with timed("solve"):
            g = LayerVector.of(layout_of_step(context, gradients), gradients)
            direction = self.direction(context, g, unit=1.0)
            direction.keep()
        parameters = {name: context.trained[name] for name in direction.u}
        search = LineSearch(parameters, float(loss), lambda: (replay.loss(), None), self.counts)
        step = -times_lr(direction.u, context.options)
        with timed("trials"), search.start:
            lowest = search.lowest(step.mul, search.origin, "straight")
            accept(search, lowest, context.options)
        entry = {"loss": loss, "accepted": lowest.step_size > 0, "step_size": lowest.step_size}
        entry |= {"renewed": renewal.renewed, "inverted": renewal.inverted}
        return Outcome(loss, entry=entry, renewal=renewal)

    def empty_state(self, p: Tensor, options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return self.direction.empty_state(p, options) | {"displacement": torch.zeros_like(p)}

    def state_dict(self) -> dict[str, Any]:
        return {}


def times_lr(direction: Named, options: Options) -> Tensor:
    """A direction times the learning rates, flat (P,), on the device of the first parameter."""
    return cat(d.flatten() * options[name]["lr"] for name, d in direction.items())


@torch.no_grad()
def accept(search: LineSearch, point: LinePoint, options: Options) -> None:
    """Move to a point; apply weight decay unless it is the origin."""
    search.move_to(point.displacement)
    for name, p in search.parameters.items():
        if point.step_size and options[name]["weight_decay"]:
            p.mul_(kept_by_decay(options[name]))
