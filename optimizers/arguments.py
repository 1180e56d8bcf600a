"""Checks of arguments: each refusal names the argument and what was found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from torch import Tensor


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, found {value!r:.80}")


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


def require_one_device(owner: str, trained: Mapping[str, Tensor]) -> None:
    """Refuse parameters on several devices; names one of each."""
    name_by_device = {p.device: name for name, p in trained.items()}
    if len(name_by_device) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in name_by_device.items())
        raise NotImplementedError(
            f"{owner}.step: parameters are on several devices ({places}), which several processes do not take; move "
            "the model of each process to one device, or train it in a single process"
        )
