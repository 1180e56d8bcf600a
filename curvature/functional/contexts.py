"""Contexts in which torch functions run in another form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from curvature.functional import formulas

Table = Mapping[Callable[..., Any], Callable[..., Any]]  # functions of torch, and what runs for them


class TwiceDifferentiable(TorchFunctionMode):
    """A context in which bags of embeddings have second derivatives; so has attention below ``SDPBackend.MATH``.

    Those of torch's kernel of weight normalization are wrong: a Hessian through it is not symmetric.
    """

    formulas: ClassVar[Table] = {F.embedding_bag: formulas.embedding_bag, torch._weight_norm: formulas.weight_norm}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.formulas.get(func, func)(*args, **(kwargs or {}))


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
    return formulas.instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)


class ContiguousNorms(TorchFunctionMode):
    """A context in which batch and instance norms have right gradients on a CPU where an axis has a single entry.

    Strides do not tell channels that come last from others there, as in a batch of one sample. Torch's backward pass
    then reads the input in one order and what comes back in the other, as of a model that makes tokens of pixels.
    """

    functions: ClassVar = {F.batch_norm, torch.batch_norm, F.instance_norm, torch.instance_norm}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        x = (args[0] if args else kwargs.get("input")) if func in self.functions else None
        if not isinstance(x, Tensor) or x.device.type != "cpu" or x.ndim < 4 or 1 not in (*x.shape[:1], *x.shape[2:]):
            return func(*args, **kwargs)
        out = func(x.contiguous(), *args[1:], **{name: given for name, given in kwargs.items() if name != "input"})
        return out.reshape(-1).reshape(out.shape)  # what comes back is copied on the way


class ExactNorms(TwiceDifferentiable):
    """A context in which norms have correct derivatives of any order; for the rest it is `TwiceDifferentiable`.

    Torch's kernels have wrong third derivatives. Layer norm: https://github.com/pytorch/pytorch/issues/175754; batch
    norm in training mode, and instance norm, which calls it: https://github.com/pytorch/pytorch/issues/186256. Group
    norm and RMS norm are right.
    """

    formulas: ClassVar[Table] = {
        F.layer_norm: formulas.layer_norm, torch.layer_norm: formulas.layer_norm, F.batch_norm: batch_norm,
        torch.batch_norm: formulas.weights_first(batch_norm), F.instance_norm: instance_norm,
        torch.instance_norm: formulas.weights_first(instance_norm), **TwiceDifferentiable.formulas,
    }  # fmt: skip
