"""Calls of the user's code with what nobody asked it to take: one sample, copies, tensors of `torch.func`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

__all__ = ["attempt"]
Result = TypeVar("Result")


def attempt(call: Callable[[], Result], otherwise: str, passing: tuple[type[Exception], ...] = ()) -> Result | None:
    """What the call returns; None where it raises: the log says once, at level INFO, what is done instead, and why."""
    try:
        return call()
    except passing:
        raise
    except Exception as error:  # of any kind: models and losses raise whatever they like at what they do not take
        why, *_ = str(error).split("\n")
        log_once(f"{otherwise}: {why}")
        return None


@lru_cache(maxsize=1024)  # messages may have numbers that differ at every call
def log_once(message: str) -> None:
    logging.getLogger("curvature").info("%s", message)
