"""Checks of arguments: each refusal names the argument and what was found."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

from torch import nn

__all__ = ["check_module", "check_whole", "kind_of"]


def check_whole(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> None:
    """Refuse what is no whole number (TypeError) from low to high (ValueError)."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: expected a whole number, found {value!r:.80}")
    if not low <= int(value) <= high:
        limits = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
        raise ValueError(f"{name}: expected a whole number {limits}, found {value}")


def check_module(model: Any, hint: str = "") -> None:
    """Refuse what is no module, such as its class."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, found {kind_of(model)}{hint}")


def kind_of(value: Any) -> str:
    """The name of its type, and of a class its own."""
    return f"the class {value.__name__}, no instance of it" if isinstance(value, type) else type(value).__name__
