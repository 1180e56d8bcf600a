"""How decompositions have gone: failures that were recovered from, and whether results can be relied on.

A failure is rare, but to ask the device for each result makes the host wait each time. Inside `optimistically` all
questions (`are_true`) are taken as answered with yes, and asked together at the end.
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

Result = TypeVar("Result")


@dataclass
class Questions:
    """What has yet to be asked.

    Attributes:
        flags: that have to be true.
        numbers: with the functions that take them.
    """

    flags: list[Tensor] = field(default_factory=list)
    numbers: list[tuple[Tensor, Callable[[list[int]], None]]] = field(default_factory=list)

    def ask(self) -> bool:
        """Whether all flags are true, with one transfer to the host; if so, the numbers go to their functions."""
        asked = [*self.flags, *(numbers for numbers, _ in self.numbers)]
        if not asked:
            return True
        found = torch.cat([x.reshape(-1).to(asked[0].device, torch.float32) for x in asked]).tolist()
        count = sum(flag.numel() for flag in self.flags)
        if not all(found[:count]):
            return False
        for numbers, take in self.numbers:
            take([int(x) for x in found[count : count + numbers.numel()]])
            count += numbers.numel()
        return True


RECOVERIES: ContextVar[Counter[str] | None] = ContextVar("recoveries", default=None)
QUESTIONS: ContextVar[Questions | None] = ContextVar("questions", default=None)


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
    questions = Questions(list(flags))
    token = QUESTIONS.set(questions)
    try:
        with recovery_counts() as counts:
            found = run()
    except Refuted:
        return None
    except (RuntimeError, ValueError):  # of LinAlgError the former is the base
        if questions.ask():
            raise
        return None  # it comes of what was wrong
    finally:
        QUESTIONS.reset(token)
    if not questions.ask():
        return None
    for what, number in counts.items():
        for _ in range(number):
            count_recovery(what)
    return found


def are_true(flags: Tensor) -> list[bool]:
    """Flags (n,) on the host; inside `optimistically` all true, until they are asked for at its end."""
    questions = QUESTIONS.get()
    if questions is None:
        return flags.tolist()
    questions.flags.append(flags)
    return [True] * len(flags)


def hand_over(numbers: Tensor, take: Callable[[list[int]], None]) -> None:
    """Call `take` with integers (n,) on the host; inside `optimistically`, at its end."""
    questions = QUESTIONS.get()
    if questions is None:
        take(numbers.tolist())
    else:
        questions.numbers.append((numbers, take))


def refute() -> None:
    """Say that something has failed, which ends what runs `optimistically`."""
    if QUESTIONS.get() is not None:
        raise Refuted
