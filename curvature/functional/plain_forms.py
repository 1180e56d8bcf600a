"""The plain forms in which fused functions of torch run while they are recorded."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from curvature.functional.recurrent import RECURRENT


def _attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, *args: Any, **options: Any) -> Tensor:
    """A learnt mask that samples share is expanded first: each sample's gradient arrives there, not the sum of all."""
    mask = attn_mask.expand(_scores(query, key, options))
    return F.scaled_dot_product_attention(query, key, value, mask, *args, **options)


def _scores(query: Tensor, key: Tensor, options: Mapping[str, Any]) -> torch.Size:
    """The shape of the scores; of grouped queries, keys have fewer heads."""
    lead = query.shape[:-2] if options.get("enable_gqa") else torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
    return torch.Size([*lead, query.shape[-2], key.shape[-2]])


def _shares_learnt_mask(query: Tensor, key: Tensor, *args: Any, **options: Any) -> bool:
    mask = args[1] if len(args) > 1 else options.get("attn_mask")
    if mask is None or not mask.requires_grad or query.is_nested:
        return False
    scores = _scores(query, key, options)
    return mask.shape != scores and torch.broadcast_shapes(mask.shape, scores) == scores


def _is_padded(*args: Any, **options: Any) -> bool:
    """Whether sequences of a recurrent layer come as a tensor; packed ones have other arguments."""
    return len(args) != 9 or not isinstance(args[3], tuple | list)


def _layer_norm(
    input: Tensor, normalized_shape: list[int], weight: None = None, bias: Tensor | float = 0.0, eps: float = 1e-5
) -> Tensor:
    """With a bias and no weight: torch cannot differentiate the backward pass of the fused kernel of these."""
    return F.layer_norm(input, normalized_shape, eps=eps) + bias


def _has_bias_alone(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> bool:
    return weight is None and bias is not None


# the plain form of each function, and whether a call needs it
PLAIN_FORMS: dict[Callable[..., Any], tuple[Callable[..., Any], Callable[..., bool]]] = {
    **{function: (form, _is_padded) for function, form in RECURRENT.items()},
    F.scaled_dot_product_attention: (_attention, _shares_learnt_mask),
    F.layer_norm: (_layer_norm, _has_bias_alone),
}


def plain_form(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Callable[..., Any] | None:
    """The plain form of a fused function; None for packed sequences, and calls that are right as they are.

    Nor anything under activation checkpointing: the backward pass calls the fused function again and would take its
    saved tensors for those of the plain form, without an error.
    """
    form, is_needed = PLAIN_FORMS[function]
    return form if not is_checkpointed() and is_needed(*args, **kwargs) else None


def is_checkpointed() -> bool:
    """Whether what runs now is to run again in the backward pass."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


@cache
def traceable_body(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """The body of a function of torch.nn.functional, whose inner calls reach the mode; None for any other function.

    It hands itself over as a whole as long as ``has_torch_function`` is true; here that answer is fixed to false. Of
    one that chooses between two functions, as ``F.max_pool2d`` does, both run as their bodies.
    """
    if not isinstance(func, types.FunctionType) or func.__module__ != "torch.nn.functional":
        return None
    answers = {name: lambda *_: False for name in func.__globals__ if name.startswith("has_torch_function")}
    closure = func.__closure__ and tuple(types.CellType(_body_or_self(cell.cell_contents)) for cell in func.__closure__)
    return types.FunctionType(func.__code__, {**func.__globals__, **answers}, func.__name__, func.__defaults__, closure)


def _body_or_self(content: Any) -> Any:
    return (traceable_body(content) if isinstance(content, types.FunctionType) else None) or content
