"""Small arithmetic that step rules share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from curvature.linalg import stack, widen

# AdamW's usual learning rate, for which lr=1 stands in weight decay: lr multiplies the step here, and has no unit, so
# that lr * weight_decay would be a thousand times the decay that recipes for AdamW mean.
DECAY_RATE = 1e-3


def kept_by_decay(options: Mapping[str, float]) -> float:
    """What decoupled weight decay leaves of a parameter at a step, given the options of its group."""
    return 1 - DECAY_RATE * options["lr"] * options["weight_decay"]


def inner(one: Tensor, other: Tensor) -> Tensor:
    """The inner product of two tensors of one shape, in single precision at least."""
    wide = torch.promote_types(one.dtype, torch.float32)
    return torch.dot(one.to(wide).flatten(), other.to(wide).flatten())


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no entry is infinite or nan."""
    some = [t for t in tensors if t.numel()]
    # sums are quick, but those of finite entries may overflow
    return bool(torch.isfinite(_sums(some)).all()) or bool(all_finite(some))


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """`are_finite` of at least one tensor, as a flag () on the device of the first."""
    return stack(torch.isfinite(t).all() for t in tensors).all()


def _sums(tensors: Iterable[Tensor]) -> Tensor:
    return stack(widen(t.sum(dtype=torch.promote_types(t.dtype, torch.float32))) for t in tensors)
