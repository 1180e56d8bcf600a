"""Convolutions and transposed convolutions in one, two and three dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from curvature.contractions import Outer, Term
from curvature.layers.base import Call, Layout, Rule, Unsupported, reduced, register


def _spread(value: Any, n: int) -> list[int]:
    """A number or a sequence of numbers to one number per spatial axis."""
    values = [value] if isinstance(value, int) else list(value)
    return values * n if len(values) == 1 else values


def patches(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], out: Sequence[int]
) -> Tensor:
    """View of (N, C, *size) as (N, C, *kernel, *out): what each output pixel sees. `x` is already padded."""
    steps = x.stride()[2:]
    return x.as_strided(
        (*x.shape[:2], *kernel, *out),
        (
            *x.stride()[:2],
            *(s * d for s, d in zip(steps, dilation, strict=True)),
            *(s * d for s, d in zip(steps, stride, strict=True)),
        ),
        x.storage_offset(),
    )


def columns(view: Tensor, n: int, groups: int) -> Tensor:
    """(N, C, *kernel, *out) with n spatial axes to (N, pixels, g, C/g * kernel)."""
    size, pixels = view[0, 0].flatten(n).flatten(0, n - 1).shape if n > 1 else view.shape[2:]
    return view.reshape(len(view), groups, -1, pixels).permute(0, 3, 1, 2)


def padding_amounts(padding: Any, kernel: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """Pairs (before, after) in the order of ``F.pad``: last axis first."""
    n = len(kernel)
    if padding == "valid":
        return [0] * (2 * n)
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
    return [p for p in reversed(_spread(padding, n)) for _ in range(2)]


class _Convolution(Rule):
    parameters = ("weight", "bias")

    def term(self, call: Call, slot: str, b: Tensor, layout: Layout) -> Term:
        x, weight = call.args["input"], call.args["weight"]
        n = weight.ndim - 2
        if layout.dim != 0 or x.ndim != n + 2:
            raise Unsupported("the samples are not along the batch axis")
        if slot == "bias":
            return reduced(layout.front(b), call.args["bias"].shape, layout, offset=1)
        return _folded(self.weight_term(x, weight, call.args, b), layout)

    def weight_term(self, x: Tensor, weight: Tensor, args: dict[str, Any], b: Tensor) -> Outer:
        """The view per row of the batch axis."""
        raise NotImplementedError


def _folded(term: Outer, layout: Layout) -> Outer:
    """Several rows of the batch axis per sample are further places."""
    if layout.outer == 1 and layout.inner == 1:
        return term
    a, b = (layout.front(x, 0).flatten(1, 2) for x in (term.a, term.b))
    return Outer(a, b, term.shape, term.sizes, term.order)


@register
class Convolution(_Convolution):
    """``z[o, y] = sum_{c, k} W[o, c, k] x[c, stride * y + dilation * k - padding] + bias[o]``, by groups."""

    functions = (F.conv1d, F.conv2d, F.conv3d)
    bias_is_input = True
    signature = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")

    def weight_term(self, x: Tensor, weight: Tensor, args: dict[str, Any], b: Tensor) -> Outer:
        n = weight.ndim - 2
        kernel, groups = weight.shape[2:], args.get("groups", 1)
        stride, dilation = _spread(args.get("stride", 1), n), _spread(args.get("dilation", 1), n)
        x = F.pad(x, padding_amounts(args.get("padding", 0), kernel, dilation))
        view = patches(x, kernel, stride, dilation, b.shape[2:])
        z = b.reshape(len(b), groups, -1, b[0, 0].numel()).permute(0, 3, 1, 2)
        return Outer(columns(view, n, groups), z, tuple(weight.shape))


@register
class TransposedConvolution(_Convolution):
    """The adjoint of a convolution: input and backprop change their parts, so the places are the input's pixels."""

    functions = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
    signature = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")

    def weight_term(self, x: Tensor, weight: Tensor, args: dict[str, Any], b: Tensor) -> Outer:
        n = weight.ndim - 2
        kernel, groups = weight.shape[2:], args.get("groups", 1)
        stride, dilation = _spread(args.get("stride", 1), n), _spread(args.get("dilation", 1), n)
        padded = F.pad(b, padding_amounts(args.get("padding", 0), kernel, dilation))
        seen = patches(padded, kernel, stride, dilation, x.shape[2:])
        pixels = x.reshape(len(x), groups, -1, x[0, 0].numel()).permute(0, 3, 1, 2)
        return Outer(a=columns(seen, n, groups), b=pixels, shape=tuple(weight.shape))
