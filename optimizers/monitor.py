"""What an optimizer tells of itself: counts, seconds, and the course of its run."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from curvature.linalg import recovery_counts

LENGTH = 10_000  # steps that are remembered
LOG = logging.getLogger(__name__)

# what `recovery_counts` counts
EVENTS = {
    "retried": "a decomposition failed and succeeded at another try",
    "kept": "no decomposition of a block succeeded; it keeps the inverse that it had",
    "diagonal": "no decomposition of a block succeeded yet; its diagonal stands in",
}


class Health:
    """Counts of events, seconds by part, and one entry for each of the last steps."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.seconds: dict[str, float] = {}
        self.entries: deque[dict[str, Any]] = deque(maxlen=LENGTH)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count what goes wrong inside and is put right; the first of a kind is logged."""
        with recovery_counts() as counts:
            try:
                yield
            finally:
                self.note(counts)

    def note(self, counts: Mapping[str, int]) -> None:
        """Add counts of `EVENTS`."""
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

    def history(self) -> list[dict[str, Any]]:
        """The entries in plain numbers. They are kept as tensors until asked for: a step does not wait for the GPU."""
        for entry in self.entries:
            entry.update({k: v.item() for k, v in entry.items() if isinstance(v, Tensor)})
        return [dict(entry) for entry in self.entries]

    def state(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "seconds": dict(self.seconds)}

    def restore(self, state: dict[str, Any]) -> None:
        self.counts, self.seconds = Counter(state["counts"]), dict(state["seconds"])
