"""Progress of a run. In: an entry for each step, and events. Out: counts, seconds by part, history, reports."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from curvature.linalg import RECOVERIES

HISTORY_LENGTH = 10_000  # steps
MOST_FAILURES = 3  # consecutive steps without a decomposition that raise an error
LOG = logging.getLogger(__name__)
Entry = TypeVar("Entry")

# events that `curvature.linalg.recovery_counts` counts, and their log messages
EVENTS = {
    "retried": "a decomposition failed and succeeded at another try",
    "kept": "no decomposition of a block succeeded; it keeps the inverse that it had",
    "diagonal": "no decomposition of a block succeeded yet; its diagonal stands in",
}


class Monitor:
    """Counts steps and events, times the parts of a step, and keeps one entry for each of the last steps."""

    def __init__(self) -> None:
        self.steps = 0  # taken
        self.skipped = 0  # batches
        self.failures_in_row = 0  # steps not taken since a decomposition failed
        self.counts: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}
        self.entries: deque[dict[str, Any]] = deque(maxlen=HISTORY_LENGTH)

    # -- steps

    def skip(self) -> None:
        self.skipped += 1
        self.entries.append({"step": self.steps, "accepted": False})

    def note_step(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Count a step; ``accepted=False`` also counts as a failure. Returns the entry that is kept of it."""
        self.counts["failures"] += not entry.get("accepted", True)
        kept = {"step": self.steps, **{k: v.item() if isinstance(v, Tensor) else v for k, v in entry.items()}}
        self.entries.append(kept)
        self.steps += 1
        return kept

    @property
    def was_accepted(self) -> bool:
        """Whether the last step was taken; true before the first."""
        return not self.entries or self.entries[-1].get("accepted", True)

    # -- events and seconds

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count decompositions that fail and are recovered inside; log the first of each kind."""
        before, token = dict(self.counts), RECOVERIES.set(self.counts)
        try:
            yield
        finally:
            RECOVERIES.reset(token)
            for what in EVENTS:
                if what in self.counts and what not in before:
                    LOG.warning("%s (counted in stats() as %r from now on)", EVENTS[what], what)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds inside to those of a part."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

    def attempt(self, move: Callable[[], Entry]) -> Entry | dict[str, Any]:
        """The entry that `move` returns, or that of a step not accepted if a decomposition fails.

        Raises:
            torch.linalg.LinAlgError: a decomposition failed at the third step in a row.
        """
        try:
            entry = move()
        except torch.linalg.LinAlgError:
            self.failures_in_row += 1
            if self.failures_in_row == MOST_FAILURES:
                raise
            return {"accepted": False, "rollbacks": 0}
        self.failures_in_row = 0
        return entry

    # -- reports

    def history(self) -> list[dict[str, Any]]:
        return [dict(entry) for entry in self.entries]

    def last(self) -> dict[str, Any]:
        """The last entry; empty before the first step."""
        return dict(self.entries[-1]) if self.entries else {}

    def stats(self) -> dict[str, Any]:
        """The last step's numbers, counts of events, seconds by part."""
        counts = {"steps": self.steps, "skipped": self.skipped}
        counts |= {name: self.counts[name] for name in ("rollbacks", "overshoots", "failures", *EVENTS)}
        return counts | self.last() | {"seconds_in": dict(self.seconds)}

    def summary(self) -> str:
        """One line on the last step and the run."""
        last = self.last()
        shown = [f"{k} {last[k]:.3g}" for k in ("loss", "damping", "ratio", "step_size") if last.get(k) is not None]
        counts = {k: last[k] for k in ("overshoots",) if k in last}
        counts |= {"rollbacks": self.counts["rollbacks"], "skipped": self.skipped}
        items = [f"step {self.steps}", *shown, *(f"{number} {what}" for what, number in counts.items())]
        parts = ", ".join(f"{k} {v:.2g}" for k, v in self.seconds.items())
        return ", ".join(items) + (f"; seconds so far: {parts}" if parts else "")

    def state_dict(self) -> dict[str, Any]:
        """Counts and seconds of a run, without the history."""
        counts = {"steps": self.steps, "skipped": self.skipped}
        return counts | {"counts": dict(self.counts), "seconds": dict(self.seconds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps, self.skipped = state["steps"], state["skipped"]
        self.counts, self.seconds = Counter(state["counts"]), dict(state["seconds"])
