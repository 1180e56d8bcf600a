"""The step of a plain training loop: slopes set its size, inside a trust region."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvature.linalg import copy_to_host_async
from curvature.preconditioners import Block
from optimizers.distributed.sharding import to_local
from optimizers.monitor import Undecided
from optimizers.preconditioner import Renewal
from optimizers.recording.output_scale import OutputScale
from optimizers.steps.calibration import calibrate, underestimate
from optimizers.steps.descent import Descent, DescentRule
from optimizers.steps.rule import Evaluation, Named, Outcome, StepContext, StepRule
from optimizers.steps.stacks import Stack, products, row_squares, scaled
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

    takes_several_devices = True

    def __init__(self, descent: DescentRule) -> None:
        self.descent = descent
        self.state: StepSize | None = None
        self.energies: dict[str, Tensor] = {}  # predicted for the last displacement, by the first parameter of a layer

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
            if renewal is not None:
                self._calibrate(context)
        if renewal is None:
            if was_bad and not bool(good):
                self._go_back(context)
            return Outcome(loss, is_skipped=True)
        with context.monitor.timed("direction"):
            move = self._found(context, context.stack(gradients), good)
        assert self.state is not None
        entry = {"renewed": renewal.renewed, "inverted": renewal.inverted, "step_size": self.state.size}
        entry |= {"accepted": True, "overshoots": self.state.overshoots}
        undecided = None if undo is None else Undecided(copy_to_host_async(good), undo)
        return Outcome(loss, move=move, entry=entry, renewal=renewal, undecided=undecided)

    def after_move(self, rates: Tensor, slope: Tensor) -> None:
        assert self.state is not None
        self.state = self.state._replace(slope=slope)
        if self.energies:
            last = rates.square() * torch.stack(list(self.energies.values()))
            self.energies = dict(zip(self.energies, last.unbind(), strict=True))

    def last_displacement(self, states: Mapping[str, dict[str, Any]]) -> Named:
        found = {name: state.get("displacement") for name, state in states.items()} if self.energies else {}
        return {name: d for name, d in found.items() if d is not None}

    def _calibrate(self, context: StepContext) -> None:
        """Compare what a renewal measured along the last displacement with what was predicted."""
        along = context.outputs.along
        if self.state is not None and along:
            joint = torch.stack([self.state.measured, self.state.predicted])
            measured, predicted = calibrate(context.preconditioner.blocks, along, self.energies, joint).unbind()
            self.state = self.state._replace(measured=measured, predicted=predicted)

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

    def _found(self, context: StepContext, gradients: Stack, good: Tensor) -> Move:
        """The next move; updates the state of the step size."""
        least, outputs, before = first_trust(context.preconditioner.blocks), context.outputs, self.state
        last = self._last_rows(context, gradients)
        ratio, norm = self._slope_ratio(context, gradients, last), _norm(context, gradients)
        mean = norm if before is None else before.norm
        is_far = is_overshoot(ratio, norm, mean)
        # one batch far out of scale must not dominate the running mean
        clipped = scaled(gradients.rows, (longest_gradient(norm, mean) / norm).nan_to_num(1.0))
        found = self.descent(context, Stack(gradients.families, clipped), good & ~is_far)
        energies, rms = found.energies, outputs.rms
        change = output_change(energies.sum(), outputs)
        change = change if before is None else change * underestimate(before.measured, before.predicted)
        assert rms is not None
        rates = [context.options[family.names[0]]["lr"] for family in gradients.families]
        lr = max(group["lr"] for group in context.options.values())
        first = started(change, norm, least) if before is None else before
        known = first if before is None else adapted(before, ratio, norm, context.monitor.started, lr, least)
        after, size = bounded(known, change, rms)
        slopes = torch._foreach_mul(found.slopes.split([len(rows) for rows in gradients.rows]), rates)
        self.state = chosen(is_far, undone(first, ratio), after._replace(uncut=-size * torch.cat(slopes).sum()))
        names = [layer[0] for layer in found.directions.layers]
        self.energies = dict(zip(names, energies.unbind(), strict=True)) if len(energies) == len(names) else {}
        return self._move(context, found, last, size, good, is_far)

    def _last(self, context: StepContext, names: Iterable[str]) -> dict[str, Tensor]:
        """The last displacements, by name."""
        kept = {name: context.states[name].get("displacement") for name in names if name in context.trained}
        return {name: to_local(d) for name, d in kept.items() if d is not None}

    def _last_rows(self, context: StepContext, gradients: Stack) -> Stack:
        """The last displacements, zeros where there were none; parameters that do not move now have none any more."""
        for name in context.trained.keys() - gradients.keys():
            context.states[name].pop("displacement", None)
        return gradients.state("displacement", context.states, context.trained)

    def _slope_ratio(self, context: StepContext, gradients: Stack, last: Stack) -> Tensor:
        """Ratio of the slope along the last displacement now to that at its start; 0 without a displacement."""
        now = context.over_shards(products(last.rows, gradients.rows, context.home), gradients.first_layers).sum()
        return torch.zeros_like(now) if self.state is None else slope_ratio(now, self.state.slope)

    def _move(
        self, context: StepContext, found: Descent, last: Stack, size: Tensor, good: Tensor, is_far: Tensor
    ) -> Move:
        """The step as a `Move`, whose directions become the displacements, in the memory of the last ones."""
        options, directions = context.options, found.directions
        assert self.state is not None
        own = {name: to_local(context.trained[name]) for name in directions}
        # tensors, since torch.compile treats Python numbers as constants
        number = lambda x: torch.tensor(x, dtype=torch.float64, device="cpu")
        rates = [(options[family.names[0]]["lr"], len(family.layers)) for family in directions.families]
        runs = [(lr, [count for _, count in same]) for lr, same in itertools.groupby(rates, lambda pair: pair[0])]
        decays = {name: kept_by_decay(options[name]) for name in own if options[name]["weight_decay"]}
        squares = None
        if context.is_spread:
            sizes = context.over_shards(squared_norms(list(own.values()), context.home), [(name,) for name in own])
            squares = context.over_shards(row_squares(directions.rows, context.home), directions.layers), sizes
        return Move(
            parameters=list(own.values()),
            directions=directions.rows,
            last=last.rows,
            squares=squares,
            slopes=found.slopes,
            rates=[(number(lr), sum(counts)) for lr, counts in runs],
            decayed=[
                (number(kept), [own[name] for name, k in decays.items() if k == kept])
                for kept in dict.fromkeys(decays.values())
            ],
            shapes=[family.shapes for family in directions.families],
            tables=[
                (k, directions[name], len(context.trained[name]))
                for k, name in enumerate(directions)
                if (block := context.block_of(name)) is not None and block.has_separate_rows
            ],
            blocks=self._blocks(context, directions),
            step_size=size,
            trust=self.state.trust,
            good=good & ~is_far,
            undo=good & is_far,
        )

    @staticmethod
    def _blocks(context: StepContext, directions: Stack) -> Tensor | None:
        """`Move.blocks`."""
        owners = [context.block_of(layer[0]) or layer for layer in directions.layers]
        numbers = {id(owner): k for k, owner in enumerate(owners)}
        if len(numbers) == len(owners):
            return None
        return torch.tensor([numbers[id(owner)] for owner in owners], device=context.home)

    # -- checkpoints

    def empty_state(self, p: Tensor, options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return self.descent.empty_state(p, options) | {"displacement": torch.zeros_like(p)}

    def state_dict(self) -> dict[str, Any]:
        own = dict.fromkeys(StepSize._fields) if self.state is None else self.state._asdict()
        return own | {"energies": dict(self.energies)}

    def load_state_dict(self, state: Mapping[str, Any], trained: Named) -> None:
        own = {name: state[name] for name in StepSize._fields if state[name] is not None}
        self.state = StepSize(**own) if own else None
        self.energies = dict(state["energies"])


def _norm(context: StepContext, gradients: Stack) -> Tensor:
    """The norm of all gradients together."""
    return context.over_shards(squared_norms(gradients.rows, context.home), gradients.first_layers).sum().sqrt()


def output_change(energy: Tensor, outputs: OutputScale) -> Tensor:
    """Predicted root mean square change of the output entries for step size one and isotropic curvature."""
    return (energy / outputs.entries_per_sample).sqrt()


def first_trust(blocks: Sequence[Block]) -> float:
    layers = sum(b.structure != "diagonal" for b in blocks)
    return FIRST_TRUST / max(layers, 1) ** 0.5
