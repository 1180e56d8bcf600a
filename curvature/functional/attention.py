"""Attention whose scores are never held all at once, with derivatives of every order.

torch's fused kernels hold no scores either, but have no batched backward pass and no second derivative; written out,
attention holds one score for each pair of tokens. Here the kernels make values and gradients, batches of vectors being
samples to them. All other derivatives take queries in blocks, and compute the weights of a block when it is its turn
(arXiv:2112.05682, arXiv:2205.14135). Derivatives of a block come from `torch.func`, by the definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad
from torch.func import vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

from curvature.functional.formulas import attention_weights
from curvature.functional.plain_forms import is_checkpointed

BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
LEAST_QUERIES = 16  # in a block
# scores of a block: what a CPU's cache holds, and elsewhere; fewer are written out as they are
CACHED_SCORES, SCORES = 1 << 18, 1 << 25
Block = tuple[slice, slice, slice]  # samples, heads, queries
Results = tuple[Tensor, ...]
Kernel = Callable[..., Results | None]


@dataclass(frozen=True)
class Blockwise:
    """A function of a mask and of tensors (samples, heads, tokens, features), computed a block at a time."""

    function: Callable[..., Results]  # of a block: from its first query, its part of the mask, those of the tensors
    arguments: tuple[bool, ...]  # of each tensor whether its tokens are queries, of which a block has some; else all
    results: tuple[bool, ...]  # likewise; what is not by query is summed over the blocks of queries
    keys: int  # how many tokens the others have
    kernels: tuple[Kernel, ...] = ()  # give all at once, or None where torch has none; then those of the `pullback`

    def pullback(self) -> Blockwise:
        """Of (mask, *tensors, *vectors sent back to the results), to the gradients of the tensors."""

        def function(start: int, mask: Tensor | None, *given: Tensor) -> Results:
            tensors, sent = given[: len(self.arguments)], given[len(self.arguments) :]
            gradients: Results = vjp(partial(self.function, start, mask), *tensors)[1](sent)
            return gradients

        return Blockwise(function, self.arguments + self.results, self.arguments, self.keys, self.kernels[1:])

    def pushforward(self) -> Blockwise:
        """Of (mask, *tensors, *their changes), to the changes of the results.

        The pullback is linear in the vectors, and its own pullback is this; torch nests no forward modes.
        """

        def function(start: int, mask: Tensor | None, *given: Tensor) -> Results:
            tensors, changes = given[: len(self.arguments)], given[len(self.arguments) :]
            values, pull = vjp(partial(self.function, start, mask), *tensors)[:2]
            changes_of_results: Results = vjp(lambda *sent: pull(sent), *map(torch.zeros_like, values))[1](changes)
            return changes_of_results

        return Blockwise(function, self.arguments * 2, self.results, self.keys)

    def __call__(self, mask: Tensor | None, *tensors: Tensor) -> Results:
        """The results, without graph."""
        at_once = self.kernels[0](mask, *tensors) if self.kernels else None
        if at_once is not None:
            return at_once
        totals: list[Tensor] = []
        query = tensors[0]
        for block in _blocks(query, self.keys):
            pieces = [_cut(x, block, q) for x, q in zip(tensors, self.arguments, strict=True)]
            results = self.function(block[2].start, None if mask is None else _cut(mask, block, True), *pieces)
            for k, (x, by_query) in enumerate(zip(results, self.results, strict=True)):
                if k == len(totals):
                    totals.append(x.new_zeros(*query.shape[:2], query.shape[2] if by_query else x.shape[2], x.shape[3]))
                _cut(totals[k], block, by_query).add_(x)
        return tuple(totals)


def _blocks(query: Tensor, keys: int) -> Iterator[Block]:
    """As many queries as fit, then heads, then samples."""
    limit = _scores_at_once(query)
    samples, heads, queries = query.shape[:3]
    q = min(queries, max(LEAST_QUERIES, limit // keys))
    h = min(heads, max(1, limit // (keys * q)))
    n = min(samples, max(1, limit // (keys * q * h)))
    for i in range(0, samples, n):
        for j in range(0, heads, h):
            for k in range(0, queries, q):
                yield slice(i, min(i + n, samples)), slice(j, min(j + h, heads)), slice(k, min(k + q, queries))


def _scores_at_once(query: Tensor) -> int:
    return CACHED_SCORES if query.device.type == "cpu" else SCORES


def _cut(x: Tensor, block: Block, by_query: bool) -> Tensor:
    """The block of x (samples, heads, tokens, features), axes of size one being shared by all."""
    for dim, part in enumerate(block if by_query else block[:2]):
        if x.shape[dim] > 1:
            x = x.narrow(dim, part.start, part.stop - part.start)
    return x


class InBlocks(torch.autograd.Function):
    """Apply a `Blockwise` to (mask, *tensors); so are its derivatives. The mask has none."""

    @staticmethod
    def forward(blockwise: Blockwise, mask: Tensor | None, *tensors: Tensor) -> Results:
        with torch.autocast(tensors[0].device.type, enabled=False):
            return blockwise(mask, *tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.blockwise = inputs[0]
        ctx.save_for_backward(*inputs[1:])
        ctx.save_for_forward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *sent: Tensor) -> tuple[Tensor | None, ...]:
        """RuntimeError under ``is_grads_batched``: so large a pass goes vector by vector."""
        if any(map(is_legacy_batchedtensor, sent)):
            raise RuntimeError("attention in blocks takes one vector at a time")
        return None, None, *InBlocks.apply(ctx.blockwise.pullback(), *ctx.saved_tensors, *sent)

    @staticmethod
    def jvp(ctx: Any, _: None, change_of_mask: Tensor | None, *changes: Tensor | None) -> Results:
        mask, *tensors = ctx.saved_tensors
        filled = [torch.zeros_like(x) if d is None else d for x, d in zip(tensors, changes, strict=True)]
        results: Results = InBlocks.apply(ctx.blockwise.pushforward(), mask, *tensors, *filled)
        return results

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], blockwise: Blockwise, *given: Any) -> Any:
        """Batches become samples."""
        size = info.batch_size

        def flat(x: Tensor | None, dim: int | None) -> Tensor | None:
            if x is None or (dim is None and x.shape[0] == 1 and x is given[0]):
                return x  # the mask of all
            batched = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            return batched.flatten(0, 1)

        results = InBlocks.apply(blockwise, *(flat(x, dim) for x, dim in zip(given, in_dims[1:], strict=True)))
        return tuple(x.unflatten(0, (size, -1)) for x in results), (0,) * len(results)


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """``scaled_dot_product_attention``, in blocks where that holds less."""
    # torch's own for few scores, dropout (which draws as many numbers), a mask to be differentiated (which is as
    # large), and under activation checkpointing, whose second run does not come here
    given: tuple[Tensor, ...] = (query, key, value)
    kind = query.device.type
    are_few = math.prod(query.shape[:-1]) * key.shape[-2] <= _scores_at_once(query)
    if are_few or dropout_p or query.is_nested or _is_odd(attn_mask, is_causal) or is_checkpointed():
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        given = (query, *(x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value)))
    if torch.is_autocast_enabled(kind):
        given = tuple(x.to(torch.get_autocast_dtype(kind)) for x in given)
    dtype, precise = given[0].dtype, torch.promote_types(given[0].dtype, torch.float32)
    lead = torch.broadcast_shapes(*(x.shape[:-2] for x in given))
    q, k, v = (_with_four_axes(x.to(precise).expand(*lead, *x.shape[-2:])) for x in given)
    mask = attn_mask
    if mask is not None:
        mask = _with_four_axes(mask if mask.dtype == torch.bool else mask.to(precise))
        mask = mask.expand(*mask.shape[:-1], k.shape[-2])

    def block(start: int, mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Results:
        if is_causal:
            stop = start + q.shape[-2]
            k, v = k[..., :stop, :], v[..., :stop, :]
            mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril(start)
        return (attention_weights(q, k, mask, scale) @ v,)

    kernel = partial(_fused, {"is_causal": is_causal, "scale": scale})
    kernels = kernel, partial(_gradient, kernel)
    blockwise = Blockwise(block, (True, False, False), (True,), k.shape[-2], kernels)
    (out,) = InBlocks.apply(blockwise, mask, q, k, v)
    return out.reshape(*lead, *out.shape[-2:]).to(dtype)


def _is_odd(mask: Tensor | None, is_causal: bool) -> bool:
    """Whether a mask is refused by torch, or has derivatives."""
    return mask is not None and (is_causal or mask.requires_grad or forward_ad.unpack_dual(mask).tangent is not None)


def _fused(options: dict[str, Any], mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Results | None:
    with sdpa_kernel(BACKENDS):
        if torch._fused_sdp_choice(q, k, v, mask, **options) == SDPBackend.MATH.value:
            return None
        return (F.scaled_dot_product_attention(q, k, v, mask, **options),)


def _gradient(kernel: Kernel, mask: Tensor | None, *given: Tensor) -> Results | None:
    *tensors, sent = (x.detach().requires_grad_() for x in given)
    with torch.enable_grad():
        results = kernel(mask, *tensors)
        return None if results is None else torch.autograd.grad(results, tensors, [sent])


def _with_four_axes(x: Tensor) -> Tensor:
    """(samples, heads, tokens, features)."""
    return x.flatten(0, -4) if x.ndim > 3 else x[(None,) * (4 - x.ndim)]
