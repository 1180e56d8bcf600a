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
    return -1 if row is None else int(row) % len(args["weight"])


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
        valid = None
        if args.get("padding_idx") is not None:
            valid = index != _frozen_row(args)
            values = values.masked_fill(~valid[..., None], 0)
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
        bags = call.shape[0]
        sample = torch.arange(bags, device=b.device) // layout.inner % layout.samples
        index, bag = flat_bags(args["input"], args.get("offsets"), bags, bool(args.get("include_last_offset")))
        if args.get("mode", "mean") == "max":
            return _maximum(args, b, sample, layout.samples)
        options = args.get("mode", "mean"), args.get("per_sample_weights"), _frozen_row(args)
        looked_up = b[bag] * weights_in_bags(index, bag, bags, b.dtype, *options)[:, None]
        shape, valid = tuple(args["weight"].shape), index != _frozen_row(args)
        if args["input"].ndim == 2:  # bags of one size: nothing to count, which would wait for the device
            by_sample = lambda x: layout.front(x.unflatten(0, args["input"].shape)).flatten(1, 2)
        else:  # pad the look-ups of each sample to a common number of places
            sample_of = sample[bag]
            sizes = sample_of.new_zeros(layout.samples).index_add_(0, sample_of, torch.ones_like(sample_of))
            order = torch.argsort(sample_of, stable=True)
            place = torch.arange(len(order), device=b.device) - (sizes.cumsum(0) - sizes)[sample_of[order]]
            size, at = (layout.samples, int(sizes.max()) if len(order) else 0), (sample_of[order], place)
            by_sample = lambda x: x.new_zeros(*size, *x.shape[1:]).index_put_(at, x[order])
        return IndexedRows(by_sample(index), by_sample(looked_up), shape, by_sample(valid))


def _maximum(args: dict[str, Any], b: Tensor, sample: Tensor, count: int) -> DenseGradients:
    """Each feature of a bag comes from the row that torch reports as the maximum."""
    weight, includes_last = args["weight"], bool(args.get("include_last_offset"))
    rows_and_empty = chosen_rows(weight, args["input"], args.get("offsets"), includes_last, args.get("padding_idx"))
    chosen, is_empty = (x[: len(b)] for x in rows_and_empty)
    b = b.masked_fill(is_empty[:, None], 0)
    out = b.new_zeros(count, *weight.shape)
    feature = torch.arange(b.shape[1], device=b.device).expand_as(chosen)
    out.index_put_((sample[:, None].expand_as(chosen), chosen, feature), b, accumulate=True)
    return DenseGradients(out)
