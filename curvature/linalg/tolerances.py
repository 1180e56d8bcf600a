"""Differences that rounding explains."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def rounding_tolerance(x: Tensor) -> float:
    """Relative difference that rounding explains, also in a model that computes parts of itself in single precision.

    A wrong guess differs by the spread of the random weights, far more than this.
    """
    return max(float(torch.finfo(x.dtype).eps), float(torch.finfo(torch.float32).eps)) ** 0.5


def noise_floor(tensors: Iterable[Tensor | None]) -> float:
    """Norm below which a tensor is rounding, given all tensors of its kind: a gradient may be zero by cancellation."""
    return max((100 * float(torch.finfo(t.dtype).eps * t.norm()) for t in tensors if t is not None), default=0.0)
