"""A context in which norms have correct derivatives of any order: torch's kernels have wrong third ones.

Layer norm: https://github.com/pytorch/pytorch/issues/175754; batch norm in training mode, and instance norm, which
calls it: https://github.com/pytorch/pytorch/issues/186256. Group norm and RMS norm are right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from curvature.functional import formulas
from curvature.functional.contexts import TwiceDifferentiable


def batch_norm(
    input: Tensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None, training: bool = False,
    momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    if not training:
        return formulas.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    # run the kernel for its checks of the sizes and its update of the running statistics
    F.batch_norm(input.detach(), running_mean, running_var, None, None, True, momentum, eps)
    dims = [0, *range(2, input.ndim)]
    return formulas.affine(formulas.standardize(input, dims, eps), weight, bias, channels=True)


def instance_norm(
    input: Tensor, running_mean: Any = None, running_var: Any = None, weight: Any = None, bias: Any = None,
    use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    if use_input_stats:
        F.instance_norm(input.detach(), running_mean, running_var, None, None, True, momentum, eps)
    return formulas.instance_norm(
        input, running_mean, running_var, weight, bias, use_input_stats or running_mean is None, momentum, eps
    )


def _weights_first(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The norm with its arguments in the order of ``torch.batch_norm``, not of ``torch.nn.functional.batch_norm``."""

    def function(input: Tensor, weight: Any, bias: Any, mean: Any, var: Any, *rest: Any) -> Tensor:
        return norm(input, mean, var, weight, bias, *rest[:3])

    return function


class ExactNorms(TwiceDifferentiable):
    """A context in which layer, batch and instance norms run as their formulas; for the rest `TwiceDifferentiable`."""

    formulas: ClassVar[Mapping[Callable[..., Any], Callable[..., Any]]] = {
        F.layer_norm: formulas.layer_norm, torch.layer_norm: formulas.layer_norm, F.batch_norm: batch_norm,
        torch.batch_norm: _weights_first(batch_norm), F.instance_norm: instance_norm,
        torch.instance_norm: _weights_first(instance_norm), **TwiceDifferentiable.formulas,
    }  # fmt: skip
