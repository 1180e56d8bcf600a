"""Checks of arguments: each refusal names the argument and what was found."""

from __future__ import annotations

import math
from numbers import Integral
from types import FunctionType
from typing import Any

from torch import nn

__all__ = ["check_module", "check_whole", "function_hint", "kind_of", "uncalled"]


def check_whole(name: str, value: Any, low: float = -math.inf, high: float = math.inf) -> None:
    """Refuse what is no whole number from low to high."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: expected a whole number, found {value!r:.80}")
    if not low <= int(value) <= high:
        raise ValueError(f"{name}: expected a whole number from {low} to {high}, found {value}")


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
