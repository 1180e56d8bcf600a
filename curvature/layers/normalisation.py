"""Scale and shift of norm layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from curvature.layers.base import Layout, RecordedCall, Rule, register, sum_over_broadcast
from curvature.terms import DenseGradients, ElementwiseProduct, Term


class _ScaleShift(Rule):
    """``z = weight * normalize(x) + bias``, with the parameters along the axes from `first_axis` on."""

    parameters = ("weight", "bias")
    bias_of: ClassVar[Mapping[str, str]] = {"weight": "bias"}
    first_axis: ClassVar[int | None] = 1  # output axis of the parameters' first axis; None aligns to the right

    def normalize(self, call: RecordedCall) -> Tensor:
        """The normalized input, before scale and shift."""
        raise NotImplementedError

    def term(self, call: RecordedCall, slot: str, b: Tensor, layout: Layout) -> Term:
        shape, front = call.args[slot].shape, layout.front(b)
        if slot == "bias":
            return sum_over_broadcast(front, shape, layout, self.first_axis)
        offset = len(call.shape) - len(shape) if self.first_axis is None else self.first_axis
        axes = range(offset + 1, offset + 1 + len(shape))

        def by_feature(x: Tensor) -> Tensor:
            """View a tensor of the output's shape, samples in front, as (N, t, g)."""
            x = x.movedim(tuple(axes), tuple(range(-len(shape), 0)))
            return x.reshape(len(x), -1, shape.numel())

        direct, inputs = self._scale(call, b, layout, shape), lambda: by_feature(layout.front(self.normalize(call)))
        return ElementwiseProduct(direct, inputs, by_feature(front))

    def _scale(self, call: RecordedCall, b: Tensor, layout: Layout, shape: torch.Size) -> DenseGradients:
        """The gradients of the scale."""
        x = self.normalize(call)
        # in the memory of `x` where nothing has to know of it: early layers' inputs are large
        is_plain = x.dtype == b.dtype and not b.requires_grad and not torch._C._are_functorch_transforms_active()
        product = x.mul_(b) if is_plain else x * b
        return sum_over_broadcast(layout.front(product), shape, layout, self.first_axis)


@register
class LayerNormRule(_ScaleShift):
    functions = (F.layer_norm,)
    signature = ("input", "normalized_shape", "weight", "bias", "eps")
    first_axis = None

    def normalize(self, call: RecordedCall) -> Tensor:
        args = call.args
        return F.layer_norm(args["input"], args["normalized_shape"], eps=args.get("eps", 1e-5))


@register
class RMSNormRule(_ScaleShift):
    functions = (F.rms_norm,)
    signature = ("input", "normalized_shape", "weight", "eps")
    first_axis = None

    def normalize(self, call: RecordedCall) -> Tensor:
        return F.rms_norm(call.args["input"], call.args["normalized_shape"], eps=call.args.get("eps"))


@register
class GroupNormRule(_ScaleShift):
    functions = (F.group_norm,)
    signature = ("input", "num_groups", "weight", "bias", "eps")

    def normalize(self, call: RecordedCall) -> Tensor:
        args = call.args
        return F.group_norm(args["input"], args["num_groups"], eps=args.get("eps", 1e-5))


class _RunningNorm(_ScaleShift):
    """Norms that may use running statistics, which recomputing must not update."""

    batch_statistics = ""  # the argument that asks for those of the input

    def normalize(self, call: RecordedCall) -> Tensor:
        args, eps = call.args, call.args.get("eps", 1e-5)
        if uses_running_statistics(args, self.batch_statistics):
            return F.batch_norm(args["input"], args["running_mean"], args["running_var"], eps=eps)
        if self.batch_statistics == "training":
            return F.batch_norm(args["input"], None, None, training=True, eps=eps)
        return F.instance_norm(args["input"], eps=eps)


def uses_running_statistics(args: dict[str, Any], flag: str) -> bool:
    """Whether a batch norm (flag `training`) or instance norm (`use_input_stats`) reads its running statistics."""
    return args.get("running_mean") is not None and not args.get(flag, flag == "use_input_stats")


@register
class BatchNormRule(_RunningNorm):
    functions = (F.batch_norm,)
    signature = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
    batch_statistics = "training"


@register
class InstanceNormRule(_RunningNorm):
    functions = (F.instance_norm,)
    signature = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
    batch_statistics = "use_input_stats"
