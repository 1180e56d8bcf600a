"""Convolutions and transposed convolutions in one, two and three dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from curvature.layers.base import Layout, RecordedCall, Rule, Unsupported, register, sum_over_broadcast
from curvature.terms import Convolution, Term, TransposedConvolution


def _per_axis(value: Any, n: int) -> list[int]:
    """Expand a number or a sequence to one number per spatial axis."""
    values = [value] if isinstance(value, int) else list(value)
    return values * n if len(values) == 1 else values


def padding_amounts(padding: Any, kernel: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """Pairs (before, after) in the order of ``F.pad``: last axis first."""
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
    amounts = _per_axis(0 if padding == "valid" else padding, len(kernel))
    return [p for p in reversed(amounts) for _ in range(2)]


class _ConvolutionRule(Rule):
    parameters = ("weight", "bias")
    bias_of: ClassVar[Mapping[str, str]] = {"weight": "bias"}
    is_transposed: ClassVar[bool] = False

    def term(self, call: RecordedCall, slot: str, b: Tensor, layout: Layout) -> Term:
        x, weight = call.args["input"], call.args["weight"]
        if layout.dim != 0 or x.ndim != weight.ndim:
            raise Unsupported("the samples are not along the batch axis")
        b = layout.front(b)
        if slot == "bias":
            return sum_over_broadcast(b, call.args["bias"].shape, layout, offset=1)
        stride, dilation = (
            tuple(_per_axis(call.args.get(name, 1), weight.ndim - 2)) for name in ("stride", "dilation")
        )
        added = _per_axis(call.args.get("output_padding", 0), len(stride))
        if any(p >= s for p, s in zip(added, stride, strict=True)):
            raise Unsupported("the output is padded by a step of the kernel or more: its adjoint has a longer output")
        padding = padding_amounts(call.args.get("padding", 0), weight.shape[2:], dilation)
        dtype = torch.promote_types(x.dtype, b.dtype)
        slid_over, at_positions = layout.front(x.to(dtype)), b.to(dtype)  # by the kernel, and of it
        if self.is_transposed:
            slid_over, at_positions = at_positions, slid_over
        groups = call.args.get("groups", 1)
        term = Convolution(slid_over, at_positions, tuple(weight.shape), stride, dilation, groups, tuple(padding))
        return TransposedConvolution(term) if self.is_transposed else term


@register
class ConvolutionRule(_ConvolutionRule):
    """``z[o, y] = sum_{c, k} W[o, c, k] x[c, stride * y + dilation * k - padding] + bias[o]``, by groups."""

    functions = (F.conv1d, F.conv2d, F.conv3d)
    signature = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


@register
class TransposedConvolutionRule(_ConvolutionRule):
    """The adjoint of a convolution: input and backprop exchange roles."""

    functions = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
    signature = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
    is_transposed = True
