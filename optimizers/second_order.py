"""An optimizer composed of a recorder, a store of curvature, a preconditioner and a step rule."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from curvature import Injection, empirical, isotropic
from curvature.preconditioners import CurvatureStore
from curvature.recording import ModelState, force_eager
from optimizers.arguments import check_arguments, check_numbers, check_whole
from optimizers.checkpoints import pack, unpack
from optimizers.distributed.processes import Distributed, trained_by
from optimizers.distributed.sharding import local, refuse_shards
from optimizers.distributed.team import Roster
from optimizers.model_optimizer import ModelOptimizer
from optimizers.preconditioner import Preconditioner
from optimizers.recording.backward_passes import Passes
from optimizers.recording.loss_backprops import LossBackprops
from optimizers.recording.recorder import Recorder
from optimizers.report import table
from optimizers.schedule import Schedule
from optimizers.steps.residuals import ResidualSolver, ResidualStep
from optimizers.steps.rule import Outcome, Scaling, StepContext, StepRule
from optimizers.steps.updates import Move, take


class SecondOrderOptimizer(ModelOptimizer):
    """Base of `KFAC` and `NaturalGradient`, which choose the parts.

    Args:
        model: as the caller gave it.
        options: those of a parameter group.
        arguments: all others of the constructor, by name; a copy is made with them.
        config: how processes share the work.
        store: the curvature.
        rule: makes the steps.
        backprops: makes what listens to the loss's own backward pass, a class of `optimizers.recording.loss_backprops`.

    Attributes:
        residual_rule: makes the steps once a closure has returned residuals; None before.
    """

    # torch.amp.GradScaler hands `grad_scale` and `found_inf` over, and leaves the gradients as they are
    _step_supports_amp_scaling = True

    def __init__(
        self, model: nn.Module, options: dict[str, Any], arguments: dict[str, Any], *, config: Distributed,
        store: CurvatureStore, rule: StepRule, backprops: Callable[[Any, Passes, Roster, bool], LossBackprops],
    ) -> None:  # fmt: skip
        super().__init__(model, options)
        name = type(self).__name__
        self.arguments, self.store, self.rule = arguments, store, rule
        self.residual_rule: ResidualStep | None = None
        self.takes_loss = False  # whether a closure has returned a loss
        present, passes = weakref.WeakMethod(self.present), Passes()
        intervals = int(arguments["factor_every"]), int(arguments["decompose_every"])
        schedule = Schedule(*intervals, arguments["max_overhead"])
        is_sum = getattr(arguments["loss"], "reduction", "mean") == "sum"
        self.roster = Roster(config, next(self.model.parameters()).device, store, passes.pop_sums)
        self.recorder = Recorder(
            model, lambda: present()(),  # type: ignore[misc]  # the recorder does not outlive the optimizer
            store, passes, inject=arguments["inject"], loss=arguments["loss"], seed=int(arguments["seed"]),
            schedule=schedule, monitor=self.monitor, roster=self.roster,
            loss_backprops=backprops(store, passes, self.roster, is_sum), owner=name,
        )  # fmt: skip
        self.preconditioner = Preconditioner(
            store, schedule, self.roster, self.monitor, arguments["factor_decay"], owner=name
        )
        self.recorder.expect()

    # -- a step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient.

        Args:
            closure: re-evaluates the model on the batch and returns the loss, as for `torch.optim.LBFGS`, or the
                residuals r (M,), M at least 1, of a loss ``1/2 ||r||^2``; then it calls no ``backward``. `adaptive` and
                `line_search` need one. They call it several times, as do residuals: with the same random numbers and
                without effect on buffers (of BatchNorm) after the first, with ``loss.backward()`` left out where only
                the loss is needed.

        Returns:
            The loss before the step, if there is a closure.

        Raises:
            RuntimeError: the model was never called with gradients enabled, so that its curvature is unknown.
            TypeError: no closure where one is needed; it returns neither a loss nor residuals, or residuals after a
                loss, or the other way round.
            ValueError: residuals, and an argument that has no meaning for them.
        """
        value, move = self._prepare(closure)
        if move is not None:
            self._conclude(take(move))  # `take` is what torch.compile(opt.step) compiles
        return value

    def step_residuals(self, closure: Callable[[], Any]) -> Any:
        """One update for residuals r (M,), the loss being ``1/2 ||r||^2``.

        `step` comes here by itself once its closure returns a vector.

        Args:
            closure: returns the residuals, and calls no ``backward``. It may differentiate the model by
                ``torch.autograd.grad(..., create_graph=True)``.

        Returns:
            The loss before the step.

        Raises:
            TypeError: the closure returns no tensor, or a closure has returned a loss before.
            ValueError: it returns no vector; an argument of the constructor has no meaning for residuals.
        """
        self._switch_to_residuals()
        return self.step(closure)  # with the hooks of torch.optim

    def _switch_to_residuals(self) -> None:
        if self.takes_loss:
            raise TypeError("KFAC.step: the closure returned residuals, and a loss before")
        if self.residual_rule is None:
            refuse_shards(self.model, "closure")
            self.residual_rule = ResidualStep(self.residual_solver())
            self.recorder.stop()

    def residual_solver(self) -> ResidualSolver:
        """What solves for residuals.

        Raises:
            ValueError: an argument has no meaning for them; by name.
        """
        raise NotImplementedError

    @torch._disable_dynamo
    def _prepare(self, closure: Callable[[], Any] | None) -> tuple[Any, Move | None]:
        """All of a step but the last thing to do in a training loop."""
        if closure is not None and not callable(closure):
            raise TypeError(f"closure: expected a function that computes the loss, found {type(closure).__name__}")
        for group in self.param_groups:
            check_numbers(group)
        if closure is None and self._is_at_rest():
            return None, None
        outcome = self._run(closure, self._loss_step if self.residual_rule is None else self._residual_step)
        return outcome.loss, outcome.move

    def _is_at_rest(self) -> bool:
        """Whether nothing could move: `torch.distributed.checkpoint` takes such a step to see what the state holds."""
        is_unable = self.rule.needs_closure or not self.store.blocks
        return self.residual_rule is None and is_unable and not any(group["lr"] for group in self.param_groups)

    def _run(self, closure: Callable[[], Any] | None, step: Callable[[StepContext], Outcome]) -> Outcome:
        """Take a step and note what came of it."""
        self.recorder.reset()
        if closure is not None and hasattr(self, "found_inf"):
            raise RuntimeError(
                f"{type(self).__name__}.step: GradScaler takes no closure; use bfloat16 without a scaler"
            )
        self.monitor.settle()
        start, context = time.perf_counter(), self._context(closure)
        rule = self.rule if self.residual_rule is None else self.residual_rule
        is_differentiated = closure is not None and (rule.differentiates_model or not self.takes_loss)
        with self.monitor.watching(), force_eager() if is_differentiated else nullcontext():
            outcome = step(context)
        if outcome.displacement and not outcome.is_skipped:
            trained = self.trained()  # by the names that the closure may have given them
            for name, displacement in outcome.displacement.items():
                local(trained[name]).add_(displacement)
        self.monitor.counts["rollbacks"] += outcome.rollbacks
        if outcome.is_skipped:
            self.monitor.skip()
            self.recorder.discard()
        elif outcome.entry is not None:
            self.monitor.note_step(outcome.entry, outcome.undecided)
            self.monitor.entries[-1]["seconds"] = time.perf_counter() - start
            if self.residual_rule is None:
                self.preconditioner.note_seconds(outcome.renewal)
        self.recorder.expect()
        return outcome

    def _context(self, closure: Callable[[], Any] | None) -> StepContext:
        trained = self.trained()
        return StepContext(
            model=self.model, closure=closure, trained=trained, options=self.options(),
            states={name: self.state[p] for name, p in trained.items()}, recorder=self.recorder,
            preconditioner=self.preconditioner, monitor=self.monitor, owner=type(self).__name__,
            scaling=Scaling(getattr(self, "grad_scale", None), getattr(self, "found_inf", None)),
        )  # fmt: skip

    def _loss_step(self, context: StepContext) -> Outcome:
        """A step on a loss. If the first closure returns residuals instead, all else that it did is undone."""
        is_first = context.closure is not None and not self.takes_loss
        before = ModelState(self.model) if is_first else None
        evaluation = self.rule.evaluate(context)
        if not evaluation.is_residuals:
            # the closure may have renamed parameters, as spectral_norm does
            context = context if context.closure is None else self._context(context.closure)
            outcome = self.rule.step(context, evaluation)
            self.takes_loss |= context.closure is not None
            return outcome
        self.recorder.discard()
        if before is not None:
            before.restore()
        self._switch_to_residuals()
        return self._residual_step(context)

    def _residual_step(self, context: StepContext) -> Outcome:
        assert self.residual_rule is not None
        return self.residual_rule.step(context, self.residual_rule.evaluate(context))

    @torch._disable_dynamo
    def _conclude(self, slope: Tensor) -> None:
        self.rule.after_move(slope)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As for any optimizer. Passes whose gradients these were are forgotten when new ones arrive."""
        super().zero_grad(set_to_none)
        self.recorder.zero()

    # -- reports and checkpoints

    def report(self) -> str:
        """A table of every parameter: how it is preconditioned, factor shapes, memory, and why where it falls back.

        After a first forward pass, and before a first step, the memory is what will be kept at most.
        """
        if self.residual_rule is not None:
            return self.residual_rule.solver.report(self.model)
        lines = table(self.store.blocks, self.model, self.trained(), self.param_groups)
        return "\n".join([*lines, self.recorder.substitute] if self.recorder.substitute else lines)

    def stats(self) -> dict[str, Any]:
        """How the run goes: the last step's numbers, counts of events, seconds by part, conditions of the factors.

        The conditions (largest over least eigenvalue of each damped block, by its first parameter) are computed here.
        """
        schedule = self.preconditioner.schedule
        intervals = {"factor_every": schedule.factor_every, "decompose_every": schedule.decompose_every}
        conditions = {b.names[0]: b.condition() for b in self.store.blocks if b.is_ready}
        outliers = sum(block.outliers for block in self.store.blocks)
        return super().stats() | intervals | {"outliers": outliers, "conditions": conditions}

    def kind(self) -> dict[str, Any]:
        """What a state must have in common with the optimizer that takes it."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """As for any optimizer: tensors, numbers and strings; see `optimizers.checkpoints` for the form."""
        self.monitor.settle()
        return pack(self, self.kind(), self._parts(), lambda p: self.rule.empty_state(p, self.param_groups))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take a `state_dict`; its tensors are copied, to device and dtype of the parameters.

        Raises:
            TypeError: not a dict.
            ValueError: it is of another optimizer, model or choice of `adaptive`, `sharing` or `solver`, of another
                version, or damaged; what was found is said, and nothing was changed.
        """
        state, parts = unpack(self, state_dict, self.kind(), self._parts())
        super().load_state_dict(state)
        self.recorder.discard()
        self.roster.forget_inverses()
        device, trained = next(p for group in self.param_groups for p in group["params"]).device, self.trained()
        schedule, residual = self.preconditioner.schedule, parts["residual_rule"]
        self.monitor.load_state_dict(parts["monitor"])
        schedule.factor_every, schedule.decompose_every = parts["intervals"]
        self.store.load_state_dict(parts["curvature"], device)
        self.rule.load_state_dict(parts["rule"], trained)
        self.residual_rule = None if residual is None else ResidualStep(self.residual_solver())
        if self.residual_rule is not None:
            self.residual_rule.load_state_dict(residual, trained)
        self.recorder.load_state_dict(parts["recorder"], device, is_stopped=residual is not None)
        self.recorder.expect()

    def _parts(self) -> dict[str, Any]:
        """The states of the parts."""
        schedule, residual = self.preconditioner.schedule, self.residual_rule
        return {
            "monitor": self.monitor.state_dict(),
            "intervals": [schedule.factor_every, schedule.decompose_every],
            "recorder": self.recorder.state_dict(),
            "rule": self.rule.state_dict(),
            "residual_rule": None if residual is None else residual.state_dict(),
            "curvature": self.store.state_dict(),
        }

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy or a pickle trains a copy of the model (the same, where both are copied or pickled together)."""
        groups = [dict(group) for group in self.param_groups]
        return _again, (type(self), self.model, self.arguments, groups, self.defaults, self.state_dict())


def _again(kind: Any, model: nn.Module, arguments: Any, groups: Any, defaults: Any, state: dict[str, Any]) -> Any:
    new = kind(model, **arguments)
    new.param_groups, new.defaults = groups, defaults
    new.load_state_dict(state)
    return new


def checked_model(
    owner: str, model: Any, arguments: Mapping[str, Any], why_replicated: str
) -> tuple[nn.Module, Distributed]:
    """The user's own module, and the processes that train it, once all arguments have been checked.

    Args:
        owner: name of the optimizer.
        why_replicated: why every process needs all that the curvature is solved with; "" if it does not.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range, by name.
    """
    check_arguments(model, dict(arguments))
    for name in ("factor_every", "decompose_every"):
        check_whole(name, arguments[name], 1, 10**9)
    check_whole("seed", arguments["seed"], -(2**63), 2**64 - 1)
    inject, loss, rule = arguments["inject"], arguments["loss"], arguments["step_rule"]
    if loss is not None and (isinstance(loss, type) or not callable(loss)):
        raise TypeError(f"loss: expected a loss module as in nn.CrossEntropyLoss(), or a function, found {loss!r:.80}")
    if not isinstance(inject, Injection):
        raise TypeError(f"inject: expected curvature.isotropic() or another injection, found {inject!r:.80}")
    if loss is None and not isinstance(inject, type(isotropic()) | type(empirical())):
        raise ValueError(f"loss: {inject!r} needs the loss module, as in KFAC(model, loss=nn.CrossEntropyLoss())")
    if rule is not None and not isinstance(rule, StepRule):
        raise TypeError(f"step_rule: expected an optimizers.StepRule, found {rule!r:.80}")
    if rule is not None and arguments["adaptive"]:
        raise ValueError("step_rule: adaptive=True is a step rule, too; choose one of the two")
    model, config = trained_by(model, arguments["distributed"])
    if why_replicated and config.gradient_worker_fraction < 1:
        raise ValueError(f"gradient_worker_fraction: expected 1, {owner} {why_replicated}")
    return model, config
