"""Ordinary steps in a CUDA graph: what the host does for a step that a graph replays, and until when a graph is right.

A graph replays kernels on the memory that they were captured with. An ordinary step changes all its state in place and
reads rates, weights and counts on the device; a step that renews or inverts, which runs as it is written, leaves its
results in the same memory. `CapturableOptimizer.needs_capture` compares addresses: not all things can stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvature.preconditioners import InversePlaces
from curvature.recording import is_sharded
from optimizers.model_optimizer import ModelOptimizer
from optimizers.monitor import Verdict
from optimizers.preconditioner import Preconditioner, Renewal
from optimizers.recording.recorder import Recorder
from optimizers.steps.numbers import Numbers
from optimizers.steps.rule import StepContext, StepRule, is_ordinary
from optimizers.steps.trust_region import ORDINARY, TrustRegionStep
from optimizers.steps.updates import Step


def is_capturing() -> bool:
    """Whether kernels are now captured in a CUDA graph, and do not run."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


Numbering = Callable[[], tuple[dict[str, Any], Verdict]]  # of a step that was made


class Captured(NamedTuple):
    """What must be as it was for a graph to be right: addresses of tensors, and which groups have the same options."""

    addresses: list[int]
    groups: list[Any]


class Late:
    """Numbers of a step that are known once the device has made it; to be collected before the next one is made.

    Attributes:
        entry: of the step, in the history.
    """

    def __init__(self, numbers: Numbering) -> None:
        self.numbers = numbers
        self.entry: dict[str, Any] = {}
        self.verdict: Verdict | None = None

    def collect(self) -> Verdict:
        if self.verdict is None:
            found, self.verdict = self.numbers()
            self.entry |= found
        return self.verdict

    def was_taken(self) -> bool:
        return self.collect()()


class CapturableOptimizer(ModelOptimizer):
    """An optimizer whose ordinary steps can come from a CUDA graph; ``docs/guides/devices.md`` has the loop."""

    rule: StepRule
    residual_rule: Any
    recorder: Recorder
    preconditioner: Preconditioner
    numbers: Numbers
    captured: Captured | None
    late: Late | None  # of the last step
    before: list[int]  # addresses, while a graph is captured

    def _context(self, closure: Callable[[], Any] | None) -> StepContext:
        raise NotImplementedError

    def records_next_pass(self) -> bool:
        """Whether the next step renews the curvature from its passes, which then cannot come from a CUDA graph."""
        return self.recorder.is_due()

    def can_replay(self) -> bool:
        """Whether the next step, with its passes, may come from a CUDA graph: it neither renews nor inverts.

        Never with several processes, with closures, nor for `NaturalGradient`; nor at the first step after
        `load_state_dict`. Waits for the device only where the verdict on the last batches may change the answer.
        """
        self._collect()
        rule = self._capturable_rule()
        if rule is None or not rule.is_in_place or self.preconditioner.teams.current().processes.size > 1:
            return False
        return is_ordinary(self.recorder, self.preconditioner)

    def needs_capture(self) -> bool:
        """Whether ``opt.step()`` has to be captured (again): what a graph reads or changes has moved.

        So at first, after `load_state_dict`, where a large inverse has got another rank, where parameters have other
        gradients than before, and where groups that had the same options have so no more, or the other way round.
        """
        self.numbers.tell(self.options(), self._home)
        return self.captured is None or self.captured != self._as_captured()

    def before_replay(self) -> None:
        """The host's part of a step, before a graph replays the rest: counts it, and sends new rates to the device.

        Raises:
            RuntimeError: the next step cannot be replayed, or the graph is no longer right.
        """
        if not self.can_replay() or self.needs_capture():
            name = type(self).__name__
            raise RuntimeError(
                f"{name}.before_replay: the next step cannot come from a graph that was captured before; "
                "ask can_replay() and needs_capture() first"
            )
        rule = self._capturable_rule()
        assert rule is not None
        self._note(ORDINARY, rule.numbers, is_undecided=True)
        self.preconditioner.note_seconds(Renewal())

    def _begin_capture(self, closure: Callable[[], Any] | None) -> Step:
        """`step` while a graph is captured: the device's part of an ordinary step."""
        name, rule = type(self).__name__, self._capturable_rule()
        if closure is not None or rule is None or not self.can_replay():
            raise RuntimeError(
                f"{name}.step: captured in a CUDA graph, but the next step cannot come from one (a step that renews or "
                "inverts, the first after load_state_dict, closures, several processes); ask can_replay() before"
            )
        self.before, context = self._addresses(), self._context(None)
        return rule.ordinary(context, context.gradients())

    def _end_capture(self) -> None:
        name = type(self).__name__
        if self._addresses() != self.before:
            raise RuntimeError(
                f"{name}.step: captured in a CUDA graph with other gradients than at the last step, which moves state "
                "to new memory; make a step with the same parameters' gradients before"
            )
        self.captured = self._as_captured()
        self.preconditioner.places = InversePlaces(self.preconditioner.blocks)

    # -- whether a graph is right

    def _capturable_rule(self) -> TrustRegionStep | None:
        """The rule, if a graph can hold its steps."""
        rule = self.rule.plain if self.residual_rule is None else None
        is_able = isinstance(rule, TrustRegionStep) and rule.descent.is_capturable
        return rule if is_able and not any(map(is_sharded, self.trained().values())) else None  # type: ignore[return-value]

    @property
    def _home(self) -> torch.device:
        return next(self.model.parameters()).device

    def _as_captured(self) -> Captured:
        keys = [(float(own["lr"]), own["momentum"], own["damping"]) for own in self.param_groups]
        firsts = map(keys.index, keys)
        of = zip(firsts, self.param_groups, strict=True)
        groups = [(first, own["damping"] is None, not own["weight_decay"]) for first, own in of]
        return Captured(self._addresses(), groups)

    def _addresses(self) -> list[int]:
        return [x.data_ptr() for x in self._kept()]

    def _kept(self) -> Iterator[Tensor]:
        """All tensors that stay from step to step."""
        rule, outputs = self._capturable_rule(), self.recorder.outputs
        yield from () if rule is None else rule.tensors
        yield self.numbers.values
        yield from (x for x in (outputs.rms, outputs.entries_per_sample) if isinstance(x, Tensor))
        yield from self.preconditioner.kept()
        for p in self.trained().values():
            yield p
            yield from (x for x in self.state[p].values() if isinstance(x, Tensor))

    def _begin(self, closure: Callable[[], Any] | None) -> StepContext:
        """What a step that is not captured may use."""
        self._collect()
        context = self._context(closure)
        self.numbers.tell(context.options, self._home)
        return context

    def _note(self, entry: Mapping[str, Any], numbers: Numbering | None, is_undecided: bool) -> dict[str, Any]:
        """Count a step, and return the entry that is kept of it."""
        late = None if numbers is None else Late(numbers)
        kept = self.monitor.note_step(entry, late.was_taken if late and is_undecided else None)
        if late is not None:
            late.entry, self.late = kept, late
        return kept

    def _collect(self) -> None:
        if self.late is not None:
            self.late.collect()
            self.late = None

    def _forget_graph(self) -> None:
        self.captured = self.late = self.preconditioner.places = None
