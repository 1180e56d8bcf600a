"""Functions that sum over an index of a weight: linear, bilinear, matrix products, einsum, convolutions."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from curvature.layers.base import Layout, RecordedCall, Rule, Unsupported, register, sum_over_broadcast
from curvature.terms import Convolution, OuterProduct, Term, TransposedConvolution

Labels = Sequence[Hashable]
Labelled = tuple[Tensor, Labels]


def outer_product(weight: Labelled, data: Sequence[Labelled], b: Tensor, out: Labels, layout: Layout) -> OuterProduct:
    """The `OuterProduct` of the weight in an einsum ``data, weight -> out``; labels are those of einsum."""
    tensor, p_labels = weight
    sample = out[layout.dim]
    p = [q for q, size in zip(p_labels, tensor.shape, strict=True) if size != 1]
    if sample in p:
        raise Unsupported("the parameter varies along the axis of the samples")
    x, x_labels = _multiply_data(data, sample, layout)
    z, z_labels = _squeeze(layout.front(b), out, sample)
    groups = [q for q in z_labels if q in p and q in x_labels]
    outputs = [q for q in z_labels if q in p and q not in x_labels]
    inputs = [q for q in x_labels if q in p and q not in z_labels]
    places = [q for q in z_labels if q not in p]
    if set(places) - set(x_labels) or len(set(p)) != len(p) or set(p) - {*groups, *outputs, *inputs}:
        raise Unsupported("an index of the contraction belongs to one operand alone")
    data_only = [k for k, q in enumerate(x_labels, 1) if q not in p and q not in z_labels]
    if data_only:
        x = x.sum(data_only)
        x_labels = [q for q in x_labels if q in p or q in z_labels]
    dtype = torch.promote_types(x.dtype, z.dtype)  # under autocast, both dtypes may differ
    x, z = x.to(dtype), z.to(dtype)
    sizes = dict(zip(p_labels, tensor.shape, strict=True))
    order = [*groups, *outputs, *inputs]
    in_order = order == list(p)
    return OuterProduct(
        a=_flatten_groups(x, x_labels, places, groups, inputs),
        b=_flatten_groups(z, z_labels, places, groups, outputs),
        shape=tuple(tensor.shape),
        sizes=None if in_order else tuple(sizes[q] for q in order),
        order=None if in_order else tuple(order.index(q) for q in p),
        is_routed=bool(groups),
    )


def _multiply_data(data: Sequence[Labelled], sample: Hashable, layout: Layout) -> tuple[Tensor, list[Hashable]]:
    """Multiply the data operands, samples first; axes of size one are dropped since they broadcast."""
    parts = []
    for x, labels in data:
        k = list(labels).index(sample) if sample in labels else None
        if k is not None and x.shape[k] == layout.size:
            parts.append(_squeeze(layout._replace(dim=k).front(x), labels, sample))
        else:
            parts.append(_squeeze(x[None], labels, None))
    if all(len(x) != layout.samples for x, _ in parts):
        raise Unsupported("no operand has the axis of the samples")
    x, labels = parts[0]
    for y, more in parts[1:]:
        union = labels + [q for q in more if q not in labels]
        number = {q: k + 1 for k, q in enumerate(union)}
        x = torch.einsum(
            x.expand(layout.samples, *x.shape[1:]), [0] + [number[q] for q in labels],
            y.expand(layout.samples, *y.shape[1:]), [0] + [number[q] for q in more],
            [0] + [number[q] for q in union],
        )  # fmt: skip
        labels = union
    return x.expand(layout.samples, *x.shape[1:]), labels


def _squeeze(x: Tensor, labels: Labels, sample: Hashable) -> tuple[Tensor, list[Hashable]]:
    """Drop axes of size one of (N, ...), except that of the samples."""
    keep = [k for k, q in enumerate(labels) if x.shape[k + 1] != 1 or (sample is not None and q == sample)]
    return x.reshape(len(x), *(x.shape[k + 1] for k in keep)), [labels[k] for k in keep]


def _flatten_groups(x: Tensor, labels: Labels, *groups: Labels) -> Tensor:
    """(N, labels...) to (N, prod of groups[0], prod of groups[1], ...)."""
    labels = list(labels)
    x = x.permute(0, *(labels.index(q) + 1 for group in groups for q in group))
    sizes, k = [], 1
    for group in groups:
        sizes.append(math.prod(x.shape[k : k + len(group)]))
        k += len(group)
    return x.reshape(len(x), *sizes)


class _ContractionRule(Rule):
    """A function that is an einsum of its arguments."""

    def labels(self, call: RecordedCall) -> tuple[dict[str, Labels], Labels]:
        """Those of einsum, of each argument that is multiplied and of the output."""
        raise NotImplementedError

    def term(self, call: RecordedCall, slot: str, b: Tensor, layout: Layout) -> Term:
        if slot in self.bias_of.values():
            return sum_over_broadcast(layout.front(b), call.args[slot].shape, layout)
        labels, out = self.labels(call)
        data = [(call.args[name], axes) for name, axes in labels.items() if name != slot]
        return outer_product((call.args[slot], labels[slot]), data, b, out, layout)


@register
class LinearRule(_ContractionRule):
    """``z[..., o] = sum_i W[o, i] x[..., i] + c[o]``, any number of leading axes."""

    functions = (F.linear,)
    signature = ("input", "weight", "bias")
    parameters = ("weight", "bias")
    bias_of: ClassVar[Mapping[str, str]] = {"weight": "bias"}

    def labels(self, call: RecordedCall) -> tuple[dict[str, Labels], Labels]:
        tail: list[Hashable] = ["o"] * (call.args["weight"].ndim - 1)  # a vector weight sums over the features
        lead = list(range(len(call.shape) - len(tail)))
        return {"input": [*lead, "i"], "weight": [*tail, "i"]}, [*lead, *tail]

    def term(self, call: RecordedCall, slot: str, b: Tensor, layout: Layout) -> Term:
        x, weight = call.args["input"], call.args["weight"]
        if slot != "weight" or weight.ndim != 2 or layout.dim >= x.ndim - 1:
            return super().term(call, slot, b, layout)
        # the same, faster
        dtype = torch.promote_types(x.dtype, b.dtype)
        both = layout.front(x), layout.front(b)
        a, z = (t.flatten(1, -2)[:, :, None].to(dtype) for t in both)
        return OuterProduct(a, z, tuple(weight.shape))


@register
class BilinearRule(_ContractionRule):
    """``z[..., o] = sum_ij x[..., i] W[o, i, j] y[..., j] + c[o]``."""

    functions = (F.bilinear,)
    signature = ("input1", "input2", "weight", "bias")
    parameters = ("weight", "bias")
    bias_of: ClassVar[Mapping[str, str]] = {"weight": "bias"}

    def labels(self, call: RecordedCall) -> tuple[dict[str, Labels], Labels]:
        lead = list(range(len(call.shape) - 1))
        return {"input1": [*lead, "i"], "input2": [*lead, "j"], "weight": ["o", "i", "j"]}, [*lead, "o"]


@register
class MatmulRule(_ContractionRule):
    """Matrix products with a parameter on either side, batched or not."""

    functions: ClassVar[Sequence[Callable[..., Any]]] = (
        torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm,
        torch.mv, Tensor.mv, torch.linalg.matmul,
    )  # fmt: skip
    signature: ClassVar[tuple[str, ...]] = ("input", "other")
    parameters: ClassVar[tuple[str, ...]] = ("input", "other")
    names: ClassVar[Mapping[str, str]] = {"mat2": "other", "vec": "other", "tensor2": "other"}
    operands: ClassVar[tuple[str, str]] = ("input", "other")

    def bind(self, func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
        return super().bind(func, args, {self.names.get(k, k): v for k, v in kwargs.items()})

    def labels(self, call: RecordedCall) -> tuple[dict[str, Labels], Labels]:
        x, y = (call.args[name] for name in self.operands)
        left: list[Hashable] = ["k"] if x.ndim == 1 else ["i", "k"]
        right: list[Hashable] = ["k"] if y.ndim == 1 else ["k", "j"]
        tail = left[:-1] + right[1:]
        lead = list(range(len(call.shape) - len(tail)))
        with_lead = lambda t, labels: [*lead[len(lead) - max(0, t.ndim - 2) :], *labels]
        return dict(zip(self.operands, (with_lead(x, left), with_lead(y, right)), strict=True)), [*lead, *tail]


@register
class ReversedMatmulRule(MatmulRule):
    """``other.__rmatmul__``: the operands in reverse order."""

    functions = (Tensor.__rmatmul__,)
    signature = ("other", "input")


@register
class AddMatmulRule(MatmulRule):
    """``beta * input + alpha * x @ y`` (addmm, baddbmm, addmv)."""

    functions = (torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm, torch.addmv, Tensor.addmv)
    signature = ("input", "x", "y")
    parameters = ("input", "x", "y")
    bias_of: ClassVar[Mapping[str, str]] = {"y": "input"}
    names: ClassVar[Mapping[str, str]] = {
        "mat1": "x", "mat2": "y", "batch1": "x", "batch2": "y", "mat": "x", "vec": "y",
    }  # fmt: skip
    operands = ("x", "y")

    def bias_slot(self, call: RecordedCall, slot: str) -> str | None:
        return self.bias_of.get(slot) if call.args.get("beta", 1) == call.args.get("alpha", 1) else None

    def term(self, call: RecordedCall, slot: str, b: Tensor, layout: Layout) -> Term:
        return super().term(call, slot, b * call.args.get("beta" if slot == "input" else "alpha", 1), layout)


@register
class EinsumRule(_ContractionRule):
    """``torch.einsum`` in its string form."""

    functions = (torch.einsum,)
    parameters = tuple(f"operand{k}" for k in range(8))

    def bind(self, func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
        equation, *operands = args
        if len(operands) == 1 and isinstance(operands[0], list | tuple):
            operands = list(operands[0])
        return {"equation": equation} | {f"operand{k}": x for k, x in enumerate(operands)}

    def labels(self, call: RecordedCall) -> tuple[dict[str, Labels], Labels]:
        """An ellipsis becomes numbers, aligned to the right."""
        operands = dict(call.args)
        equation = operands.pop("equation")
        if not isinstance(equation, str):
            raise Unsupported("einsum in its sublist form")
        left, arrow, right = equation.replace(" ", "").partition("->")
        if not arrow:
            letters = left.replace(",", "").replace("...", "")
            right = "..." * ("..." in left) + "".join(sorted(q for q in set(letters) if letters.count(q) == 1))
        inputs = dict(zip(operands, left.split(","), strict=True))
        spans = [operands[name].ndim - len(s.replace("...", "")) for name, s in inputs.items() if "..." in s]
        span = max(spans, default=0)

        def expand(subscript: str, n: int) -> list[Hashable]:
            head, dots, tail = subscript.partition("...")
            middle = list(range(span - (n - len(head) - len(tail)), span)) if dots else []
            return [*head, *middle, *tail]

        labels: dict[str, Labels] = {name: expand(s, operands[name].ndim) for name, s in inputs.items()}
        if any(len(set(row)) != len(row) for row in labels.values()):
            raise Unsupported("a repeated index of one operand (a diagonal)")
        return labels, expand(right, len(call.shape))


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
