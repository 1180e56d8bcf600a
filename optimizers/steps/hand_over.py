"""Adaptive steps while they hold for the next batch, too; then those of a plain training loop."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from optimizers.steps.adaptive import AdaptiveStep
from optimizers.steps.rule import Evaluation, Named, Outcome, StepContext, StepRule
from optimizers.steps.trust_region import TrustRegionStep

LEAST_CONFIRMED = 0.5  # part of the progress on one batch, by the next
LOG = logging.getLogger(__name__)


class HandOverStep(StepRule):
    """Leaves the steps to the plain rule, for good, once a batch is too small for a quadratic model of its own.

    The first steps are long either way, and both rules profit from them. Later a step that is the best for one batch
    fits its noise; what averages over batches gets further then, and costs less.

    Args:
        then: makes the steps afterwards.
        intervals: of renewals and inversions from then on; None: as before.

    Attributes:
        step_of_change: number of the step from which on `then` makes the steps; -1 before.
    """

    needs_closure = True
    differentiates_model = True

    def __init__(self, then: TrustRegionStep, intervals: tuple[int | None, int | None] | None = None) -> None:
        self.first, self.then, self.intervals = AdaptiveStep(), then, intervals
        self.step_of_change = -1

    def evaluate(self, context: StepContext) -> Evaluation:
        return self.first.evaluate(context)

    def step(self, context: StepContext, evaluation: Evaluation) -> Outcome:
        if self.step_of_change >= 0:
            outcome = self.then.step(context, evaluation)
            known = {"loss": outcome.loss, "damping": None, "ratio": None}
            return outcome if outcome.entry is None else replace(outcome, entry=known | dict(outcome.entry))
        outcome = self.first.step(context, evaluation)
        if self.first.confirmed < LEAST_CONFIRMED:
            self._hand_over(context)
        return outcome

    def _hand_over(self, context: StepContext) -> None:
        self.step_of_change = self.then.begin = context.monitor.steps + 1
        if self.intervals is not None:
            schedule = context.preconditioner.schedule
            schedule.factor_every, schedule.decompose_every = self.intervals
        self.first.forget()
        LOG.warning("%s: %s", context.owner, self.report())

    def last_displacement(self, states: Mapping[str, dict[str, Any]]) -> Named:
        return self.then.last_displacement(states)

    def report(self) -> str:
        if self.step_of_change < 0:
            return ""
        return (
            f"adaptive=True: plain steps from step {self.step_of_change} on. The next batch confirmed only "
            f"{max(self.first.confirmed, 0.0):.0%} of the progress on one batch, so averages over batches get further"
        )

    def stats(self) -> dict[str, Any]:
        return {"plain_from": None if self.step_of_change < 0 else self.step_of_change}

    def empty_state(self, p: Tensor, options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return self.then.empty_state(p, options)

    def state_dict(self) -> dict[str, Any]:
        own = {"first": self.first.state_dict(), "then": self.then.state_dict()}
        return own | {"step_of_change": self.step_of_change, "intervals": self.intervals}

    def load_state_dict(self, state: Mapping[str, Any], trained: Named) -> None:
        self.first.load_state_dict(state["first"], trained)
        self.then.load_state_dict(state["then"], trained)
        self.step_of_change, self.intervals = state["step_of_change"], state["intervals"]
        self.then.begin = max(self.step_of_change, 0)
