"""Small arithmetic that step rules share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from curvature.linalg import stack
from curvature.operators import Named
from optimizers.steps.layer_vector import norms

# AdamW's usual learning rate, for which lr=1 stands in weight decay: lr multiplies the step here, and has no unit, so
# that lr * weight_decay would be a thousand times the decay that recipes for AdamW mean.
DECAY_RATE = 1e-3


def kept_by_decay(options: Mapping[str, float]) -> float:
    """What decoupled weight decay leaves of a parameter at a step, given the options of its group."""
    return 1 - DECAY_RATE * options["lr"] * options["weight_decay"]


@torch.no_grad()
def set_parameters(parameters: Named, values: Named) -> None:
    for name, value in values.items():
        parameters[name].copy_(value)


@contextmanager
def restoring(parameters: Named, values: Named) -> Iterator[None]:
    """After an exception the parameters have these values."""
    try:
        yield
    except BaseException:
        set_parameters(parameters, values)
        raise


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no entry is infinite or nan."""
    some = [t for t in tensors if t.numel()]
    # norms are quick, but may overflow
    return math.isfinite(sum(stack(norms(some)).tolist())) or bool(all_finite(some))


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """`are_finite` of at least one tensor, as a flag () on the device of the first."""
    return stack(torch.isfinite(t).all() for t in tensors).all()
