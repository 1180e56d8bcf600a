"""What a step rule is given, what it returns, and how to write one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from optimizers.distributed.sharding import sum_over_shards, to_local
from optimizers.distributed.team import Team
from optimizers.monitor import Monitor, Undecided
from optimizers.preconditioner import Options, Preconditioner, Renewal
from optimizers.recording.output_scale import OutputScale
from optimizers.recording.recorder import Recorder
from optimizers.steps.closure_replay import Replay
from optimizers.steps.finite_check import unscale_and_check_finite
from optimizers.steps.updates import Move

MOST_FAILURES = 3  # steps in a row without a decomposition; so many are an error

Named = Mapping[str, Tensor]
__all__ = ["Evaluation", "Named", "Options", "Outcome", "Scaling", "StepContext", "StepRule", "checked_value"]


class Scaling(NamedTuple):
    """What a `torch.amp.GradScaler` has handed to the optimizer.

    Attributes:
        scale: of the loss, a scalar tensor; None without a scaler, or after `unscale_`.
        found_inf: whether it found gradients that are not finite; None without a scaler.
    """

    scale: Tensor | None = None
    found_inf: Tensor | None = None


@dataclass(frozen=True)
class StepContext:
    """All that a step rule may look at and use.

    Attributes:
        model: the module that the training loop calls.
        closure: what the caller passed to `step`, if anything.
        trained: parameters that require a gradient now, by name.
        options: lr, damping, momentum and weight_decay of each parameter, by name.
        states: what the optimizer keeps of each parameter, by name; for tensors of its shape.
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
        """Gradients of the trained parameters that have one, as the loop left them; of shards, shards."""
        found = {name: p.grad for name, p in self.trained.items() if p.grad is not None}
        dense = {name: g.to_dense() if g.layout != torch.strided else g for name, g in found.items()}
        return {name: to_local(g) for name, g in dense.items()}

    def unscale_and_check_finite(self, gradients: Named) -> Tensor:
        """Divide gradients by the scale of the loss, in place; a flag () on their device: all of them are finite."""
        good = unscale_and_check_finite(gradients.values(), self.scaling.scale)
        if self.scaling.found_inf is not None:
            good = good & (self.scaling.found_inf.to(good.device) == 0)
        trained = list(self.trained.values())
        return sum_over_shards((~good).float().expand(len(trained)), trained).sum() == 0  # of other shards, too

    def _loss_scale(self) -> float:
        if self.scaling.scale is None and self.scaling.found_inf is not None:
            raise RuntimeError(
                f"{self.owner}: inject=empirical() takes the backprops of the loss, and GradScaler.unscale_ "
                "was called before the step, so that their scale is unknown; leave unscale_ out or use isotropic()"
            )
        return 1.0 if self.scaling.scale is None else float(self.scaling.scale)

    # -- the preconditioner

    def is_idle(self) -> bool:
        """Whether there is nothing to renew and nothing to invert at this step."""
        return not self.recorder.has_measured and self.preconditioner.is_idle(self.monitor.started)

    def knows_nothing(self) -> bool:
        """Whether all batches were empty so far."""
        return self.preconditioner.knows_nothing(self.recorder.was_empty)

    def renew(self, gradients: Named) -> Renewal:
        """Take what forward passes have shown into the curvature, and invert the blocks whose turn it is.

        Raises:
            RuntimeError: no forward pass was seen yet.
            torch.linalg.LinAlgError: a block could not be inverted, three times in a row.
        """
        step = self.monitor.started
        with self.monitor.timed("factors"):
            self.recorder.settle(self._loss_scale)
            found = self.preconditioner.update_average(step, self.recorder.passes, gradients, self.trained)
            self.outputs.update(found.outputs)
        with self.monitor.timed("inverses"):
            inverted, share = self.preconditioner.invert_due(step, self.options)
        return Renewal(self.preconditioner.schedule.renews(step), inverted, share)

    def solve(self, gradients: Named) -> dict[str, Tensor]:
        """``(M + damping I)^-1 gradients``, by name."""
        return self.preconditioner.solve(gradients, self.trained)

    # -- closures

    def attempt(self, move: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The entry that `move` returns; that of a step not taken if a decomposition fails.

        Raises:
            torch.linalg.LinAlgError: for the third time in a row.
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
        """The batch as the closure knows it, to be evaluated again and again."""
        assert self.closure is not None
        return Replay(self.model, self.closure, self.team.processes.all_reduce_mean, self.recorder.paused)


@dataclass(frozen=True)
class Evaluation:
    """What the closure returned: the loss, or residuals (M,). `replay` calls it again."""

    value: Any = None
    replay: Replay | None = None

    @property
    def is_residuals(self) -> bool:
        return isinstance(self.value, Tensor) and self.value.ndim == 1


@dataclass(frozen=True)
class Outcome:
    """What a step rule has decided.

    Attributes:
        loss: what `step` returns.
        displacement: by name, of sharded parameters the local shard; the optimizer adds it to the parameters. None if
            the rule has moved them itself.
        move: a displacement that `torch.compile` can compile; the built-in `TrustRegionStep` uses it.
        entry: numbers for the history; None: no step was taken.
        renewal: what was done for the curvature.
        is_skipped: the batch is left out.
        rollbacks: steps that were tried and taken back.
        undecided: how to ask, later, whether the batch was good.
    """

    loss: Any = None
    displacement: Mapping[str, Tensor] | None = None
    move: Move | None = None
    entry: Mapping[str, Any] | None = None
    renewal: Renewal = Renewal()
    is_skipped: bool = False
    rollbacks: int = 0
    undecided: Undecided | None = None


class StepRule:
    """Base of step rules: from gradients and a preconditioner to a displacement of the parameters.

    A rule says in `step` how far to go, and keeps what it remembers from step to step in its attributes: plain numbers,
    tensors, and dicts of them by parameter name, which checkpoints take. ``docs/guides/step_rules.md`` has an example.
    """

    needs_closure = False  # whether `step` cannot do without
    differentiates_model = False  # whether closures are differentiated twice, which compiled code cannot be

    def evaluate(self, context: StepContext) -> Evaluation:
        """Call the closure, if there is one, before the step."""
        if context.closure is None:
            return Evaluation()
        with torch.enable_grad():
            return Evaluation(checked_value(context.closure()))

    def step(self, context: StepContext, evaluation: Evaluation) -> Outcome:
        """One step; gradients are in ``context.gradients()``."""
        raise NotImplementedError

    def after_move(self, slope: Tensor) -> None:
        """Told the slope of the loss along the displacement of a `move`, minus that, once it was made."""

    def empty_state(self, p: Tensor, options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What is kept of a parameter before the first step, given the parameter groups."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {k: dict(v) if isinstance(v, Mapping) else v for k, v in vars(self).items()}

    def load_state_dict(self, state: Mapping[str, Any], trained: Named) -> None:
        """Take a `state_dict`; tensors move to the device of the parameters."""
        device = next(iter(trained.values())).device if trained else torch.device("cpu")
        for name, value in state.items():
            if isinstance(value, Mapping):
                value = {k: v.to(trained[k]) if k in trained else v for k, v in value.items()}
            setattr(self, name, value.to(device) if isinstance(value, Tensor) else value)


def checked_value(value: Any) -> Any:
    """What a closure returned.

    Raises:
        TypeError: neither a loss nor residuals.
    """
    if isinstance(value, Tensor) and value.ndim > 1:
        raise TypeError(f"closure: expected the loss, or residuals (M,), found shape {tuple(value.shape)}")
    return value
