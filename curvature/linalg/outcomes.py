"""How decompositions have gone: failures that were recovered from, and whether results can be relied on.

A failure is rare, but to ask the device for each result makes the host wait each time. Inside `optimistically` all
questions (`are_true`) are taken as answered with yes, and asked together: with the next numbers that the host reads
(`on_host`), or at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from curvature.linalg.devices import widen

Result = TypeVar("Result")


RECOVERIES: ContextVar[Counter[str] | None] = ContextVar("recoveries", default=None)


@dataclass
class Pending:
    """What the host reads next: flags that have to be true, and numbers () with what to tell them to."""

    flags: list[Tensor]
    numbers: list[tuple[Tensor, list[float]]] = field(default_factory=list)


PENDING: ContextVar[Pending | None] = ContextVar("pending", default=None)


class Refuted(Exception):
    """What `optimistically` has taken for granted is known to be wrong."""


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
    counts = RECOVERIES.get()
    if counts is not None:
        counts[what] += 1


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the CPU, in float64, by one transfer."""
    away = [x for x in tensors if x.device.type != "cpu"]
    flat = [x.reshape(-1) if x.dtype == torch.bool else widen(x).reshape(-1) for x in away]
    whole = torch.cat([x.to(flat[0].device) for x in flat]).cpu() if away else torch.empty(0, device="cpu")
    parts = iter(whole.split([x.numel() for x in away]))
    return [(x if x.device.type == "cpu" else next(parts).view(x.shape)).double() for x in tensors]


def look(flags: Sequence[Tensor]) -> list[bool]:
    """What flags () say; the host waits once."""
    return [bool(flag) for flag in to_host(flags)]


def optimistically(run: Callable[[], Result], flags: Sequence[Tensor] = ()) -> Result | None:
    """The result of `run`, whose questions are asked together at its end, with these flags; the host waits once.

    None if the answer to one of them is no. What `run` has changed is then for the caller to restore.
    """
    pending = Pending(list(flags))
    token = PENDING.set(pending)
    try:
        with recovery_counts() as counts:
            found = run()
    except Refuted:
        return None
    except (RuntimeError, ValueError):  # of LinAlgError the former is the base
        if _all_true(pending.flags):
            raise
        return None  # it comes of what was wrong
    finally:
        PENDING.reset(token)
    if not _all_true(pending.flags):
        return None
    for what, number in counts.items():
        for _ in range(number):
            count_recovery(what)
    return found


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the CPU, in float64, by one transfer; with it comes all that was asked `optimistically`."""
    pending = PENDING.get() or Pending([])
    both = [*tensors, *(number for number, _ in pending.numbers), *_verdicts(pending.flags)]
    away = [x for x in both if x.device.type != "cpu"]
    flat = [x.reshape(-1) if x.dtype == torch.bool else widen(x).reshape(-1) for x in away]
    whole = torch.cat([x.to(flat[0].device) for x in flat]).cpu() if away else torch.empty(0, device="cpu")
    parts = iter(whole.split([x.numel() for x in away]))
    found = [(x if x.device.type == "cpu" else next(parts).view(x.shape)).double() for x in both]
    end = len(tensors) + len(pending.numbers)
    if not all(found[end:]):
        raise Refuted
    for (_, told), number in zip(pending.numbers, found[len(tensors) : end], strict=True):
        told.append(float(number))
    pending.flags.clear()
    pending.numbers.clear()
    return found[: len(tensors)]


def soon(number: Tensor) -> Callable[[], float]:
    """A number (), which comes to the host with what it reads next `optimistically`, or alone when called for."""
    told: list[float] = []
    pending = PENDING.get()
    if pending is not None:
        pending.numbers.append((number, told))

    def read() -> float:
        if not told:
            told.append(float(number))
        return told[0]

    return read


def _verdicts(flags: Sequence[Tensor]) -> list[Tensor]:
    """Whether all flags are true, a flag () for those of accelerators, and one for those of the CPU."""
    sides = [x for x in flags if x.device.type != "cpu"], [x for x in flags if x.device.type == "cpu"]
    return [torch.cat([x.reshape(-1).to(own[0].device) for x in own]).all() for own in sides if own]


def _all_true(flags: Sequence[Tensor]) -> bool:
    """Whether all flags are true, with one transfer to the host."""
    return all(map(bool, _verdicts(flags)))


def are_true(flags: Tensor) -> list[bool]:
    """Flags (n,) on the host; inside `optimistically` all true, until they are asked for."""
    pending = PENDING.get()
    if pending is None:
        return flags.tolist()
    pending.flags.append(flags)
    return [True] * len(flags)


def refute() -> None:
    """Say that something has failed, which ends what runs `optimistically`."""
    if PENDING.get() is not None:
        raise Refuted
