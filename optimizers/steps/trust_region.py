"""The step of a plain training loop: slopes set its size, inside a trust region."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvature.linalg import copy_to_host_async, in_place
from curvature.preconditioners import Block
from optimizers.distributed.sharding import to_local
from optimizers.monitor import Verdict
from optimizers.steps.calibration import calibrate, underestimate
from optimizers.steps.descent import Descent, DescentRule
from optimizers.steps.rule import Evaluation, Named, Outcome, StepContext, StepRule
from optimizers.steps.stacks import Stack, StateStack, at_least_single, products, row_norms, total
from optimizers.steps.step_size import (
    FIRST_TRUST,
    Look,
    StepSize,
    is_overshoot,
    longest_gradient,
    slope_ratio,
    started,
    undone,
)
from optimizers.steps.updates import Move, Step, tensor_norms

ORDINARY: dict[str, Any] = {"renewed": False, "inverted": 0, "accepted": True}  # what the history has of a step
UNSAVED = "steps", "was_bad"  # what the monitor says of a state that was loaded


class TrustRegionStep(StepRule):
    """Adapts the step size by the slope along the last displacement; needs no closure.

    The step size grows while the loss still falls along the last displacement, and shrinks when it rises; a
    displacement that went far too far is undone. Bounds on the predicted change of the outputs, and on the change of
    each layer's parameters, cut the step.

    Args:
        descent: computes the directions.

    Attributes:
        begin: number of the first step that it makes.
    """

    def __init__(self, descent: DescentRule) -> None:
        self.descent, self.last, self.begin = descent, StateStack("displacement"), 0
        self.trained: set[str] = set()  # the names of all parameters at the last step
        self.values: Tensor | None = None  # the fields of `state`, always in the same memory
        self.state: StepSize | None = None  # what is known of how far to go, as views; None before the first step
        self.energies: dict[str, Tensor] = {}  # predicted for the last displacement, by the first parameter of a layer
        self.joint_energies = torch.zeros(0, device="cpu")  # of which those are views, if they are of all layers
        self.gain: Tensor | None = None  # `output_gain`, as of the last renewal

    @property
    def tensors(self) -> list[Tensor]:
        """What it keeps from step to step beside the states of parameters."""
        return [*self.descent.tensors, self.joint_energies, *(x for x in (self.values, self.gain) if x is not None)]

    def is_in_place(self, context: StepContext) -> bool:
        """Whether the next step finds all that it keeps where the last one has left it."""
        if self.last.stack is None or context.trained.keys() != self.trained:
            return False
        layout = self.last.stack.layout
        return context.layout({name: context.trained[name] for name in layout.names}) is layout

    def step(self, context: StepContext, evaluation: Evaluation) -> Outcome:
        gradients, loss = context.gradients(), evaluation.value
        if not gradients:
            return Outcome(loss)
        is_idle = context.is_idle()
        if self.state is not None and self.last.stack is None:  # it was loaded, and knows nothing of counts
            self.state.steps.fill_(context.monitor.started - self.begin)
            self.state.was_bad.fill_(not context.monitor.was_accepted)
        if is_idle and self.state is not None:
            step = self.ordinary(context, gradients)
            return Outcome(loss, move=step, entry=ORDINARY, numbers=self.numbers, is_undecided=True)
        good, renewal = context.unscale_and_check_finite(gradients), None
        if not context.knows_nothing():
            renewal = context.renew_if(gradients, good)
        if renewal is None:
            was_bad = not context.monitor.was_accepted and context.scaling.scale is None
            if was_bad and not bool(good):
                self._go_back(context)
            if self.state is not None:
                self.state.was_bad.fill_(1)
            return Outcome(loss, is_skipped=True)
        self._calibrate(context)
        self.gain = in_place(self.gain, output_gain(context, self.state))
        with context.monitor.timed("direction"):
            move = self._found(context, Stack.of(context.layout(gradients), gradients), good)
        entry = {"renewed": renewal.renewed, "inverted": renewal.inverted}
        return Outcome(loss, move=move, entry=ORDINARY | entry, renewal=renewal, numbers=self.numbers)

    def ordinary(self, context: StepContext, gradients: Mapping[str, Tensor]) -> Step:
        """The next move, of a step that neither renews nor inverts; all of it is done by the device.

        If the batch is bad, nothing changes; at the second in a row the last displacement is undone.
        """
        good = context.unscale_and_check_finite(gradients)
        with context.monitor.timed("direction"):
            return self._found(context, Stack.of(context.layout(gradients), gradients), good)

    def numbers(self) -> tuple[dict[str, Any], Verdict]:
        """Of the step that was made last: for the history, and whether its batch was good."""
        assert self.values is not None
        now = StepSize(*self.values.clone().unbind())
        return {"step_size": now.size, "overshoots": now.overshoots}, copy_to_host_async(now.was_bad == 0)

    def last_displacement(self, states: Mapping[str, dict[str, Any]]) -> Named:
        found = {name: state.get("displacement") for name, state in states.items()} if self.energies else {}
        return {name: d for name, d in found.items() if d is not None}

    def _calibrate(self, context: StepContext) -> None:
        """Compare what a renewal measured along the last displacement with what was predicted."""
        along = context.outputs.along
        if self.state is not None and along:
            joint = torch.stack([self.state.measured, self.state.predicted])
            measured, predicted = calibrate(context.preconditioner.blocks, along, self.energies, joint).unbind()
            self.state.measured.copy_(measured)
            self.state.predicted.copy_(predicted)

    def _go_back(self, context: StepContext) -> None:
        """Undo the last displacement: no batch since has been finite."""
        last = self._last(context, context.trained)
        if last and self.state is not None:
            for name, displacement in last.items():
                to_local(context.trained[name]).sub_(displacement)
                displacement.zero_()
            self._keep(undone(self.state, self.state.made, torch.full_like(self.state.size, -torch.inf)))

    def _keep(self, state: StepSize) -> None:
        before, self.values = self.values, in_place(self.values, torch.stack(state))
        if self.values is not before and self.values is not None:
            self.state = StepSize(*self.values.unbind())

    def _found(self, context: StepContext, gradients: Stack, good: Tensor) -> Step:
        """The next step."""
        least, outputs, before = first_trust(context.preconditioner.blocks), context.outputs, self.state
        last, self.trained = self._last_displacements(context, gradients), set(context.trained)
        ratio, norm = self._slope_ratio(context, gradients, last), _norm(context, gradients)
        counted = longest_gradient(norm, norm if before is None else before.norm)
        is_far = is_overshoot(ratio, norm, norm if before is None else before.norm)
        # one batch far out of scale must not dominate the running mean
        factor = (counted / norm).nan_to_num(1.0)
        for g in gradients.vectors:
            g.mul_(factor.to(g.device))
        found = self.descent(context, gradients, good, good > is_far)  # good, and not too far
        energies, rms = found.energies, outputs.rms
        assert rms is not None
        if self.gain is None:
            self.gain = output_gain(context, before)
        change = (total(energies) * self.gain).sqrt()
        if before is None:
            self._keep(started(change, norm, least, context.monitor.started - self.begin))
        assert self.values is not None
        rates = context.numbers.of_all("lr", [layer[0] for layer in found.directions.layout.layers])
        rates = rates.to(found.slopes.dtype)
        look = Look(
            values=self.values, is_first=before is None, ratio=ratio, norm=norm, counted=counted, is_far=is_far,
            good=good, undoes=context.scaling.scale is None,  # a scaler has bad batches until it has found its scale
            change=change, output_rms=rms, slope=total(found.slopes * rates),
            lr=context.numbers.lr, least_trust=least,
        )  # fmt: skip
        predicted = self._predicted(found)
        return Step(look, self._move(context, found, last, rates), predicted, self.joint_energies)

    def _predicted(self, found: Descent) -> Tensor | None:
        """The energies of the directions; None, if they are not known layer by layer."""
        names = [layer[0] for layer in found.directions.layout.layers]
        if found.energies.numel() != len(names):
            self.energies = {}
            return None
        if list(self.energies) != names or self.joint_energies.numel() != len(names):
            zero = torch.zeros_like(found.energies[0])
            self.joint_energies = torch.stack([self.energies.get(name, zero) for name in names])
            self.energies = dict(zip(names, self.joint_energies.unbind(), strict=True))
        return found.energies

    def _last(self, context: StepContext, names: Iterable[str]) -> dict[str, Tensor]:
        """The last displacements, by name."""
        kept = {name: context.states[name].get("displacement") for name in names if name in context.trained}
        return {name: to_local(d) for name, d in kept.items() if d is not None}

    def _last_displacements(self, context: StepContext, gradients: Stack) -> Stack:
        """The last displacements, zeros where there were none; parameters that do not move now have none any more."""
        for name in context.trained.keys() - gradients.keys():
            context.states[name].pop("displacement", None)
        return self.last.of(gradients.layout, context.states, context.trained)

    def _slope_ratio(self, context: StepContext, gradients: Stack, last: Stack) -> Tensor:
        """Ratio of the slope along the last displacement now to that at its start; 0 without a displacement."""
        now = _inner(context, last, gradients)
        return torch.zeros_like(now) if self.state is None else slope_ratio(now, self.state.slope)

    def _move(self, context: StepContext, found: Descent, last: Stack, rates: Tensor) -> Move:
        """The `Move`, whose directions become the displacements, in the memory of the last ones."""
        options, numbers, directions = context.options, context.numbers, found.directions
        own = {name: to_local(context.trained[name]) for name in directions}
        decayed: dict[int, list[str]] = {}
        for name in own:
            if options[name]["weight_decay"]:
                decayed.setdefault(numbers.places[name], []).append(name)
        norms = None
        if context.is_spread:
            over = lambda found, layers: context.over_shards(found.square(), layers).sqrt()
            lengths = over(row_norms(directions.rows, context.home), directions.layout.layers)
            norms = lengths, over(tensor_norms(list(own.values()), context.home), [(name,) for name in own])
        return Move(
            parameters=list(own.values()),
            directions=directions.vectors,
            last=last.vectors,
            forms=directions.layout.forms,
            scales=found.scales,
            norms=norms,
            slopes=found.slopes,
            rates=rates,
            decayed=[(numbers.of("kept", names[0]), [own[name] for name in names]) for names in decayed.values()],
            tables=[
                (k, len(context.trained[name]))
                for k, name in enumerate(directions)
                if (block := context.block_of(name)) is not None and block.has_separate_rows
            ],
            blocks=self._blocks(context, directions),
        )

    @staticmethod
    def _blocks(context: StepContext, directions: Stack) -> Tensor | None:
        """`Move.blocks`."""
        owners = [context.block_of(layer[0]) or layer for layer in directions.layout.layers]
        numbers = {id(owner): k for k, owner in enumerate(dict.fromkeys(owners))}
        if len(numbers) == len(owners):
            return None
        return context.numbers.index(tuple(numbers[id(owner)] for owner in owners))

    # -- checkpoints

    def empty_state(self, p: Tensor, options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return self.descent.empty_state(p, options) | {"displacement": torch.zeros_like(p)}

    def state_dict(self) -> dict[str, Any]:
        own = dict.fromkeys(StepSize._fields) if self.values is None else StepSize(*self.values.clone())._asdict()
        own = {name: value for name, value in own.items() if name not in UNSAVED}
        return own | {"energies": {name: energy.clone() for name, energy in self.energies.items()}}

    def load_state_dict(self, state: Mapping[str, Any], trained: Named) -> None:
        dtype = at_least_single(trained.values())
        own = {name: state[name].to(dtype) for name in StepSize._fields if state.get(name) is not None}
        self.values = self.state = self.gain = None
        if own:
            self._keep(StepSize(**own | dict.fromkeys(UNSAVED, torch.zeros_like(own["size"]))))
        self.energies, self.joint_energies = dict(state["energies"]), torch.zeros(0, device="cpu")
        self.last = StateStack("displacement")


def _norm(context: StepContext, gradients: Stack) -> Tensor:
    """The norm of all gradients together."""
    return _inner(context, gradients, gradients).sqrt()


def _inner(context: StepContext, ones: Stack, others: Stack) -> Tensor:
    """The inner product of all tensors together."""
    found = products(ones.vectors, others.vectors, context.home)
    return total(context.over_shards(found, ones.layout.first_layers))


def output_gain(context: StepContext, known: StepSize | None) -> Tensor:
    """Mean square change of the output entries that is predicted for a step of energy one, for isotropic curvature."""
    entries = context.outputs.entries_per_sample
    factor = 1.0 if known is None else underestimate(known.measured, known.predicted).square()
    return context.numbers.values.new_ones(()) * factor / entries


def first_trust(blocks: Sequence[Block]) -> float:
    layers = sum(b.structure != "diagonal" for b in blocks)
    return FIRST_TRUST / max(layers, 1) ** 0.5
