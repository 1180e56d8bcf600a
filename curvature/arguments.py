"""Checks of arguments: each refusal names the argument and what was found."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

__all__ = ["check_whole"]


def check_whole(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> None:
    """Refuse what is no whole number from low to high."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: expected a whole number, found {value!r:.80}")
    if not low <= int(value) <= high:
        raise ValueError(f"{name}: expected a whole number from {low} to {high}, found {value}")
