"""How a run goes: steps, skipped batches, counts of events, seconds by part, history."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from curvature.linalg import recovery_counts

HISTORY_LENGTH = 10_000  # steps
LOG = logging.getLogger(__name__)

# what `curvature.linalg.recovery_counts` counts
EVENTS = {
    "retried": "a decomposition failed and succeeded at another try",
    "kept": "no decomposition of a block succeeded; it keeps the inverse that it had",
    "diagonal": "no decomposition of a block succeeded yet; its diagonal stands in",
}


@dataclass(frozen=True)
class Undecided:
    """A step on a batch that the device has judged while the host did not wait for the verdict.

    Attributes:
        was_taken: whether the batch was good; waits for the device.
        undo: restores what the host keeps beside the tensors. The device leaves those alone if the batch was bad.
    """

    was_taken: Callable[[], bool]
    undo: Callable[[], None]


class Monitor:
    """Counts steps and events, times the parts of a step, and keeps one entry for each of the last steps.

    Attributes:
        started: steps, counting the last one even while it is undecided.
        entries: what each step reported: numbers and scalar tensors by name.
    """

    def __init__(self) -> None:
        self.started = 0
        self.left_out = 0
        self.undecided: Undecided | None = None
        self.failures_in_row = 0  # steps not taken since a decomposition failed
        self.counts: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}
        self.entries: deque[dict[str, Any]] = deque(maxlen=HISTORY_LENGTH)

    # -- steps

    @property
    def steps(self) -> int:
        """Steps taken so far; waits for the device if the last one is undecided."""
        return self.started - self._was_bad()

    @property
    def skipped(self) -> int:
        """Batches left out so far; waits likewise."""
        return self.left_out + self._was_bad()

    def _was_bad(self) -> bool:
        return self.undecided is not None and not self.undecided.was_taken()

    def settle(self) -> None:
        """Decide the last step: if its batch was bad, undo it and count the batch as skipped."""
        if self._was_bad() and self.undecided is not None:
            self.undecided.undo()
            self.started -= 1
            self.left_out += 1
            self.entries[-1] = {"step": self.started, "accepted": False}
        self.undecided = None

    def skip(self) -> None:
        """Note a batch that was left out."""
        self.left_out += 1
        self.entries.append({"step": self.started, "accepted": False})

    def note_step(self, entry: Mapping[str, Any], undecided: Undecided | None = None) -> None:
        """Count a step and keep its entry; one with ``accepted=False`` counts as a failure, too."""
        self.counts["failures"] += not entry.get("accepted", True)
        self.entries.append({"step": self.started, **entry})
        self.started += 1
        self.undecided = undecided

    # -- events and seconds

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count the failures of decompositions that were put right inside; log the first of each kind."""
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
        """The entries in plain numbers; until asked for they stay tensors, so that a step does not wait for the GPU."""
        found = [_in_numbers(entry) for entry in self.entries]
        if self._was_bad():
            found[-1] = {"step": self.steps, "accepted": False}
        return found

    def last(self) -> dict[str, Any]:
        """The last entry in plain numbers; empty before the first step."""
        if self._was_bad():
            return {"step": self.steps, "accepted": False}
        return _in_numbers(self.entries[-1]) if self.entries else {}

    def stats(self) -> dict[str, Any]:
        """The last step's numbers, counts of events, seconds by part."""
        counts = {name: self.counts[name] for name in ("rollbacks", "failures", *EVENTS)}
        own = {"steps": self.steps, "skipped": self.skipped, **counts}
        return own | self.last() | {"seconds_in": dict(self.seconds)}

    def summary(self) -> str:
        """One line on the last step and the run."""
        last = self.last()
        shown = [f"{k} {last[k]:.3g}" for k in ("loss", "damping", "ratio", "step_size") if last.get(k) is not None]
        own = [f"step {self.steps}", *shown, f"{self.counts['rollbacks']} rollbacks", f"{self.skipped} skipped"]
        parts = " ".join(f"{k} {v:.1f} s" for k, v in self.seconds.items())
        return ", ".join([*own, parts] if parts else own)

    def state_dict(self) -> dict[str, Any]:
        """Of a run whose last step is settled; without the history."""
        counts = {"steps": self.started, "skipped": self.left_out}
        return counts | {"counts": dict(self.counts), "seconds": dict(self.seconds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.started, self.left_out, self.undecided = state["steps"], state["skipped"], None
        self.counts, self.seconds = Counter(state["counts"]), dict(state["seconds"])


def _in_numbers(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.item() if isinstance(v, Tensor) else v for k, v in entry.items()}
