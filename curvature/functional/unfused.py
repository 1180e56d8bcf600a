"""Fused functions of torch that run as the plain ones that define them while a capture is on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from curvature.functional.recurrent import LOOPS


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Of the fused form torch has the second derivatives wrong: a Hessian by it is not symmetric."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


REWRITES: dict[Callable[..., Any], Callable[..., Any]] = {**LOOPS, torch._weight_norm: _weight_norm}


def rewritten(function: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any] | None:
    """The plain form of a fused function; None for other functions and for packed sequences.

    None as well under activation checkpointing: it runs the fused call again during the backward pass, whose saved
    tensors would be taken for those of the plain form without a complaint.
    """
    run = REWRITES.get(function)
    if run is None or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return None
    packed = len(args) == 9 and isinstance(args[3], tuple | list)
    return None if packed else run
