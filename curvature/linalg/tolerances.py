"""How large a difference rounding explains."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from curvature.linalg.devices import stack, widen


def rounding_tolerance(x: Tensor) -> float:
    """Relative difference that rounding explains, even if parts of the model compute in single precision.

    A wrong candidate differs by the spread of the random weights, far more than this.
    """
    return max(float(torch.finfo(x.dtype).eps), float(torch.finfo(torch.float32).eps)) ** 0.5


def noise_floor(tensors: Iterable[Tensor | None]) -> Tensor:
    """Norm () below which a tensor is rounding noise, given all of its kind: a gradient may cancel to zero."""
    found = [widen(100 * torch.finfo(t.dtype).eps * t.norm()) for t in tensors if t is not None]
    return stack(found).amax() if found else torch.zeros((), device="cpu")
