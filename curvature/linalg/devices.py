"""What differs between devices: where numbers are that belong together, and whether there is double precision."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor


def stack(parts: Iterable[Tensor]) -> Tensor:
    """``torch.stack`` on the device of the first; those of layers on other devices come over to it."""
    first, *others = parts
    return torch.stack([first, *(part.to(first.device) for part in others)])


@functools.cache
def widest(kind: str) -> torch.dtype:
    """Double precision; single precision on kinds of devices that have no other (MPS, some integrated GPUs)."""
    try:
        torch.ones((), dtype=torch.float64, device=kind).add_(1)
    except (RuntimeError, TypeError):
        return torch.float32
    return torch.float64


def widen(x: Tensor) -> Tensor:
    """The tensor in the widest precision of its device."""
    return x.to(widest(x.device.type))
