"""Steps by the exact quadratic model of each batch while they hold for the next, too; then those of a plain loop."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from curvature.linalg import stack, to_host, widen
from curvature.operators import Named
from curvature.preconditioners import Block
from optimizers.steps.closures import Replay
from optimizers.steps.layer_vector import inner
from optimizers.steps.quadratic_model import GROW, Quadratic, first_accepted, largest_curvature
from optimizers.steps.rule import (
    Evaluation,
    Origin,
    Outcome,
    Renewal,
    StepContext,
    StepRule,
    are_finite,
    kept_by_decay,
)
from optimizers.steps.trust_region import TrustRegionStep

LOG = logging.getLogger(__name__)
LEAST_CONFIRMED = 0.5  # part of the progress on one batch, by the next
MOST_GROUPS = 8  # of neighbouring layers, each with its own step size
SAMPLE_STRIDE = 2  # use every second sample of a batch for the curvature along the directions
LEAST_RATIO = 0.1  # reduction ratio of a step that is taken: far beyond the minimum other batches suffer
# That of the first step, by which damping is found. With less the first step of a GPT moved layers by thirteen times
# their norm, and training never recovered.
FIRST_RATIO = 0.5
CONFIRMED_DECAY = 0.7  # of the running mean of what the next batch confirms of a step's progress
PRIOR_BATCHES = 2  # that would have confirmed all of it
RESOLVED = 1e-5  # progress relative to the loss that is not rounding


class AdaptiveStep(StepRule):
    """Minimizes the exact damped quadratic model of the batch's loss over layerwise directions and the last step.

    See arXiv:1503.05671, sections 6.4 to 7, there with one direction for all layers. Damping follows the reduction
    ratio; a step that raises the loss is rolled back and retried with more damping. The next batch tells how much of
    the progress is more than a fit to the last one.
    """

    def __init__(self) -> None:
        self.damping = -1.0  # unknown
        self.last: dict[str, Tensor] = {}  # displacement
        self.start: dict[str, Tensor] = {}  # the parameters before it
        self.progress = 0.0  # how far it lowered the loss of its own batch
        # running mean of the part of it, -1 to 1, that the next batch sees, too, and how many have told
        self.confirmed, self.batches = 1.0, 0

    def step(self, context: StepContext, evaluation: Evaluation) -> Outcome:
        replay = evaluation.replay
        assert replay is not None
        loss, rollbacks = evaluation.value, 0
        if not context.gradients():
            return Outcome(loss)
        preconditioner = context.preconditioner
        if preconditioner.has_seen_empty_batches_only():
            return Outcome(loss, is_skipped=True)
        renewal = _renew_if_finite(context, loss)
        if renewal is None and self.last:
            loss, renewal = self._before_last_step(context, replay)
            rollbacks = int(renewal is not None)
        gradients = context.gradients()
        if renewal is None:
            return Outcome(loss, is_skipped=True)
        with preconditioner.monitor.timed("model"):
            before = self._loss_before(replay)
        with preconditioner.monitor.timed("direction"):
            groups = grouped_by_layer(context.solve(gradients), preconditioner.blocks)
        with preconditioner.monitor.timed("model"):
            rates = {name: group["lr"] for name, group in context.options.items()}
            entry = preconditioner.monitor.attempt(lambda: self.move(replay, loss, gradients, groups, rates, before))
        for name, group in context.options.items():
            if group["weight_decay"] and name in gradients and entry["accepted"]:
                context.trained[name].mul_(kept_by_decay(group))
        rollbacks += entry.pop("rollbacks")
        entry = {"renewed": renewal.renewed, "inverted": renewal.inverted} | entry
        return Outcome(loss, entry=entry, renewal=renewal, rollbacks=rollbacks)

    def _before_last_step(self, context: StepContext, replay: Replay) -> tuple[Tensor, Renewal | None]:
        """The loss before the last step, and what was renewed with it; None, and the step stays, if it is bad, too."""
        context.preconditioner.recorder.discard()
        there = self._back(dict(replay.model.named_parameters()))
        with context.preconditioner.monitor.timed("closure"):
            loss = replay.again()
        renewal = _renew_if_finite(context, loss)
        if renewal is None:  # it was the batch
            there.move({})
        else:
            self.damping *= GROW
            self.forget()
        return loss, renewal

    def _loss_before(self, replay: Replay) -> Tensor:
        """The loss (1,) of a new batch before the last step; (0,) without one."""
        parameters = dict(replay.model.named_parameters())
        if not self.last or not self.start.keys() <= parameters.keys():  # renamed
            return replay.value.new_empty(0)
        here = self._back(parameters)
        try:
            return replay.loss()[None]
        finally:
            here.move({})

    def _back(self, parameters: Named) -> Origin:
        """Take the last step back; where the parameters were after it."""
        after = Origin({name: parameters[name] for name in self.start})
        for name, value in self.start.items():
            parameters[name].copy_(value)
        return after

    def _confirm(self, before: float, loss: float) -> None:
        """Note how much of the last step's progress a new batch has seen, too."""
        share = (before - loss) / self.progress
        if math.isfinite(share):
            self.batches += 1
            weight = max(1 - CONFIRMED_DECAY, 1 / (PRIOR_BATCHES + self.batches))
            self.confirmed += weight * (min(1.0, max(-1.0, share)) - self.confirmed)

    def move(
        self, replay: Replay, loss: Tensor, gradients: Named, groups: Sequence[Named], rates: Mapping[str, float],
        before: Tensor,
    ) -> dict[str, Any]:  # fmt: skip
        """Move along groups of directions so that the loss of the batch falls; returns the entry for the history."""
        lr = max(rates.values())  # scales the step; the others, relative to it, the directions
        entry: dict[str, Any] = {"confirmed": self.confirmed, "accepted": False, "rollbacks": 0}
        entry |= {"damping": self.damping if self.damping >= 0 else math.nan, "ratio": math.nan}
        if lr == 0:  # a schedule that starts at zero
            self.forget()
            return entry | {"loss": float(loss), "accepted": True, "step_size": 0.0}
        groups = [{k: u if rates[k] == lr else u * (rates[k] / lr) for k, u in d.items()} for d in groups]
        last = {name: d for name, d in self.last.items() if name in gradients and rates[name] > 0}
        directions = [*groups, last] if last else list(groups)
        curvatures = replay.curvatures(directions, SAMPLE_STRIDE)
        known = [*_products(directions, len(groups), gradients), curvatures, before, loss]
        slopes, norms, curvature, earlier, value = to_host(known)
        model, entry["loss"] = Quadratic(slopes, curvature, norms), float(value)
        if len(earlier) and self.progress >= RESOLVED * abs(entry["loss"]):
            self._confirm(float(earlier), entry["loss"])
            entry["confirmed"] = self.confirmed
        if not are_finite([slopes, norms, curvature]):
            self.forget()
            return entry
        least_ratio = FIRST_RATIO if self.damping < 0 else LEAST_RATIO
        if self.damping < 0:
            self.damping = model.first_damping()
        if self.damping < 0 or not model.value(lr * model.minimum(self.damping), 0.0) < 0:
            self.forget()  # nothing left to do for this batch
            return entry | {"accepted": True, "step_size": 0.0}
        return entry | self._first_accepted(replay, model, directions, len(groups), lr, entry["loss"], least_ratio)

    def _first_accepted(
        self, replay: Replay, model: Quadratic, directions: Sequence[Named], groups: int, lr: float, loss: float,
        least_ratio: float,
    ) -> dict[str, Any]:  # fmt: skip
        """Take the step with the least of the tried dampings for which the loss falls."""
        parameters = dict(replay.model.named_parameters())
        origin = Origin({name: parameters[name] for d in directions for name in d})

        def attempt(damping: float) -> tuple[Tensor | float, tuple[Tensor, Named, float]]:
            alpha = lr * model.minimum(damping)
            expected = model.value(alpha, 0.0)
            step = _combine(directions, alpha.tolist())
            origin.move(step)
            return (widen(replay.loss()) - loss) / expected if expected < 0 else math.nan, (alpha, step, expected)

        with origin:
            trial = first_accepted(attempt, self.damping, least_ratio, replay.value.device)
        self.damping = trial.next_damping(largest_curvature(model.curvature, model.norms))
        if not trial.is_accepted:
            origin.move({})
            self.forget()
            return trial.entry | {"damping": self.damping}
        alpha, self.last, expected = trial.step
        self.start, self.progress = origin.values, -trial.ratio * expected
        origin.move(self.last)  # another one may have been tried since
        return trial.entry | {"step_size": float(alpha[:groups].mean()) / lr}

    def forget(self) -> None:
        """Drop the last displacement: it is not a useful direction."""
        self.last, self.start = {}, {}


class HandOverStep(StepRule):
    """Leaves the steps to the plain rule, for good, once a batch is too small for a quadratic model of its own.

    The first steps are long either way, and both rules profit from them. Later a step that is the best for one batch
    fits its noise; what averages over batches gets further then, and costs less.
    """

    needs_closure = True
    argument = "(adaptive=True)"
    evaluate = StepRule.replayed
    differentiates_model = True

    def __init__(self, then: TrustRegionStep, intervals: tuple[int | None, int | None] | None = None) -> None:
        self.first, self.then = AdaptiveStep(), then
        self.intervals = intervals  # of renewals and inversions afterwards; None: as before
        self.step_of_change = -1  # number of the first step that `then` makes; -1 before

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
        preconditioner = context.preconditioner
        self.step_of_change = self.then.first_step = preconditioner.monitor.steps + 1
        if self.intervals is not None:
            schedule = preconditioner.schedule
            schedule.factor_every, schedule.decompose_every = self.intervals
        self.first.forget()
        LOG.warning("%s: %s", preconditioner.owner, self.report())

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
        rules = {"first": self.first.state_dict(), "then": self.then.state_dict()}
        return rules | {"step_of_change": self.step_of_change, "intervals": self.intervals}

    def load_state_dict(self, state: Mapping[str, Any], trained: Named) -> None:
        self.first.load_state_dict(state["first"], trained)
        self.then.load_state_dict(state["then"], trained)
        self.step_of_change, self.intervals = state["step_of_change"], state["intervals"]
        self.then.first_step = max(self.step_of_change, 0)


def _renew_if_finite(context: StepContext, loss: Tensor) -> Renewal | None:
    """What `StepContext.renew` renews if loss and gradients are finite."""
    gradients = context.gradients()
    return context.renew(gradients) if are_finite([loss, *gradients.values()]) else None


def grouped_by_layer(directions: Named, blocks: Sequence[Block]) -> list[dict[str, Tensor]]:
    """Descent directions of groups of neighbouring layers, each with its own step size."""
    layers = [
        {name: -directions[name] for name in block.names}
        for block in blocks
        if all(name in directions for name in block.names)
    ]
    seen = {name for layer in layers for name in layer}
    rest = {name: -u for name, u in directions.items() if name not in seen}
    return grouped([*layers, rest] if rest else layers)


def grouped(layers: Sequence[Named]) -> list[dict[str, Tensor]]:
    """Merge the directions of neighbouring layers into at most `MOST_GROUPS`."""
    count = min(MOST_GROUPS, len(layers))
    ends = [round(k * len(layers) / count) for k in range(count + 1)]
    return [{k: v for layer in layers[a:b] for k, v in layer.items()} for a, b in zip(ends, ends[1:], strict=False)]


def _combine(directions: Sequence[Named], alpha: Sequence[float]) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for direction, factor in zip(directions, alpha, strict=True):
        for name, d in direction.items():
            total[name] = total[name].add_(d, alpha=factor) if name in total else d * factor
    return total


def _products(directions: Sequence[Named], groups: int, gradients: Named) -> tuple[Tensor, Tensor]:
    """Slopes (k,) along directions, and their inner products (k, k): the first are groups, which share no parameter."""
    slopes = stack(_inner(d, gradients) for d in directions)
    norms = torch.diag(stack(_inner(d, d) for d in directions))
    for last in range(groups, len(directions)):
        both = stack(_inner(d, directions[last]) for d in directions[:groups])
        norms[last, :groups] = norms[:groups, last] = both
    return slopes, norms


def _inner(one: Named, other: Named) -> Tensor:
    """A scalar."""
    products = [inner(d, other[name]) for name, d in one.items() if name in other]
    return widen(stack(products)).sum() if products else widen(next(iter(one.values())).new_zeros(()))
