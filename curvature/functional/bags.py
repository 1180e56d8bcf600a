"""Bags of embeddings in functions that have second derivatives, which torch's kernel has not."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def flat_bags(input: Tensor, offsets: Any, bags: int, include_last_offset: bool) -> tuple[Tensor, Tensor]:
    """The looked-up rows and their bags, both (number of look-ups,)."""
    if input.ndim == 2:
        return input.reshape(-1), torch.arange(bags, device=input.device).repeat_interleave(input.shape[1])
    position = torch.arange(len(input), device=input.device)
    bag = torch.searchsorted(offsets[:bags].contiguous(), position, right=True) - 1
    if include_last_offset:
        inside = position < offsets[-1]
        return input[inside], bag[inside]
    return input, bag


def weights_in_bags(
    index: Tensor, bag: Tensor, bags: int, dtype: torch.dtype, mode: str, per_sample: Any, frozen: int | None
) -> Tensor:
    """What each looked-up row counts for in its bag."""
    scale = torch.ones_like(index, dtype=dtype) if frozen is None else (index != frozen).to(dtype)
    if mode == "mean":
        scale = scale / scale.new_zeros(bags).index_add(0, bag, scale).clamp(min=1)[bag]
    return scale if per_sample is None else scale * per_sample.reshape(-1)[: len(index)]


def chosen_rows(weight: Tensor, input: Tensor, offsets: Any, include_last_offset: bool, padding_idx: Any) -> Any:
    """Of bags with ``mode="max"``: the row that torch takes each feature from, and whether the bag is empty."""
    if input.ndim == 2:
        offsets = torch.arange(0, input.numel(), input.shape[1], device=input.device)
        input = input.reshape(-1)
    _, _, sizes, chosen = torch.embedding_bag(
        weight.detach(), input, offsets, False, 2, False, None, include_last_offset, padding_idx
    )
    return chosen.clamp(min=0), sizes == 0


def embedding_bag(
    input: Tensor, weight: Tensor, offsets: Any = None, max_norm: Any = None, norm_type: float = 2,
    scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False, per_sample_weights: Any = None,
    include_last_offset: bool = False, padding_idx: Any = None,
) -> Tensor:  # fmt: skip
    """Look-ups, then their sums, means or maxima. Gradients scaled by frequency are no derivatives; torch refuses."""
    given = (offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse)
    # run the kernel for its checks, and because it rescales rows longer than max_norm
    like = F.embedding_bag(input, weight, *given, per_sample_weights, include_last_offset, padding_idx)
    if scale_grad_by_freq:
        return like
    bags = len(like)
    frozen = padding_idx if padding_idx is None or padding_idx >= 0 else padding_idx + len(weight)
    if mode == "max":
        chosen, is_empty = (x[:bags] for x in chosen_rows(weight, input, offsets, include_last_offset, frozen))
        return weight.gather(0, chosen).masked_fill(is_empty[:, None], 0)
    index, bag = flat_bags(input, offsets, bags, include_last_offset)
    scale = weights_in_bags(index, bag, bags, weight.dtype, mode, per_sample_weights, frozen)
    return torch.zeros_like(like).index_add(0, bag, weight[index] * scale[:, None])
