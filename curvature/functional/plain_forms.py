"""The plain forms in which fused functions of torch run while they are recorded."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from functools import cache
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
    if run is None or is_checkpointed():
        return None
    packed = len(args) == 9 and isinstance(args[3], tuple | list)
    return None if packed else run


def is_checkpointed() -> bool:
    """Whether what runs now is to run again in the backward pass."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@cache
def traceable_body(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """A function of torch.nn.functional in a form whose inner calls reach the mode (multi-head attention above all).

    Such a function is written in torch functions, but hands itself over as a whole as long as ``has_torch_function``
    returns true. The same code with that answer fixed to false runs its body. None for functions of any other kind.
    """
    if not isinstance(func, types.FunctionType) or func.__module__ != "torch.nn.functional":
        return None
    answers = {name: lambda *_: False for name in func.__globals__ if name.startswith("has_torch_function")}
    return types.FunctionType(
        func.__code__, {**func.__globals__, **answers}, func.__name__, func.__defaults__, func.__closure__
    )
