"""Attention written out: one score for each pair of tokens."""

import math
from typing import Any

import torch
from torch import Tensor


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Keys that a mask hides weigh nothing; a query that sees no key gets zero."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    seen = torch.ones_like(scores, dtype=torch.bool)
    if is_causal:
        seen = seen.tril()
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        seen = seen & attn_mask
    elif attn_mask is not None:
        seen, scores = seen & (attn_mask > -math.inf), scores + attn_mask.clamp(min=-1e9)
    weights = torch.where(seen, (scores - scores.detach().amax(-1, keepdim=True)).exp(), 0)
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-300) @ value
