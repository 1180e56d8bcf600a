"""Ordinary steps in a CUDA graph: what the host does for a step that a graph replays, and until when a graph is right.

A graph replays kernels on the memory that they were captured with. An ordinary step changes all its state in place and
reads rates, weights and counts on the device; a step that renews or inverts, which runs as it is written, leaves its
results in the same memory. `Capture.is_needed` compares addresses: not all things can stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvature.preconditioners import InversePlaces
from optimizers.steps.rule import StepContext, StepRule, is_ordinary
from optimizers.steps.trust_region import ORDINARY, TrustRegionStep
from optimizers.steps.updates import Step


def is_capturing() -> bool:
    """Whether kernels are now captured in a CUDA graph, and do not run."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class Captured(NamedTuple):
    """What must be as it was for a graph to be right.

    Attributes:
        addresses: of tensors.
        groups: which of them have the same options.
        places: the group of each parameter.
    """

    addresses: list[int]
    groups: list[Any]
    places: dict[str, int]


class Capture:
    """The graph of an optimizer's ordinary steps; ``docs/guides/devices.md`` has the loop.

    Attributes:
        captured: with what a graph was captured; None if there is none.
    """

    def __init__(self) -> None:
        self.captured: Captured | None = None
        self._begun: tuple[TrustRegionStep, StepContext, list[int]] | None = None  # with addresses, while it captures

    def can_replay(self, rule: StepRule, context: StepContext) -> bool:
        """Whether a graph may make the next step."""
        own = _capturable(rule, context)
        if own is None or not own.is_in_place(context) or context.team.processes.size > 1:
            return False
        return is_ordinary(context.recorder, context.preconditioner)

    def is_needed(self, rule: StepRule, context: StepContext) -> bool:
        """Whether a step has to be captured, for the first time or again."""
        context.tell_numbers()
        own = _capturable(rule, context)
        return self.captured is None or own is None or self.captured != _as_captured(own, context)

    def before_replay(self, rule: StepRule, context: StepContext) -> None:
        """Count a step that a graph makes.

        Raises:
            RuntimeError: it cannot.
        """
        own = _capturable(rule, context)
        if own is None or not self.can_replay(rule, context) or self.is_needed(rule, context):
            raise RuntimeError(
                f"{context.owner}.before_replay: the next step cannot come from a graph that was captured before; "
                "ask can_replay() and needs_capture() first"
            )
        context.monitor.note_step(ORDINARY, own.numbers, is_undecided=True)

    def begin(self, rule: StepRule, context: StepContext) -> Step:
        """An ordinary step whose kernels are captured: the device's part of it."""
        own = _capturable(rule, context)
        if context.closure is not None or own is None or not self.can_replay(rule, context):
            raise RuntimeError(
                f"{context.owner}.step: captured in a CUDA graph, but the next step cannot come from one (a step that "
                "renews or inverts, the first after load_state_dict, closures, several processes or devices); ask "
                "can_replay() before"
            )
        self._begun = own, context, _addresses(own, context)
        return own.ordinary(context, context.gradients())

    def end(self) -> None:
        """Note what the step was captured with."""
        assert self._begun is not None
        (rule, context, before), self._begun = self._begun, None
        if _addresses(rule, context) != before:
            raise RuntimeError(
                f"{context.owner}.step: captured in a CUDA graph with other gradients than at the last step, which "
                "moves state to new memory; make a step with the same parameters' gradients before"
            )
        self.captured = _as_captured(rule, context)
        context.preconditioner.places = InversePlaces(context.preconditioner.blocks)

    def forget(self) -> None:
        """No graph is right from now on."""
        self.captured = self._begun = None


def _capturable(rule: StepRule, context: StepContext) -> TrustRegionStep | None:
    """The rule, if a graph can hold its steps."""
    plain = rule.plain
    is_able = isinstance(plain, TrustRegionStep) and plain.descent.is_capturable and not context.is_spread
    is_on_one = len({p.device for p in context.trained.values()}) == 1  # as a graph is
    return plain if is_able and is_on_one else None  # type: ignore[return-value]


def _as_captured(rule: TrustRegionStep, context: StepContext) -> Captured:
    groups = list({id(own): own for own in context.options.values()}.values())
    keys = [(own["lr"], own["momentum"], own["damping"]) for own in groups]
    firsts = map(keys.index, keys)
    own = [(k, one["damping"] is None, not one["weight_decay"]) for k, one in zip(firsts, groups, strict=True)]
    return Captured(_addresses(rule, context), own, context.numbers.places)


def _addresses(rule: TrustRegionStep, context: StepContext) -> list[int]:
    return [x.data_ptr() for x in _kept(rule, context)]


def _kept(rule: TrustRegionStep, context: StepContext) -> Iterator[Tensor]:
    """All tensors that stay from step to step."""
    yield from rule.tensors
    yield context.numbers.values
    outputs = context.outputs
    yield from (x for x in (outputs.rms, outputs.entries_per_sample) if isinstance(x, Tensor))
    yield from context.preconditioner.kept()
    for name, p in context.trained.items():
        yield p
        yield from (x for x in context.states[name].values() if isinstance(x, Tensor))
