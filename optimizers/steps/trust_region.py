"""The step of a plain training loop: slopes set its size, inside a trust region."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvature.preconditioners import Block
from curvature.recording import is_sharded
from optimizers.distributed.sharding import sum_over_shards, to_local, to_sharded
from optimizers.monitor import Undecided
from optimizers.preconditioner import Renewal
from optimizers.recording.output_scale import OutputScale
from optimizers.steps.descent import Descent, DescentRule, inner_products
from optimizers.steps.finite_check import copy_to_host_async
from optimizers.steps.rule import Evaluation, Named, Outcome, StepContext, StepRule
from optimizers.steps.step_size import (
    FIRST_TRUST,
    StepSize,
    adapted,
    bounded,
    chosen,
    is_overshoot,
    longest_gradient,
    slope_ratio,
    started,
    undone,
)
from optimizers.steps.updates import Move, kept_by_decay, squared_norms


class TrustRegionStep(StepRule):
    """Adapts the step size by the slope along the last displacement; needs no closure.

    The step size grows while the loss still falls along the last displacement, and shrinks when it rises; a
    displacement that went far too far is undone. Bounds on the predicted change of the outputs, and on the change of
    each layer's parameters, cut the step.

    Args:
        descent: computes the directions.
    """

    def __init__(self, descent: DescentRule) -> None:
        self.descent = descent
        self.state: StepSize | None = None

    def step(self, context: StepContext, evaluation: Evaluation) -> Outcome:
        gradients, loss = context.gradients(), evaluation.value
        if not gradients:
            return Outcome(loss)
        good = context.unscale_and_check_finite(gradients)
        was_bad = not context.monitor.was_accepted and context.scaling.scale is None
        undo, renewal = None, None
        if context.is_idle() and not was_bad:  # the host does not wait: if the batch is bad, the device changes nothing
            undo, renewal = self._undo(context), Renewal()
        elif not context.knows_nothing():
            renewal = context.renew_if(gradients, good)
        if renewal is None:
            if was_bad and not bool(good):
                self._go_back(context)
            return Outcome(loss, is_skipped=True)
        with context.monitor.timed("direction"):
            move = self._found(context, gradients, good)
        assert self.state is not None
        entry = {"renewed": renewal.renewed, "inverted": renewal.inverted, "step_size": self.state.size}
        entry |= {"accepted": True, "overshoots": self.state.overshoots}
        undecided = None if undo is None else Undecided(copy_to_host_async(good), undo)
        return Outcome(loss, move=move, entry=entry, renewal=renewal, undecided=undecided)

    def after_move(self, slope: Tensor) -> None:
        assert self.state is not None
        self.state = self.state._replace(slope=slope)

    def _go_back(self, context: StepContext) -> None:
        """Undo the last displacement: no batch since has been finite."""
        last = self._last(context, context.trained)
        if last and self.state is not None:
            for name, displacement in last.items():
                to_local(context.trained[name]).sub_(displacement)
                displacement.zero_()
            self.state = undone(self.state, torch.full_like(self.state.size, -torch.inf))

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

    def _found(self, context: StepContext, gradients: Named, good: Tensor) -> Move:
        """The next move; updates the state of the step size."""
        least, outputs, before = first_trust(context.preconditioner.blocks), context.outputs, self.state
        ratio, norm = self._slope_ratio(context, gradients), _norm(gradients, context.trained)
        mean = norm if before is None else before.norm
        is_far = is_overshoot(ratio, norm, mean)
        # one batch far out of scale must not dominate the running mean
        clipped = torch._foreach_mul(list(gradients.values()), (longest_gradient(norm, mean) / norm).nan_to_num(1.0))
        found = self.descent(context, dict(zip(gradients, clipped, strict=True)), good & ~is_far)
        change, rms = output_change(found.energy, outputs), outputs.rms
        assert rms is not None
        lr = max(group["lr"] for group in context.options.values())
        first = started(change, norm, least) if before is None else before
        known = first if before is None else adapted(before, ratio, norm, context.monitor.started, lr, least)
        after, size = bounded(known, change, rms)
        slopes = torch.stack([context.options[name]["lr"] * slope for name, slope in found.slopes.items()])
        self.state = chosen(is_far, undone(first, ratio), after._replace(uncut=-size * slopes.sum()))
        return self._move(context, found, size, good, is_far)

    def _last(self, context: StepContext, names: Iterable[str]) -> dict[str, Tensor]:
        """The last displacements, by name."""
        kept = {name: context.states[name].get("displacement") for name in names if name in context.trained}
        return {name: to_local(d) for name, d in kept.items() if d is not None}

    def _slope_ratio(self, context: StepContext, gradients: Named) -> Tensor:
        """Ratio of the slope along the last displacement now to that at its start; 0 without a displacement."""
        last = self._last(context, gradients)
        if self.state is None or not last:
            return torch.zeros((), device=next(iter(gradients.values())).device)
        now = torch.stack(list(inner_products(last, gradients, context.trained).values()))
        return slope_ratio(now.sum(), self.state.slope)

    def _move(self, context: StepContext, found: Descent, size: Tensor, good: Tensor, is_far: Tensor) -> Move:
        """The step as a `Move`, whose directions become the displacements, in the memory of the last ones."""
        options, trained, directions = context.options, context.trained, found.directions
        assert self.state is not None
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
            step_size=size,
            trust=self.state.trust,
            good=good & ~is_far,
            undo=good & is_far,
        )

    # -- checkpoints

    def empty_state(self, p: Tensor, options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return self.descent.empty_state(p, options) | {"displacement": torch.zeros_like(p)}

    def state_dict(self) -> dict[str, Any]:
        return dict.fromkeys(StepSize._fields) if self.state is None else self.state._asdict()

    def load_state_dict(self, state: Mapping[str, Any], trained: Named) -> None:
        device = next(iter(trained.values())).device
        own = {name: value.to(device) for name, value in state.items() if value is not None}
        self.state = StepSize(**own) if own else None


def _norm(gradients: Named, trained: Named) -> Tensor:
    """The norm of all gradients together."""
    squares = squared_norms(list(gradients.values()))
    return sum_over_shards(squares, [trained[name] for name in gradients]).sum().sqrt()


def output_change(energy: Tensor, outputs: OutputScale) -> Tensor:
    """Predicted root mean square change of the output entries for step size one and isotropic curvature."""
    return (energy / outputs.entries_per_sample).sqrt()


def first_trust(blocks: Sequence[Block]) -> float:
    layers = sum(b.structure != "diagonal" for b in blocks)
    return FIRST_TRUST / max(layers, 1) ** 0.5
