"""The plain forms in which fused functions of torch run while they are recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from curvature.functional.recurrent import RECURRENT


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """The fused kernel has wrong second derivatives: a Hessian through it is not symmetric."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


PLAIN_FORMS: dict[Callable[..., Any], Callable[..., Any]] = {**RECURRENT, torch._weight_norm: _weight_norm}


def plain_form(function: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any] | None:
    """The plain form of a fused function; None for other functions and for packed sequences.

    None under activation checkpointing as well: the backward pass calls the fused function again and would take its
    saved tensors for those of the plain form, without an error.
    """
    run = PLAIN_FORMS.get(function)
    if run is None or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return None
    packed = len(args) == 9 and isinstance(args[3], tuple | list)
    return None if packed else run
