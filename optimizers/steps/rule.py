"""The interface of step rules. In: a `StepContext`. Out: an `Outcome`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from curvature.linalg import widen
from curvature.operators import Named
from curvature.preconditioners import Block
from curvature.recording import is_sharded
from optimizers.distributed.sharding import sum_over_shards, to_local
from optimizers.distributed.team import Team
from optimizers.monitor import Monitor
from optimizers.preconditioner import Preconditioner, Renewal
from optimizers.recording.output_scale import OutputScale
from optimizers.recording.recorder import Recorder
from optimizers.steps.closure_checks import ClosureWatch, checked_value
from optimizers.steps.closure_replay import Replay
from optimizers.steps.layer_vector import LayerVector, Layout, layout_of
from optimizers.steps.updates import are_finite

MOST_FAILURES = 3  # consecutive steps without a decomposition that raise an error

Entry = TypeVar("Entry")


class Scaling(NamedTuple):
    """What a `torch.amp.GradScaler` has passed to the optimizer."""

    scale: Tensor | None = None  # of the loss (); None without a scaler, or after `unscale_`
    found_inf: Tensor | None = None  # whether it found gradients that are not finite; None without a scaler


@dataclass(frozen=True)
class StepContext:
    """Everything that a step rule may read and use.

    Attributes:
        model: the module that the training loop calls.
        closure: the closure passed to `step`, if any.
        trained: parameters that require a gradient now, by name.
        options: lr, damping, momentum and weight_decay of each parameter, by name.
        states: the optimizer's state of each parameter, by name; for tensors of the parameter's shape.
        recorder: its forward and backward passes since the last step.
        preconditioner: the running curvature and its inverses.
        monitor: counts steps and times their parts.
        scaling: of a `torch.amp.GradScaler`.
        outputs: root mean square and number of the model's output entries.
        owner: name of the optimizer, for messages.
    """

    model: nn.Module
    closure: Callable[[], Any] | None
    trained: dict[str, Tensor]
    options: dict[str, dict[str, Any]]
    states: Mapping[str, dict[str, Any]]
    recorder: Recorder
    preconditioner: Preconditioner
    monitor: Monitor
    scaling: Scaling
    owner: str

    @property
    def outputs(self) -> OutputScale:
        return self.recorder.outputs

    @property
    def team(self) -> Team:
        return self.preconditioner.teams.current()

    def gradients(self) -> dict[str, Tensor]:
        """The gradients that the loop left in ``.grad``, by name; of sharded parameters, the local shard."""
        found = {name: p.grad for name, p in self.trained.items() if p.grad is not None}
        dense = {name: g.to_dense() if g.layout != torch.strided else g for name, g in found.items()}
        return {name: to_local(g) for name, g in dense.items()} if self.is_spread else dense

    @functools.cached_property
    def home(self) -> torch.device:
        """Where the numbers of a step are, if layers are on several devices."""
        return next(iter(self.trained.values())).device

    @functools.cached_property
    def is_spread(self) -> bool:
        """Whether a parameter is spread over processes: decided once for all."""
        return any(map(is_sharded, self.trained.values()))

    def over_shards(self, numbers: Tensor, names: Sequence[str]) -> Tensor:
        """Numbers, one for the local shard of each parameter, summed over the processes that have its other shards."""
        return sum_over_shards(numbers, [self.trained[name] for name in names]) if self.is_spread else numbers

    def block_of(self, name: str) -> Block | None:
        """The block of a parameter, if it has one."""
        return self._blocks.get(name)

    @functools.cached_property
    def _blocks(self) -> dict[str, Block]:
        return {name: block for block in self.preconditioner.blocks for name in block.names}

    def layout(self, tensors: Named) -> Layout:
        """Where a step keeps such tensors: those with the same options in one vector, layers of one form together."""
        parts = [tuple(name for name in block.names if name in tensors) for block in self.preconditioner.blocks]
        layers = {name: layer for layer in parts for name in layer}
        return layout_of(dict.fromkeys(layers.get(name, (name,)) for name in tensors), tensors, self._kind)

    def _kind(self, name: str) -> Hashable:
        """What parameters must share to be moved together."""
        options, p = self.options[name], self.trained[name]
        shards = (p.device_mesh, p.placements) if self.is_spread and is_sharded(p) else None  # type: ignore[attr-defined]
        weight = self.states[name].get("weight")  # on the device it is shared by those that had it in common
        weight = id(weight) if isinstance(weight, Tensor) else weight
        return options["lr"], options.get("momentum"), options.get("damping"), weight, shards

    def unscale(self, gradients: Named) -> None:
        """Divide gradients in place by the scale of a `torch.amp.GradScaler`, if there is one."""
        if self.scaling.scale is not None:
            inverse = widen(self.scaling.scale).reciprocal()
            for g in gradients.values():
                g.mul_(inverse.to(g.device, torch.promote_types(g.dtype, torch.float32)))

    def unscale_and_check_finite(self, gradients: Named) -> bool:
        """Divide gradients in place by the scale of the loss; returns whether all are finite. The host waits once."""
        self.unscale(gradients)
        good = are_finite(gradients.values())
        if self.scaling.found_inf is not None:
            good = good and not float(self.scaling.found_inf)
        if not self.is_spread:
            return good
        trained = list(self.trained.values())
        bad = torch.full((len(trained),), float(not good), device=self.home)
        return float(sum_over_shards(bad, trained).sum()) == 0  # on all shards

    def _loss_scale(self) -> float:
        if self.scaling.scale is None and self.scaling.found_inf is not None:
            raise RuntimeError(
                f"{self.owner}: inject=empirical() takes the backprops of the loss, and GradScaler.unscale_ "
                "was called before the step, so that their scale is unknown; leave unscale_ out or use isotropic()"
            )
        return 1.0 if self.scaling.scale is None else float(self.scaling.scale)

    # -- the preconditioner

    def is_idle(self) -> bool:
        """Whether this step has nothing to renew and nothing to invert."""
        return not self.recorder.has_measured and self.preconditioner.is_idle()

    def knows_nothing(self) -> bool:
        """Whether all batches so far were empty."""
        return self.preconditioner.knows_nothing(self.recorder.was_empty)

    def renew(self, gradients: Named) -> Renewal:
        """Update the curvature by the recorded passes, and invert the blocks that are due.

        Raises:
            torch.linalg.LinAlgError: a block could not be inverted, three times in a row.
        """
        part = self.preconditioner
        with self.monitor.timed("factors"):
            self.recorder.settle(self._loss_scale)
            found = part.gathered(self.recorder.passes, gradients, self.trained)
        renewal = part.renew(found, self.options)
        self.outputs.update(found.outputs, found.curvature.along)
        return renewal

    def solve(self, gradients: Named) -> dict[str, Tensor]:
        """``(M + damping I)^-1 gradients``, by name."""
        return dict(self.solve_vector(LayerVector.of(self.layout(gradients), gradients)))

    def solve_vector(self, vector: LayerVector) -> LayerVector:
        """`solve` for all layers of a vector at once."""
        return self.preconditioner.solve_vector(vector, self.trained)

    # -- closures

    def attempt(self, move: Callable[[], Entry]) -> Entry | dict[str, Any]:
        """The entry that `move` returns, or that of a step not accepted if a decomposition fails.

        Raises:
            torch.linalg.LinAlgError: a decomposition failed at the third step in a row.
        """
        try:
            entry = move()
        except torch.linalg.LinAlgError:
            self.monitor.failures_in_row += 1
            if self.monitor.failures_in_row == MOST_FAILURES:
                raise
            return {"accepted": False, "rollbacks": 0}
        self.monitor.failures_in_row = 0
        return entry

    def replay(self) -> Replay:
        """The closure as a function that can be called repeatedly on the same batch."""
        assert self.closure is not None
        return Replay(self.model, self.closure, self.team.processes.all_reduce_mean, self.recorder.paused)


@dataclass(frozen=True)
class Evaluation:
    """The value of the closure, a loss or residuals (M,); `replay` can call the closure again."""

    value: Any = None
    replay: Replay | None = None

    @property
    def is_residuals(self) -> bool:
        return isinstance(self.value, Tensor) and self.value.ndim == 1


@dataclass(frozen=True)
class Outcome:
    """The result of a step rule.

    Attributes:
        loss: the value that `step` returns.
        displacement: by name, of sharded parameters the local shard; the optimizer adds it to the parameters. None if
            the rule has moved them itself.
        entry: numbers for the history; may be left out.
        renewal: returned by ``context.renew``.
        is_skipped: whether to count the batch as skipped.
        rollbacks: number of steps that were tried and rolled back.
    """

    loss: Any = None
    displacement: Mapping[str, Tensor] | None = None
    entry: Mapping[str, Any] | None = None
    renewal: Renewal = Renewal()
    is_skipped: bool = False
    rollbacks: int = 0

    @property
    def is_step(self) -> bool:
        """Whether a step was taken, which counts, even if it has nothing for the history."""
        is_told = self.entry is not None or bool(self.displacement)
        return is_told or self.renewal.renewed or self.renewal.inverted > 0


class StepRule:
    """Base of step rules: from gradients and a preconditioner to a displacement of the parameters.

    Subclasses implement `step`. Their attributes are their state, which checkpoints save: plain numbers, tensors, and
    dicts of tensors by parameter name. ``docs/guides/step_rules.md`` has an example.
    """

    needs_closure = False  # whether `step` requires a closure
    differentiates_model = False  # whether it differentiates the closure twice, which compiled code does not allow

    def evaluate(self, context: StepContext) -> Evaluation:
        """Call the closure, if there is one, before the step."""
        if context.closure is None:
            return Evaluation()
        with torch.enable_grad():
            return Evaluation(checked_value(context.closure()))

    def step(self, context: StepContext, evaluation: Evaluation) -> Outcome:
        """One step; gradients are in ``context.gradients()``."""
        raise NotImplementedError

    def last_displacement(self, states: Mapping[str, dict[str, Any]]) -> Named:
        """The last displacement by name, if changes of the outputs along it are to be measured at the next renewal."""
        return {}

    def report(self) -> str:
        """A line for the optimizer's `report()`; empty if there is nothing to say."""
        return ""

    def stats(self) -> dict[str, Any]:
        """What the optimizer's `stats()` has about the rule itself."""
        return {}

    def empty_state(self, p: Tensor, options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The state of a parameter before the first step, given the parameter groups."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {k: dict(v) if isinstance(v, Mapping) else v for k, v in vars(self).items()}

    def load_state_dict(self, state: Mapping[str, Any], trained: Named) -> None:
        """Load a `state_dict`, whose tensors are on the model's device; those by parameter go to that of theirs."""
        for name, value in state.items():
            if isinstance(value, Mapping):
                value = {k: v.to(trained[k]) if k in trained else v for k, v in value.items()}
            setattr(self, name, value)


def replayed(context: StepContext, what: str) -> Evaluation:
    """What the closure returns, and its `Replay`; TypeError, with `what` to do, without a closure."""
    if context.closure is None:
        raise TypeError(f"{context.owner}{what}")
    replay = context.replay()
    with context.monitor.timed("closure"):
        return Evaluation(replay.first(), replay)


def first_evaluation(rule: StepRule, context: StepContext) -> Evaluation:
    """What the closure returns at its first call, which shows whether it is a loss with gradients, or residuals."""
    with ClosureWatch(context.model) as watch:
        evaluation = rule.evaluate(context)
    found = replace(evaluation, value=watch.loss_or_residuals(evaluation.value))
    if not found.is_residuals:
        watch.check_loss(found.value)
    return found
