"""How decompositions have gone: failures that were recovered from, and whether results can be relied on.

A failure is rare, but to ask the device for each result makes the host wait each time. Inside `optimistically` all
questions (`are_true`) are taken as answered with yes, and asked together at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


RECOVERIES: ContextVar[Counter[str] | None] = ContextVar("recoveries", default=None)
QUESTIONS: ContextVar[list[Tensor] | None] = ContextVar("questions", default=None)


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


def optimistically(run: Callable[[], Result], flags: Sequence[Tensor] = ()) -> Result | None:
    """The result of `run`, whose questions are asked together at its end, with these flags; the host waits once.

    None if the answer to one of them is no. What `run` has changed is then for the caller to restore.
    """
    questions = list(flags)
    token = QUESTIONS.set(questions)
    try:
        with recovery_counts() as counts:
            found = run()
    except Refuted:
        return None
    except (RuntimeError, ValueError):  # of LinAlgError the former is the base
        if _all_true(questions):
            raise
        return None  # it comes of what was wrong
    finally:
        QUESTIONS.reset(token)
    if not _all_true(questions):
        return None
    for what, number in counts.items():
        for _ in range(number):
            count_recovery(what)
    return found


def _all_true(flags: Sequence[Tensor]) -> bool:
    """Whether all flags are true, with one transfer to the host."""
    return not flags or bool(torch.cat([x.reshape(-1).to(flags[0].device) for x in flags]).all())


def are_true(flags: Tensor) -> list[bool]:
    """Flags (n,) on the host; inside `optimistically` all true, until they are asked for at its end."""
    questions = QUESTIONS.get()
    if questions is None:
        return flags.tolist()
    questions.append(flags)
    return [True] * len(flags)


def refute() -> None:
    """Say that something has failed, which ends what runs `optimistically`."""
    if QUESTIONS.get() is not None:
        raise Refuted
