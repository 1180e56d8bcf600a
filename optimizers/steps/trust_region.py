"""The step of a plain training loop: slopes set its size, inside a trust region."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvature.preconditioners import Block
from curvature.recording import is_sharded
from optimizers.distributed.sharding import to_local, to_sharded
from optimizers.monitor import Undecided
from optimizers.preconditioner import Renewal
from optimizers.recording.output_scale import OutputScale
from optimizers.steps.descent import Descent, DescentRule, GradientNorms, inner_products
from optimizers.steps.finite_check import copy_to_host_async
from optimizers.steps.rule import Evaluation, Named, Outcome, StepContext, StepRule
from optimizers.steps.updates import Move, adapted_step, adapted_trust, kept_by_decay, slope_ratio

FIRST_OUTPUT_CHANGE = 0.1  # root mean square change of the output entries that the first step aims at
ADAPTATION_RATE = 0.3  # how fast the step size follows the slopes
# Longest step of a layer as a fraction of its parameters' norm: changes of many layers add up like random ones.
FIRST_TRUST = 0.15  # initial bound, divided by the square root of the number of layers
LARGEST_TRUST = 0.2  # bound after many steps that could have been longer
OUTPUT_CHANGE_GROWTH = 2.0  # largest ratio of a step's output change to that of recent steps
OUTPUT_CHANGE_DECAY = 0.9  # decay of the output change of recent steps


class TrustState(NamedTuple):
    """State of the step size; scalar tensors, None before the first step.

    Attributes:
        step_size: multiplies the direction.
        trust: longest step of a layer, relative to the norm of its parameters.
        slope: of the loss along the last displacement, at its start.
        output_change: largest predicted change of the outputs in recent steps.
    """

    step_size: Tensor | None = None
    trust: Tensor | None = None
    slope: Tensor | None = None
    output_change: Tensor | None = None


class TrustRegionStep(StepRule):
    """Adapts the step size by the slope along the last displacement; needs no closure.

    The step size grows while the loss still falls along the last displacement, and shrinks when it rises. Bounds on the
    predicted change of the outputs, and on the change of each layer's parameters, cut the step.

    Args:
        descent: computes the directions.
    """

    def __init__(self, descent: DescentRule) -> None:
        self.descent = descent
        self.state = TrustState()

    def step(self, context: StepContext, evaluation: Evaluation) -> Outcome:
        gradients, loss = context.gradients(), evaluation.value
        if not gradients:
            return Outcome(loss)
        good = context.unscale_and_check_finite(gradients)
        is_idle, undo, renewal = context.is_idle(), None, Renewal()
        if is_idle:  # the host does not wait: if the batch is bad, the device changes nothing
            undo = self._undo(context)
        elif bool(good) and not context.knows_nothing():
            renewal = context.renew(gradients)
        else:
            return Outcome(loss, is_skipped=True)
        with context.monitor.timed("direction"):
            found = self.descent(context, gradients, good)
            self.state = self._adapted(context, gradients, found)
            move = self._move(context, found, good)
        entry = {"renewed": renewal.renewed, "inverted": renewal.inverted, "step_size": self.state.step_size}
        undecided = None if undo is None else Undecided(copy_to_host_async(good), undo)
        return Outcome(loss, move=move, entry=entry | {"accepted": True}, renewal=renewal, undecided=undecided)

    def after_move(self, slope: Tensor) -> None:
        self.state = self.state._replace(slope=slope)

    def _undo(self, context: StepContext) -> Callable[[], None]:
        """A function that restores the state on the host as it is now."""
        mine, descent, its = self.state, self.descent, dict(vars(self.descent))
        states = [(state, dict(state)) for state in (context.states[name] for name in context.trained)]

        def undo() -> None:
            self.state = mine
            vars(descent).update(its)
            for state, old in states:
                state.clear()
                state.update(old)

        return undo

    def _adapted(self, context: StepContext, gradients: Named, found: Descent) -> TrustState:
        """The step size and the trust region for this step."""
        step_size, trust, _, recent = self.state
        change = output_change(found.energy, context.outputs)
        tiny = torch.finfo(change.dtype).tiny
        least = first_trust(context.preconditioner.blocks)
        if trust is None:
            trust = torch.full_like(change, least)
        if step_size is None:
            step_size = FIRST_OUTPUT_CHANGE / change.clamp(min=tiny)
        elif (ratio := self._slope_ratio(context, gradients, found.is_outlier)) is not None:
            lr = max(group["lr"] for group in context.options.values())
            trust = adapted_trust(trust, ratio, least, LARGEST_TRUST)
            step_size = adapted_step(step_size, ratio, ADAPTATION_RATE * min(1.0, lr))
        assert context.outputs.rms is not None
        reach = 1 + context.outputs.rms
        if recent is not None:  # one hard batch among easy ones must not be answered with one long step
            reach = torch.minimum(reach, OUTPUT_CHANGE_GROWTH * recent)
        step_size = torch.minimum(step_size, reach / change.clamp(min=tiny))
        taken = step_size * change
        recent = taken if recent is None else torch.maximum(taken, OUTPUT_CHANGE_DECAY * recent)
        return TrustState(step_size, trust, self.state.slope, recent)

    def _slope_ratio(self, context: StepContext, gradients: Named, is_outlier: Tensor | None) -> Tensor | None:
        """Ratio of the slope along the last displacement now to that at its start; None without a displacement."""
        kept = {name: context.states[name].get("displacement") for name in context.trained if name in gradients}
        last = {name: to_local(d) for name, d in kept.items() if d is not None}
        if self.state.slope is None or not last:
            return None
        now = torch.stack(list(inner_products(last, gradients, context.trained).values()))
        ratio = slope_ratio(now.sum(), self.state.slope)
        return ratio if is_outlier is None else torch.where(is_outlier, 0, ratio)

    def _move(self, context: StepContext, found: Descent, good: Tensor) -> Move:
        """The step as a `Move`, whose directions become the displacements, in the memory of the last ones."""
        options, trained, directions = context.options, context.trained, found.directions
        assert self.state.step_size is not None and self.state.trust is not None
        last = {name: context.states[name].pop("displacement", None) for name in trained}
        own = {name: to_local(trained[name]) for name in directions}
        joint = {
            k: tuple(n for n in b.names if n in directions) for b in context.preconditioner.blocks for k in b.names
        }
        layers = list(dict.fromkeys(joint.get(name, (name,)) for name in directions))
        names = [name for layer in layers for name in layer]
        # tensors, since torch.compile treats Python numbers as constants
        number = lambda x: torch.tensor(x, dtype=torch.float64, device="cpu")
        groups = {id(g): g for g in options.values()}
        numbers = {k: (number(g["lr"]), number(kept_by_decay(g))) for k, g in groups.items()}
        owners = [id(options[name]) for name in names]
        is_spread = any(is_sharded(trained[name]) for name in directions)
        lengths, sizes = (inner_products(x, x, trained) if is_spread else {} for x in (directions, own))
        for name in names:
            # if the batch is bad, `take` leaves the last displacement unchanged
            kept = to_sharded(directions[name], trained[name]) if last[name] is None else last[name]
            context.states[name]["displacement"] = kept
        return Move(
            parameters=[own[name] for name in names],
            directions=[directions[name] for name in names],
            last=[None if last[name] is None else to_local(last[name]) for name in names],
            squares=[(lengths[name], sizes[name]) if is_spread else None for name in names],
            slopes=[found.slopes[name] for name in names],
            rates=[(numbers[owner][0], len(list(same))) for owner, same in itertools.groupby(owners)],
            kept=[numbers[k][1] if options[n]["weight_decay"] else None for n, k in zip(names, owners, strict=True)],
            layers=[len(layer) for layer in layers],
            step_size=self.state.step_size,
            trust=self.state.trust,
            good=good,
        )

    # -- checkpoints

    def empty_state(self, p: Tensor, options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return self.descent.empty_state(p, options) | {"displacement": torch.zeros_like(p)}

    def state_dict(self) -> dict[str, Any]:
        norms = getattr(self.descent, "norms", GradientNorms())
        return self.state._asdict() | {"longest_gradient": norms.longest, "is_outlier": norms.is_outlier}

    def load_state_dict(self, state: Mapping[str, Any], trained: Named) -> None:
        device = next(iter(trained.values())).device
        own = {k: v if v is None else v.to(device) for k, v in state.items()}
        if hasattr(self.descent, "norms"):
            self.descent.norms = GradientNorms(own.pop("longest_gradient"), own.pop("is_outlier"))
        self.state = TrustState(*(own[name] for name in TrustState._fields))


def output_change(energy: Tensor, outputs: OutputScale) -> Tensor:
    """Predicted root mean square change of the output entries for step size one and isotropic curvature."""
    return (energy / outputs.entries_per_sample).sqrt()


def first_trust(blocks: Sequence[Block]) -> float:
    layers = sum(b.structure != "diagonal" for b in blocks)
    return FIRST_TRUST / max(layers, 1) ** 0.5
