"""How decompositions have gone: flags that the host looks at, and failures that were recovered from.

What may fail returns a flag () beside its result. Callers collect flags, and look at all of them once: on an
accelerator each look waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from curvature.linalg.devices import widen

# "retried": decompositions that needed more than one attempt. "kept": blocks that kept their previous inverse because
# every attempt failed. "diagonal": blocks without a previous inverse, which got that of their diagonal.
RECOVERIES: ContextVar[Counter[str] | None] = ContextVar("recoveries", default=None)


@contextmanager
def recovery_counts() -> Iterator[Counter[str]]:
    """Count the failures inside the context that were recovered from.

    "retried": decompositions that needed more than one attempt. "kept": blocks that kept their previous inverse because
    every attempt failed. "diagonal": blocks without a previous inverse, which got that of their diagonal.
    """
    counts: Counter[str] = Counter()
    token = RECOVERIES.set(counts)
    try:
        yield counts
    finally:
        RECOVERIES.reset(token)


def count_recovery(what: str) -> None:
    """Add one to an entry of `recovery_counts`."""
    if (counts := RECOVERIES.get()) is not None:
        counts[what] += 1


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the CPU, in float64, by one transfer."""
    away = [x for x in tensors if x.device.type != "cpu"]
    # whole numbers alone are changed before they meet others; cat promotes the rest
    flat = [(x if x.is_floating_point() or x.dtype == torch.bool else widen(x)).reshape(-1) for x in away]
    whole = torch.cat([x.to(flat[0].device) for x in flat]).cpu() if away else torch.empty(0, device="cpu")
    parts = iter(whole.split([x.numel() for x in away]))
    return [(x if x.device.type == "cpu" else next(parts).view(x.shape)).double() for x in tensors]


def look(flags: Sequence[Tensor]) -> list[bool]:
    """What flags () say, by one transfer to the host."""
    place = next((x.device for x in flags if x.device.type != "cpu"), torch.device("cpu"))
    return torch.stack([x.to(place) for x in flags]).tolist() if flags else []
