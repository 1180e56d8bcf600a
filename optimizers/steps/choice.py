"""Which rule makes the steps: what the first closure returns decides between a loss and residuals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from curvature.recording import ModelState
from optimizers.distributed.sharding import refuse_sharded
from optimizers.steps.closure_checks import ClosureWatch
from optimizers.steps.residuals import ResidualSolver, ResidualStep
from optimizers.steps.rule import Evaluation, Outcome, StepContext, StepRule


class RuleChoice:
    """The rule for a loss, and for good the one for residuals once a closure has returned these.

    Args:
        rule: makes the steps on a loss.
        make_solver: makes the solver for residuals; raises ValueError if an argument has no meaning for them.

    Attributes:
        residual_rule: makes the steps once a closure has returned residuals; None before.
        takes_loss: whether a closure has returned a loss.
    """

    def __init__(self, rule: StepRule, make_solver: Callable[[], ResidualSolver]) -> None:
        self.rule, self.make_solver = rule, make_solver
        self.residual_rule: ResidualStep | None = None
        self.takes_loss = False

    @property
    def current(self) -> StepRule:
        return self.rule if self.residual_rule is None else self.residual_rule

    @property
    def may_differentiate(self) -> bool:
        """Whether the next step on a closure may differentiate it twice."""
        return self.current.differentiates_model or not self.takes_loss

    def step(self, context: StepContext, again: Callable[[Callable[[], Any]], StepContext]) -> Outcome:
        """A step by the rule for what the closure returns.

        Args:
            again: makes the context again, after the closure was called.
        """
        return self._loss_step(context, again) if self.residual_rule is None else self._residual_step(context)

    @contextmanager
    def taking_residuals(self, context: StepContext) -> Iterator[None]:
        """Switch to `residual_rule`; back again after an exception, unless it was there before."""
        before = self.residual_rule
        if self.takes_loss:
            raise TypeError(f"{context.owner}.step: the closure returned residuals, and a loss before")
        if self.residual_rule is None:
            refuse_sharded(context.model, "closure")
            self.residual_rule = ResidualStep(self.make_solver())
        try:
            yield
        except BaseException:
            self.residual_rule = before
            context.recorder.discard()
            raise

    def _loss_step(self, context: StepContext, again: Callable[[Callable[[], Any]], StepContext]) -> Outcome:
        """A step on a loss. If the first closure returns residuals, undo its side effects and step on them instead."""
        is_first = context.closure is not None and not self.takes_loss
        before = ModelState(context.model) if is_first else None
        evaluation = self._first_evaluation(context) if is_first else self.rule.evaluate(context)
        if self.takes_loss and evaluation.is_residuals and len(evaluation.value) == 1:
            evaluation = replace(evaluation, value=evaluation.value[0])
        if not evaluation.is_residuals:
            # the closure may have renamed parameters, as spectral_norm does
            context = context if context.closure is None else again(context.closure)
            outcome = self.rule.step(context, evaluation)
            if not isinstance(outcome, Outcome):
                raise TypeError(
                    f"step_rule: {type(self.rule).__name__}.step returned a {type(outcome).__name__}; return an "
                    "optimizers.Outcome(loss, displacement)"
                )
            self.takes_loss |= context.closure is not None
            return outcome
        context.recorder.discard()
        if before is not None:
            before.restore()
        with self.taking_residuals(context):
            return self._residual_step(context)

    def _first_evaluation(self, context: StepContext) -> Evaluation:
        """What the closure returns at its first call, which shows whether it is a loss with gradients, or residuals."""
        with ClosureWatch(context.model) as watch:
            evaluation = self.rule.evaluate(context)
        found = replace(evaluation, value=watch.loss_or_residuals(evaluation.value))
        if not found.is_residuals:
            watch.check_loss(found.value)
        return found

    def _residual_step(self, context: StepContext) -> Outcome:
        assert self.residual_rule is not None
        with context.recorder.paused():
            outcome = self.residual_rule.step(context, self.residual_rule.evaluate(context))
        context.recorder.stop()
        return outcome
