"""Embedding and EmbeddingBag, without building the one-hot input."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from curvature.functional import chosen_rows, flat_bags, weights_in_bags
from curvature.layers.base import Layout, RecordedCall, Rule, Unsupported, register
from curvature.terms import DenseGradients, IndexedRows, Term


def _frozen_row(args: dict[str, Any]) -> int:
    """The row that `padding_idx` freezes, or -1."""
    row = args.get("padding_idx")
    if row is None:
        return -1
    return row if row >= 0 else row + args["weight"].shape[0]


@register
class EmbeddingRule(Rule):
    """``z[..., :] = W[index[...]]``; `scale_grad_by_freq` counts frequencies within each sample."""

    functions = (F.embedding,)
    signature = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    parameters = ("weight",)

    def term(self, call: RecordedCall, slot: str, b: Tensor, layout: Layout) -> Term:
        if layout.dim == len(call.shape) - 1:
            raise Unsupported("the samples are along the features")
        args = call.args
        index = layout.front(args["input"]).flatten(1)
        values = layout.front(b).flatten(1, -2)
        valid = None if args.get("padding_idx") is None else index != _frozen_row(args)
        values = values if valid is None else values.masked_fill(~valid[..., None], 0)
        if args.get("scale_grad_by_freq"):
            counts = (index[:, :, None] == index[:, None, :]).sum(2)
            values = values / counts[..., None]
        return IndexedRows(index, values, tuple(args["weight"].shape), valid)

    def counts_over_batch(self, call: RecordedCall) -> bool:
        return bool(call.args.get("scale_grad_by_freq"))


@register
class EmbeddingBagRule(Rule):
    """Sum, mean or maximum over bags of rows; 2-d input, or 1-d input with offsets."""

    functions = (F.embedding_bag,)
    signature = (
        "input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse",
        "per_sample_weights", "include_last_offset", "padding_idx",
    )  # fmt: skip
    parameters = ("weight",)

    def term(self, call: RecordedCall, slot: str, b: Tensor, layout: Layout) -> Term:
        args = call.args
        if layout.dim != 0:
            raise Unsupported("the samples are not along the bags")
        if args.get("scale_grad_by_freq"):
            # torch 2.13 on the CPU divides some rows by another row's frequency; leave it to torch
            raise Unsupported("frequencies in bags")
        bags, width = call.shape
        number = torch.arange(bags, device=b.device)
        sample = number // layout.inner % layout.samples
        given = args["input"], args.get("offsets")
        index, bag = flat_bags(*given, bags, bool(args.get("include_last_offset")))
        if args.get("mode", "mean") == "max":
            return _maximum(args, b, sample, layout.samples)
        options = args.get("mode", "mean"), args.get("per_sample_weights"), _frozen_row(args)
        looked_up = b[bag] * weights_in_bags(index, bag, bags, b.dtype, *options)[:, None]
        shape, valid = tuple(args["weight"].shape), index != _frozen_row(args)
        if args["input"].ndim == 2:  # bags of one size: nothing to count, which would wait for the device
            lined_up = [
                layout.front(x.unflatten(0, args["input"].shape)).flatten(1, 2) for x in (index, looked_up, valid)
            ]
            return IndexedRows(lined_up[0], lined_up[1], shape, lined_up[2])
        # pad the look-ups of each sample to a common number of places
        sample_of = sample[bag]
        sizes = sample_of.new_zeros(layout.samples).index_add_(0, sample_of, torch.ones_like(sample_of))
        order = torch.argsort(sample_of, stable=True)
        place = torch.arange(len(order), device=b.device) - (sizes.cumsum(0) - sizes)[sample_of[order]]
        longest = int(sizes.max()) if len(order) else 0
        rows = index.new_zeros(layout.samples, longest)
        values = b.new_zeros(layout.samples, longest, width)
        is_valid = torch.zeros_like(rows, dtype=torch.bool)
        rows[sample_of[order], place] = index[order]
        is_valid[sample_of[order], place] = valid[order]
        values[sample_of[order], place] = looked_up[order]
        return IndexedRows(rows, values, shape, is_valid)


def _maximum(args: dict[str, Any], b: Tensor, sample: Tensor, count: int) -> DenseGradients:
    """Each feature of a bag comes from the row that torch reports as the maximum."""
    weight, given = args["weight"], (args["input"], args.get("offsets"))
    found = chosen_rows(weight, *given, bool(args.get("include_last_offset")), args.get("padding_idx"))
    chosen, is_empty = (x[: len(b)] for x in found)
    b = b.masked_fill(is_empty[:, None], 0)
    out = b.new_zeros(count, *weight.shape)
    feature = torch.arange(b.shape[1], device=b.device).expand_as(chosen)
    out.index_put_((sample[:, None].expand_as(chosen), chosen, feature), b, accumulate=True)
    return DenseGradients(out)
