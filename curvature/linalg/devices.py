"""What differs between devices: where numbers are that belong together, and whether there is double precision."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def stack(parts: Iterable[Tensor]) -> Tensor:
    """``torch.stack`` on the device of the first; those of layers on other devices come over to it."""
    first, *others = parts
    return torch.stack([first, *(part.to(first.device) for part in others)])


def by_device(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors in runs of one device."""
    runs: list[list[Tensor]] = []  # torch.compile cannot follow itertools.groupby
    for x in tensors:
        if not runs or runs[-1][0].device != x.device:
            runs.append([])
        runs[-1].append(x)
    return runs


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
