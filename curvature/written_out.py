"""Norms as their formulas: torch's kernels have wrong third derivatives, and second ones without a rule.

Layer norm: https://github.com/pytorch/pytorch/issues/175754; batch norm in training mode, and instance norm, which is
made of it: https://github.com/pytorch/pytorch/issues/186256. Group norm and RMS norm are right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class WrittenOut(TorchFunctionMode):
    """A context in which these norms have derivatives of any order."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return WRITTEN_OUT.get(func, func)(*args, **(kwargs or {}))


def layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:  # fmt: skip
    out = _normalised(input, list(range(-len(normalized_shape), 0)), eps)
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def batch_norm(
    input: Tensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    # the kernel checks the sizes, moves the running statistics, and is right where these are what it normalises by
    plain = F.batch_norm(input if not training else input.detach(), running_mean, running_var, weight, bias, training,
                         momentum, eps)  # fmt: skip
    dims = [0, *range(2, input.ndim)]
    return _affine(_normalised(input, dims, eps), weight, bias) if training else plain


def instance_norm(
    input: Tensor, running_mean: Any = None, running_var: Any = None, weight: Any = None, bias: Any = None,
    use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    plain = F.instance_norm(input if not use_input_stats else input.detach(), running_mean, running_var, weight, bias,
                            use_input_stats, momentum, eps)  # fmt: skip
    dims = list(range(2, input.ndim))
    return _affine(_normalised(input, dims, eps), weight, bias) if use_input_stats else plain


def _batch_norm(
    input: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, training: bool, momentum: float,
    eps: float, cudnn_enabled: bool,
) -> Tensor:  # fmt: skip
    return batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)


def _instance_norm(
    input: Tensor, weight: Any, bias: Any, running_mean: Any, running_var: Any, use_input_stats: bool, momentum: float,
    eps: float, cudnn_enabled: bool,
) -> Tensor:  # fmt: skip
    return instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


def _normalised(x: Tensor, dims: list[int], eps: float) -> Tensor:
    centred = x - x.mean(dims, keepdim=True)
    return centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()


def _affine(x: Tensor, weight: Any, bias: Any) -> Tensor:
    """A scale and a shift of each channel, along axis 1."""
    shape = (-1, *[1] * (x.ndim - 2))
    x = x if weight is None else x * weight.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)


WRITTEN_OUT: dict[Any, Any] = {
    F.layer_norm: layer_norm, torch.layer_norm: layer_norm, F.batch_norm: batch_norm, torch.batch_norm: _batch_norm,
    F.instance_norm: instance_norm, torch.instance_norm: _instance_norm,
}  # fmt: skip
