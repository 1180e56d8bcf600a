"""Checks of arguments: each refusal names the argument and what was found."""

from __future__ import annotations

import math
from numbers import Integral, Real
from types import FunctionType
from typing import Any

from torch import Tensor, nn

__all__ = ["check_flag", "check_module", "check_range", "check_whole", "function_hint", "kind_of", "uncalled"]


def check_whole(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> None:
    """Refuse what is no whole number (TypeError) from low to high (ValueError)."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: expected a whole number, found {value!r:.80}")
    if not low <= int(value) <= high:
        limits = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
        raise ValueError(f"{name}: expected a whole number {limits}, found {value}")


def check_range(name: str, value: Any, low: float, high: float, open_end: bool = False) -> None:
    """Refuse what is no number from low to high; a tensor of one entry is one."""
    is_tensor = isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()
    if isinstance(value, bool) or not (is_tensor or isinstance(value, Real)):
        raise TypeError(f"{name}: expected a number, found {value!r:.80} ({type(value).__name__})")
    try:
        value = float(value)
    except OverflowError:
        value = math.inf
    if not low <= value <= high or value == math.inf or (open_end and value == high):
        is_open = open_end or high == math.inf
        raise ValueError(f"{name}: expected {low} to {high}{' (exclusive)' if is_open else ''}, found {value}")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, found {value!r:.80}")


def check_module(model: Any, hint: str = "") -> None:
    """Refuse what is no module, such as its class."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, found {kind_of(model)}{function_hint(model)}{hint}")


def kind_of(value: Any) -> str:
    """The name of its type, and of a class its own."""
    return f"the class {value.__name__}, no instance of it" if isinstance(value, type) else type(value).__name__


def function_hint(model: Any) -> str:
    """What makes a module of a function that was passed as the model."""
    is_function = isinstance(model, FunctionType)
    return ": curvature.FunctionModel makes a module of a function and its parameters" if is_function else ""


def uncalled(value: Any) -> str:
    """How a message shows an argument; of a function or class that should have been called, that it should."""
    if isinstance(value, type | FunctionType):
        return f"{value.__name__} itself: call it, {value.__name__}()"
    return f"{value!r:.80}"
