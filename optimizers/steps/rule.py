"""The interface of step rules, in: a `StepContext`, out: an `Outcome`; and the small arithmetic that they share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from curvature.linalg import stack
from curvature.operators import Named
from curvature.recording import is_sharded
from optimizers.distributed.sharding import any_sharded, sum_over_shards, to_local
from optimizers.preconditioner import Preconditioner, Renewal
from optimizers.recording.model_outputs import OutputScale
from optimizers.steps.closures import Replay, checked_value
from optimizers.steps.layer_vector import LayerVector, Layout, layout_of, norms

# AdamW's usual learning rate, for which lr=1 stands in weight decay: lr multiplies the step here, and has no unit, so
# that lr * weight_decay would be a thousand times the decay that recipes for AdamW mean.
DECAY_RATE = 1e-3


@dataclass(frozen=True)
class StepContext:
    """Everything that a step rule may read and use.

    Attributes:
        closure: the closure passed to `step`, if any.
        trained: parameters that require a gradient now, by name.
        options: lr, damping, momentum and weight_decay of each parameter, by name.
        states: the optimizer's state of each parameter, by name; for tensors of the parameter's shape.
        preconditioner: the running curvature and its inverses, the recorder that measures it, and the run's monitor.
    """

    closure: Callable[[], Any] | None
    trained: dict[str, Tensor]
    options: dict[str, dict[str, Any]]
    states: Mapping[str, dict[str, Any]]
    preconditioner: Preconditioner

    @property
    def outputs(self) -> OutputScale:
        """Root mean square and number of the model's output entries."""
        return self.preconditioner.recorder.outputs

    def gradients(self) -> dict[str, Tensor]:
        """The gradients that the loop left in ``.grad``, by name; of sharded parameters, the local shard."""
        given = {name: g for name, p in self.trained.items() if (g := p.grad) is not None}
        strided = {name: g if g.layout is torch.strided else g.to_dense() for name, g in given.items()}
        return {name: to_local(g) for name, g in strided.items()} if any_sharded(strided.values()) else strided

    def unscale_and_check_finite(self, gradients: Named) -> bool:
        """Divide gradients in place by the scale of a `torch.amp.GradScaler`, if there is one.

        Returns whether all are finite; the host waits once.
        """
        scaling, trained = self.preconditioner.recorder.scaling, list(self.trained.values())
        scaling.unscale(gradients)
        good = are_finite(gradients.values())
        if scaling.found_inf is not None:
            good = good and not float(scaling.found_inf)
        if not any_sharded(trained):
            return self.preconditioner.team.processes.all_reduce_max([float(not good)]) == [0.0]  # of all processes
        bad = torch.full((len(trained),), float(not good), device=trained[0].device)
        return float(sum_over_shards(bad, trained).sum()) == 0  # on all shards

    def renew(self, gradients: Named) -> Renewal:
        """Update the curvature by the recorded passes, and invert the blocks that are due.

        Raises:
            torch.linalg.LinAlgError: a block could not be inverted, three times in a row.
        """
        return self.preconditioner.renew(gradients, self.trained, self.options)

    def solve(self, gradients: Named) -> dict[str, Tensor]:
        """``(M + damping I)^-1 gradients``, by name."""
        vector = LayerVector.of(layout_of_step(self, gradients), gradients)
        return dict(self.preconditioner.solve_vector(vector, self.trained))


def layout_of_step(context: StepContext, tensors: Named) -> Layout:
    """Where a step keeps such tensors: those with the same options in one vector, layers of one form together."""
    options, states, trained = context.options, context.states, context.trained
    kinds: dict[str, Any] = {
        name: (group["lr"], group.get("momentum"), group.get("damping"), states[name].get("weight"))
        for name in tensors
        for group in (options[name],)
    }
    for name in tensors if any_sharded(trained.values()) else ():
        p: Any = trained[name]
        kinds[name] += (p.device_mesh, p.placements) if is_sharded(p) else ()
    return layout_of([block.names for block in context.preconditioner.blocks], tensors, kinds.__getitem__)


@dataclass(frozen=True)
class Evaluation:
    """The value of the closure, a loss or residuals (M,); `replay` can call the closure again."""

    value: Any = None
    replay: Replay | None = None


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

    needs_closure = False  # whether `step` requires a closure ...
    argument: ClassVar[str] = ""  # ... as this argument of the optimizer asks for
    differentiates_model = False  # whether it differentiates the closure twice, which compiled code does not allow

    def evaluate(self, context: StepContext) -> Evaluation:
        """Call the closure, if there is one, before the step."""
        if context.closure is None:
            return Evaluation()
        with torch.enable_grad():
            return Evaluation(checked_value(context.closure()))

    def replayed(self, context: StepContext) -> Evaluation:
        """What the closure returns, and its `Replay`; TypeError without a closure."""
        preconditioner = context.preconditioner
        if context.closure is None:
            raise TypeError(
                f"{preconditioner.owner}{self.argument}.step: pass a closure that computes the loss of the batch, as "
                "for torch.optim.LBFGS"
            )
        mean = preconditioner.team.processes.all_reduce_mean
        replay = Replay(preconditioner.recorder.model, context.closure, mean, preconditioner.recorder.paused)
        with preconditioner.monitor.timed("closure"):
            return Evaluation(replay.first(), replay)

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


# -- arithmetic that rules share


def kept_by_decay(options: Mapping[str, Any]) -> float:
    """What decoupled weight decay leaves of a parameter at a step, given the options of its group; None is none."""
    return 1 - DECAY_RATE * options["lr"] * (options["weight_decay"] or 0.0)


class Origin:
    """Where parameters are now, to try displacements from; after an exception inside, they are there again."""

    def __init__(self, parameters: Named) -> None:
        self.parameters = parameters
        self.values = {name: p.detach().clone() for name, p in parameters.items()}

    @torch.no_grad()
    def move(self, displacement: Named, kept: Mapping[str, float] = MappingProxyType({})) -> None:
        """Move to a displacement from the parameters, of which weight decay has left that share, if any is given."""
        for name, value in self.values.items():
            p = self.parameters[name].copy_(value)
            if name in kept:
                p.mul_(kept[name])
            if name in displacement:
                p.add_(displacement[name])

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is not None:
            self.move({})


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no entry is infinite or nan."""
    some = [t for t in tensors if t.numel()]
    # norms are quick, but may overflow
    return math.isfinite(sum(stack(norms(some)).tolist())) or bool(all_finite(some))


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """`are_finite` of at least one tensor, as a flag () on the device of the first."""
    return stack(torch.isfinite(t).all() for t in tensors).all()
