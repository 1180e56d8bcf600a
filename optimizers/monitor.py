"""Progress of a run. In: an entry for each step, and events. Out: counts, seconds by part, history, reports."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from curvature.linalg import recovery_counts

HISTORY_LENGTH = 10_000  # steps
COUNTS = ("overshoots",)  # of the run, in the entries of steps as scalar tensors
LOG = logging.getLogger(__name__)

# events that `curvature.linalg.recovery_counts` counts, and their log messages
EVENTS = {
    "retried": "a decomposition failed and succeeded at another try",
    "kept": "no decomposition of a block succeeded; it keeps the inverse that it had",
    "diagonal": "no decomposition of a block succeeded yet; its diagonal stands in",
}


Verdict = Callable[[], bool]  # whether the device has taken a step, its batch being good; waits for the device
Numbering = Callable[[], tuple[dict[str, Any], Verdict]]  # of a step that was made


class Late:
    """Numbers of a step that are known once the device has made it; to be collected before the next one is made.

    Attributes:
        entry: of the step, in the history.
    """

    def __init__(self, numbers: Numbering, entry: dict[str, Any]) -> None:
        self.numbers, self.entry = numbers, entry
        self.verdict: Verdict | None = None

    def collect(self) -> Verdict:
        if self.verdict is None:
            found, self.verdict = self.numbers()
            self.entry |= found
        return self.verdict

    def was_taken(self) -> bool:
        return self.collect()()


class Monitor:
    """Counts steps and events, times the parts of a step, and keeps one entry for each of the last steps.

    Attributes:
        started: number of steps, with those that are undecided.
        left_out: number of skipped batches, without steps that are undecided.
        undecided: the last steps, which the device has taken only if their batches were good, while the host did not
            wait for its verdict: their entries and verdicts.
        entries: the report of each step: numbers and scalar tensors by name.
        late: numbers of the last step that are still to be collected.
    """

    def __init__(self) -> None:
        self.started = 0
        self.left_out = 0
        self.undecided: list[tuple[dict[str, Any], Verdict]] = []
        self.failures_in_row = 0  # steps not taken since a decomposition failed
        self.counts: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}
        self.entries: deque[dict[str, Any]] = deque(maxlen=HISTORY_LENGTH)
        self.late: Late | None = None

    # -- steps

    @property
    def steps(self) -> int:
        """Steps taken so far; waits for the device if some are undecided."""
        return self.started - self._bad()

    @property
    def skipped(self) -> int:
        """Batches skipped so far; waits for the device likewise."""
        return self.left_out + self._bad()

    def _bad(self) -> int:
        return sum(not was_taken() for _, was_taken in self.undecided)

    def _decided(self) -> list[dict[str, Any]]:
        """The entries of undecided steps, as the verdicts say."""
        bad, found = 0, []
        for entry, was_taken in self.undecided:
            taken, number = was_taken(), {"step": entry["step"] - bad}
            found.append(entry | number if taken else number | {"accepted": False})
            bad += not taken
        return found

    def settle(self) -> None:
        """Wait for the verdicts; count steps whose batches were bad as skipped batches."""
        found, bad = self._decided(), self._bad()
        for (entry, _), decided in zip(self.undecided, found, strict=True):
            entry.clear()
            entry.update(decided)
        self.started -= bad
        self.left_out += bad
        self.undecided.clear()

    def skip(self) -> None:
        """Count a skipped batch."""
        self.left_out += 1
        self.entries.append({"step": self.started, "accepted": False})

    def note_step(
        self, entry: Mapping[str, Any], numbers: Numbering | None = None, is_undecided: bool = False
    ) -> dict[str, Any]:
        """Count a step; ``accepted=False`` also counts as a failure.

        Args:
            numbers: what the device will say of the step.
            is_undecided: whether its verdict decides that the step counts.

        Returns:
            The entry that is kept of it.
        """
        self.counts["failures"] += not entry.get("accepted", True)
        kept = {"step": self.started, **entry}
        self.entries.append(kept)
        self.started += 1
        if numbers is not None:
            self.late = Late(numbers, kept)
            if is_undecided:
                self.undecided.append((kept, self.late.was_taken))
        return kept

    def collect(self) -> None:
        """Take the numbers of the last step, before the next one changes them."""
        if self.late is not None:
            self.late.collect()
            self.late = None

    @property
    def was_accepted(self) -> bool:
        """Whether the last step, if all are settled, was taken; true before the first."""
        return not self.entries or self.entries[-1].get("accepted", True)

    # -- events and seconds

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count decompositions that failed and were recovered inside; log the first of each kind."""
        with recovery_counts() as counts:
            try:
                yield
            finally:
                for what, number in counts.items():
                    if not self.counts[what]:
                        LOG.warning("%s (counted in stats() as %r from now on)", EVENTS[what], what)
                    self.counts[what] += number

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

    # -- reports

    def history(self) -> list[dict[str, Any]]:
        """The entries as plain numbers; steps store tensors, so that they need not wait for the GPU."""
        decided = self._decided()
        return [_in_numbers(entry) for entry in [*list(self.entries)[: len(self.entries) - len(decided)], *decided]]

    def last(self) -> dict[str, Any]:
        """The last entry as plain numbers; empty before the first step."""
        found = self._decided()[-1:] or list(self.entries)[-1:]
        return _in_numbers(found[0]) if found else {}

    def stats(self) -> dict[str, Any]:
        """The last step's numbers, counts of events, seconds by part."""
        counts = {name: self.counts[name] for name in ("rollbacks", "failures", *EVENTS)}
        own = {"steps": self.steps, "skipped": self.skipped, **counts}
        return own | self.last() | {"seconds_in": dict(self.seconds)}

    def summary(self) -> str:
        """One line on the last step and the run."""
        last = self.last()
        shown = [f"{k} {last[k]:.3g}" for k in ("loss", "damping", "ratio", "step_size") if last.get(k) is not None]
        counts = {k: last[k] for k in COUNTS if k in last}
        counts |= {"rollbacks": self.counts["rollbacks"], "skipped": self.skipped}
        own = [f"step {self.steps}", *shown, *(f"{number} {what}" for what, number in counts.items())]
        parts = ", ".join(f"{k} {v:.2g}" for k, v in self.seconds.items())
        return ", ".join(own) + (f"; seconds so far: {parts}" if parts else "")

    def state_dict(self) -> dict[str, Any]:
        """Counts and seconds of a run whose steps are settled; without the history."""
        counts = {"steps": self.started, "skipped": self.left_out}
        return counts | {"counts": dict(self.counts), "seconds": dict(self.seconds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.started, self.left_out, self.undecided = state["steps"], state["skipped"], []
        self.counts, self.seconds, self.late = Counter(state["counts"]), dict(state["seconds"]), None


def _in_numbers(entry: Mapping[str, Any]) -> dict[str, Any]:
    found = {k: v.item() if isinstance(v, Tensor) else v for k, v in entry.items()}
    return found | {k: int(found[k]) for k in COUNTS if k in found}
