"""An optimizer composed of a recorder, a store of curvature, a preconditioner and a step rule.

The recorder has measured the forward and backward passes before ``step`` is called. A step then runs

    step -> _run -> rule.evaluate   call the closure, if there is one
                 -> rule.step       renew the curvature, solve, decide on the displacement: an `Outcome`

and adds the displacement to the parameters. A closure that returns residuals switches to a rule of its own, for good.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from curvature.arguments import check_whole, function_hint, kind_of, uncalled
from curvature.linalg import by_device
from curvature.losses import Injection, empirical
from curvature.preconditioners import CurvatureStore
from curvature.recording import ModelState, force_eager, is_sharded, warn_once
from optimizers.checkpoints import curvature_of, pack, unpack
from optimizers.distributed.processes import Distributed, Team, unwrap_data_parallel
from optimizers.distributed.sharding import any_sharded, refuse_sharded, to_full, to_local
from optimizers.model_optimizer import ModelOptimizer, check_numbers, require_one_device
from optimizers.preconditioner import Preconditioner
from optimizers.recording.backward_passes import LossBackprops, Passes
from optimizers.recording.recorder import Recorder, Scaling, weakly
from optimizers.report import curvature_stats, noted, rows_of, table
from optimizers.schedule import Schedule
from optimizers.steps.closures import ClosureWatch
from optimizers.steps.residuals import ResidualStep
from optimizers.steps.rule import Evaluation, Outcome, StepContext, StepRule

LOG = logging.getLogger(__name__)
EMPTY = (
    "%s.step: no parameter had a gradient at three steps in a row, and nothing moves; call loss.backward() before the "
    "step, and train the model that the optimizer was given, not a copy"
)
RATE = (
    "%s: lr=%s multiplies the step that the optimizer finds itself, and 1 is the default; rates of SGD or Adam do not "
    "carry over"
)
LEAST_USUAL_RATE = 0.05  # an lr below is one of another optimizer's
MOST_EMPTY = 3  # steps in a row, before that is said
BAD = (
    "%s.step: %d batches in a row were left out, since gradients are not finite (the first is that of %s), and nothing "
    "moves; look at the data, the loss and the outputs of the model"
)
MOST_BAD = 3  # batches in a row, before that is said ...
MOST_SCALES = (
    20  # ... by which a GradScaler that has not found its scale yet has divided it from 2^16 down to less than 1
)


class SecondOrderOptimizer(ModelOptimizer):
    """Base of `KFAC` and `NaturalGradient`, which choose the parts.

    Copies are built from `arguments`; `backprops` makes the listener to the loop's backward pass.
    """

    # torch.amp.GradScaler then sets `grad_scale` and `found_inf`, and does not unscale the gradients
    _step_supports_amp_scaling = True

    def __init__(
        self, model: nn.Module, options: dict[str, Any], groups: Iterable[dict[str, Any]], arguments: dict[str, Any],
        *, config: Distributed, schedule: Schedule, store: CurvatureStore, rule: StepRule,
        backprops: type[LossBackprops],
    ) -> None:  # fmt: skip
        super().__init__(model, options, groups)
        name = type(self).__name__
        self.arguments, self.store, self.rule = arguments, store, rule
        self.residual_rule: ResidualStep | None = None  # makes the steps once a closure has returned residuals
        self.takes_loss = False  # whether a closure has returned a loss
        self.gathered: dict[str, Tensor] = {}  # last displacements of sharded parameters
        self.forms: dict[int, tuple[torch.dtype, torch.device]] = {}  # that all state has, by parameter
        self._follow_parameters()
        passes = Passes(weakly(self._has_gradients))
        self.team = Team(config, next(self.model.parameters()).device, store)
        self.recorder = Recorder(
            model, weakly(self._recorded_parameters), weakly(self._last_displacement), store, passes,
            inject=arguments["inject"], loss=arguments["loss"], seed=int(arguments["seed"]), schedule=schedule,
            monitor=self.monitor, team=self.team, backprops=backprops, owner=name,
        )  # fmt: skip
        self.preconditioner = Preconditioner(
            store, self.recorder, schedule, self.team, self.monitor, arguments["factor_decay"], owner=name
        )
        self.recorder.listener.expect(True)
        self.empty_steps = self.bad_batches = 0  # in a row
        self._warn_of_rates("lr")

    # -- a step

    @torch._disable_dynamo
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient.

        Args:
            closure: re-evaluates the model on the batch and returns the loss, as for `torch.optim.LBFGS`, or the
                residuals r (M,), M at least 1, of a loss ``1/2 ||r||^2``; then it calls no ``backward``. Needed with
                `adaptive`, with `NaturalGradient`'s `line_search`, and for residuals. These call it several times, with
                the same random numbers; only the first call changes buffers (of BatchNorm), and ``loss.backward()``
                does nothing where only the loss is needed.

        Returns:
            The loss before the step, if there is a closure.

        Raises:
            RuntimeError: the closure returns a loss and calls no ``backward``, where it has to.
            TypeError: no closure where one is needed; it returns neither a loss nor residuals, residuals after a loss,
                or the other way round; its loss differentiates the model.
            ValueError: residuals, and an argument that has no meaning for them.
        """
        if closure is not None and not callable(closure):
            raise TypeError(f"closure: expected a function that computes the loss, found {type(closure).__name__}")
        for group in self.param_groups:
            check_numbers(group)
        may_rest = self.residual_rule is None and (self.rule.needs_closure or not self.store.blocks)
        if closure is None and may_rest and not any(group["lr"] for group in self.param_groups):
            return None  # nothing can move: `torch.distributed.checkpoint` takes such a step to create the state
        with torch.no_grad():
            return self._run(closure).loss

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
        with self._taking_residuals():
            return self.step(closure)  # with the hooks of torch.optim

    def residual_step(self) -> ResidualStep:
        """Make the rule for residuals; refuses arguments that have no meaning for them."""
        raise NotImplementedError

    def _run(self, closure: Callable[[], Any] | None) -> Outcome:
        """Make a step by the rule, apply its displacement, and report it to monitor and schedule."""
        self.recorder.listener.reset()  # after an interrupted forward pass
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        self.recorder.scaling = Scaling(scale, found_inf, self.recorder.scaling.worked)
        self._follow_parameters()
        if closure is not None and hasattr(self, "found_inf"):
            raise RuntimeError(
                f"{type(self).__name__}.step: GradScaler takes no closure; use bfloat16 without a scaler"
            )
        start, context = time.perf_counter(), self._context(closure)
        rule = self.residual_rule or self.rule
        is_differentiated = closure is not None and (rule.differentiates_model or not self.takes_loss)
        make = self._step_on_residuals if self.residual_rule else self._step_on_loss
        with self.monitor.watching():
            outcome = force_eager()(make)(context) if is_differentiated else make(context)
        if outcome.displacement:
            trained = context.trained if closure is None else self.trained()  # the closure may have renamed them
            moved, steps = [trained[name] for name in outcome.displacement], iter(outcome.displacement.values())
            for alike in by_device(list(map(to_local, moved)) if any_sharded(moved) else moved):
                torch._foreach_add_(alike, [next(steps) for _ in alike])
        self.monitor.counts["rollbacks"] += outcome.rollbacks
        if outcome.renewal.renewed:
            self.warn_of_unknown_parameters()
            if not self.monitor.steps:
                self._warn_of_rates("initial_lr", "max_lr")  # where schedulers of torch put theirs
        if outcome.is_skipped:
            self.monitor.skip()
            self._tell_of_bad_batches(context)
            self.recorder.discard()
        elif outcome.is_step:
            self.bad_batches = 0
            self.recorder.scaling = Scaling(worked=scale)  # a tensor of its own, which the scaler does not change
            entry = self.monitor.note_step(outcome.entry or {})
            entry["seconds"] = time.perf_counter() - start
        self.empty_steps = 0 if outcome.is_skipped or outcome.is_step else self.empty_steps + 1
        if self.empty_steps == MOST_EMPTY:
            warn_once(EMPTY, type(self).__name__, logger="optimizers")
        for p in [p for p, state in self.state.items() if not state]:
            del self.state[p]
        self._arm_recorder()
        return outcome

    def _tell_of_bad_batches(self, context: StepContext) -> None:
        """Log the third batch in a row that was left out, with the first parameter whose gradient is not finite."""
        self.bad_batches += 1
        scaling = self.recorder.scaling
        is_searching = scaling.found_inf is not None and scaling.worked is None
        if self.bad_batches == (MOST_SCALES if is_searching else MOST_BAD):
            bad = next((name for name, g in context.gradients().items() if not bool(g.isfinite().all())), "")
            if bad:  # and no batch without samples
                LOG.warning(BAD, type(self).__name__, self.bad_batches, bad)

    # -- a loss or residuals: what the first closure returns decides, for good

    def _step_on_loss(self, context: StepContext) -> Outcome:
        """By the rule. If the first closure returns residuals, undo its side effects and step on them instead."""
        is_first = context.closure is not None and not self.takes_loss
        before = ModelState(self.model) if is_first else None
        with ClosureWatch(self.model) if is_first else nullcontext() as watch:
            evaluation = self.rule.evaluate(context)
        value = evaluation.value
        if watch is not None:
            value = watch.loss_or_residuals(value)
        elif self.takes_loss and isinstance(value, Tensor) and value.shape == (1,):
            value = value[0]
        if isinstance(value, Tensor) and value.ndim == 1:
            self.recorder.discard()
            if before is not None:
                before.restore()
            with self._taking_residuals():
                return self._step_on_residuals(context)
        if watch is not None:
            watch.check_loss(value)
        if context.closure is not None:  # it may have renamed parameters, as spectral_norm does
            context = self._context(context.closure)
        has_gradients = any(p.grad is not None for p in context.trained.values())
        self.team.processes.require_gradients_of_all(type(self).__name__, has_gradients)
        outcome = self.rule.step(context, evaluation if value is evaluation.value else replace(evaluation, value=value))
        if not isinstance(outcome, Outcome):
            raise TypeError(
                f"step_rule: {type(self.rule).__name__}.step returned a {type(outcome).__name__}; return an "
                "optimizers.Outcome(loss, displacement)"
            )
        self.takes_loss |= context.closure is not None
        return outcome

    def _step_on_residuals(self, context: StepContext) -> Outcome:
        assert self.residual_rule is not None
        with self.recorder.paused():
            outcome = self.residual_rule.step(context, Evaluation())
        self.recorder.stop()
        return outcome

    @contextmanager
    def _taking_residuals(self) -> Iterator[None]:
        """Switch to `residual_rule`; back again after an exception, unless it was there before."""
        before = self.residual_rule
        if self.takes_loss:
            raise TypeError(f"{type(self).__name__}.step: the closure returned residuals, and a loss before")
        if self.residual_rule is None:
            refuse_sharded(self.model, "closure")
            self.residual_rule = self.residual_step()
        try:
            yield
        except BaseException:
            self.residual_rule = before
            self.recorder.discard()
            raise

    def _warn_of_rates(self, *keys: str) -> None:
        """Log that the largest of these rates is one of another optimizer's."""
        largest = max((float(group[key]) for group in self.param_groups for key in keys if key in group), default=0.0)
        if self.arguments["step_rule"] is None and 0 < largest < LEAST_USUAL_RATE:
            warn_once(RATE, type(self).__name__, f"{largest:.3g}", logger="optimizers")

    def _context(self, closure: Callable[[], Any] | None) -> StepContext:
        trained = self.trained()
        if self.team.current().processes.size > 1:
            require_one_device(type(self).__name__, trained)
        states = {name: self.state[p] for name, p in trained.items()}
        options: dict[str, dict[str, Any]] = {}
        for group in self.param_groups:  # a scheduler may keep tensors in them
            plain = {k: float(v) if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
            options |= dict.fromkeys([self._names[id(p)] for p in group["params"]], plain)
        return StepContext(closure, trained, options, states, self.preconditioner)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As for any optimizer. New gradients then make the recorded passes of the old ones void."""
        super().zero_grad(set_to_none)
        self.recorder.listener.reset()  # after an interrupted forward pass
        self.recorder.passes.zero()

    # -- reports and checkpoints

    def report(self) -> str:
        """A table of all parameters, 100 columns wide: preconditioner, factor shapes, memory, and reasons as notes.

        MB are 10^6 bytes kept between steps; between the first forward pass and the first step, an upper bound, or none
        where it depends on the number of samples.
        """
        if self.residual_rule is not None:
            return "\n".join(table(self.residual_rule.rows(self.model)))
        rows = rows_of(self.store.blocks, self.model, self.trained(), self.param_groups, bool(self.monitor.steps))
        return "\n".join([*table(rows), *noted(self.recorder.substitute), *noted(self.rule.report())])

    def stats(self) -> dict[str, Any]:
        """The last step's numbers, counts of events, seconds by part, and condition numbers of the blocks, to 4 digits.

        Computes the condition numbers: largest over least eigenvalue of each damped block, by its first parameter.
        Blocks whose solver does not need one (Woodbury, conjugate gradients) have none.
        """
        curvature = curvature_stats(self.store.blocks, self.preconditioner.schedule)
        stats = self.monitor.stats() | curvature | self.rule.stats()
        return pytree.tree_map_only(float, lambda x: float(f"{x:.4g}"), stats)

    def kind(self) -> dict[str, Any]:
        """The choices that a state must share with the optimizer that loads it."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """As for any optimizer: tensors, numbers and strings; see `optimizers.checkpoints` for the form."""
        return pack(self, self.kind(), self._parts(), lambda p: self.rule.empty_state(p, self.param_groups))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a `state_dict`; copies its tensors to device and dtype of the parameters.

        Raises:
            TypeError: not a dict.
            ValueError: it belongs to another optimizer, model, version, or choice of `adaptive`, `sharing`,
                `block_size` or `solver`, or is damaged; says what was found, and changes nothing.
        """
        state, parts = unpack(self, state_dict, self.kind(), self._parts())
        super().load_state_dict(state)
        self.recorder.discard()
        self._load_parts(parts)

    def _load_parts(self, parts: Mapping[str, Any]) -> None:
        """Load the `_parts` of a state; moves tensors to the device of the parameters."""
        self.preconditioner.solver = None
        home, trained = next(self.model.parameters()).device, self.trained()
        rules = {name: parts[name] for name in ("rule", "residual_rule")}
        parts = dict(parts) | pytree.tree_map_only(Tensor, lambda x: x.to(home), rules)
        devices = {name: p.device for name, p in self.model.named_parameters()}
        self.monitor.load_state_dict(parts["monitor"])
        self.preconditioner.schedule.load_state_dict(parts["intervals"])
        self.store.load_state_dict(parts["curvature"], dict.fromkeys(parts["curvature"], home) | devices)
        self.preconditioner.lacks_inverses = not all(b.is_ready for b in self.store.blocks if b.updates)
        self.rule.load_state_dict(parts["rule"], trained)
        residual = parts["residual_rule"]
        self.residual_rule = None if residual is None else self.residual_step()
        if self.residual_rule is not None:
            self.residual_rule.load_state_dict(residual, trained)
        self.recorder.load_state_dict(parts["recorder"], is_stopped=residual is not None)
        self._arm_recorder()

    def _parts(self) -> dict[str, Any]:
        return {
            "monitor": self.monitor.state_dict(),
            "intervals": self.preconditioner.schedule.state_dict(),
            "recorder": self.recorder.state_dict(),
            "rule": self.rule.state_dict(),
            "residual_rule": None if self.residual_rule is None else self.residual_rule.state_dict(),
            "curvature": self.store.state_dict(),
        }

    # -- parameters that change their precision or device, as by ``model.double()``

    def _recorded_parameters(self) -> dict[str, nn.Parameter]:
        """What is trained and not empty, by present names; within `functional_call` what stands in for it."""
        self._follow_parameters()
        now = dict(self.model.named_parameters())
        names = self.names()
        names |= {id(p): name for name, p in now.items() if id(p) in names}
        given = {names[id(p)] for group in self.param_groups for p in group["params"]}
        trained = {name: p for name, p in now.items() if name in given and p.requires_grad}
        nonempty = {name: p for name, p in trained.items() if nn.parameter.is_lazy(p) or p.numel()}
        self.store.drop_replaced(nonempty)
        return nonempty

    def _has_gradients(self) -> bool:
        """Whether a gradient is not zero now, or may be: those of sharded parameters may be elsewhere."""
        every = [p for group in self.param_groups for p in group["params"]]
        given = (g for p in every if p.requires_grad and (g := p.grad) is not None)
        return any_sharded(every) or any(bool((g.coalesce().values() if g.is_sparse else g).any()) for g in given)

    def _last_displacement(self) -> Mapping[str, Tensor]:
        """For the recorder, which is no place for processes to wait for each other."""
        shapes = {name: p.shape for name, p in self.trained().items()}  # one that has grown has none
        moved = {name: d for name, d in self._displacement().items() if d.shape == shapes[name]}
        return {name: d for name, d in moved.items() if not is_sharded(d)} | self.gathered

    def _displacement(self) -> dict[str, Tensor]:
        states = {name: self.state[p] for name, p in self.trained().items() if p in self.state}
        return dict(self.rule.last_displacement(states))

    def _arm_recorder(self) -> None:
        """Prepare for the next forward pass; have the whole of displacements that are sharded at hand, if it asks."""
        is_due = self.recorder.may_be_due()
        self.recorder.listener.expect(is_due)
        moved = self._displacement() if is_due else {}
        self.gathered = {name: to_full(to_local(d), d) for name, d in moved.items() if is_sharded(d)}

    def _follow_parameters(self) -> None:
        """Bring all state to the precision and device that the parameters have now."""
        before = self.forms
        self.forms = {id(p): (p.dtype, p.device) for group in self.param_groups for p in group["params"]}
        if self.forms == before or all(before.get(k, form) == form for k, form in self.forms.items()):
            return
        parts = self._parts()
        with torch.no_grad():
            self._load_parts(parts | {"curvature": curvature_of(self, parts["curvature"])})
            for p, state in self.state.items():
                if isinstance(p, Tensor):
                    state |= {k: x.to(p) for k, x in state.items() if isinstance(x, Tensor) and x.shape == p.shape}
        self.team.move(next(self.model.parameters()).device)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy or pickle trains a copy of the model; copy or pickle both together for them to share it."""
        groups = [dict(group) for group in self.param_groups]
        return rebuild, (type(self), self.model, self.arguments, groups, self.defaults, self.state_dict())


def checked_model(model: Any, arguments: Mapping[str, Any]) -> tuple[nn.Module, Distributed]:
    """Check all arguments; the user's own module, and the processes that train it."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model: pass the model itself, not its parameters (found {kind_of(model)}{function_hint(model)})"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(
            f"model: found {type(model).__name__}, which runs where none of its layers is seen; pass the module that "
            "was scripted or traced"
        )
    check_numbers(arguments)
    for name in ("factor_every", "decompose_every"):
        if arguments.get(name) is not None:
            check_whole(name, arguments[name], 1, 10**9)
    check_whole("seed", arguments["seed"], -(2**63), 2**64 - 1)
    inject, loss, rule = arguments["inject"], arguments["loss"], arguments["step_rule"]
    if loss is not None and (isinstance(loss, type) or not callable(loss)):
        raise TypeError(f"loss: expected a loss module as in nn.CrossEntropyLoss(), or a function, found {loss!r:.80}")
    if not isinstance(inject, Injection):
        raise TypeError(f"inject: expected curvature.isotropic() or another injection, found {uncalled(inject)}")
    if loss is None and inject.needs_loss and inject != empirical():  # which takes what the loop itself sends back
        raise ValueError(f"loss: {inject!r} needs the loss module, as in KFAC(model, loss=nn.CrossEntropyLoss())")
    by_class = nn.CrossEntropyLoss, nn.NLLLoss
    if inject == empirical() and isinstance(loss, by_class) and loss.weight is not None and loss.reduction == "mean":
        raise ValueError(
            f"loss: {type(loss).__name__} has weight=, and its mean divides by the weights of the batch, so that "
            "empirical() would count them squared. exact() or sampled() count them once, isotropic() needs no loss"
        )
    if rule is not None and not isinstance(rule, StepRule):
        raise TypeError(f"step_rule: expected an optimizers.StepRule, found {rule!r:.80}")
    if rule is not None and arguments["adaptive"]:
        raise ValueError("step_rule: adaptive=True is a step rule, too; choose one of the two")
    return unwrap_data_parallel(model, arguments["distributed"])


def rebuild(kind: Any, model: nn.Module, arguments: Any, groups: Any, defaults: Any, state: dict[str, Any]) -> Any:
    new = kind(model, **arguments)
    new.param_groups, new.defaults = groups, defaults
    new.load_state_dict(state)
    return new
