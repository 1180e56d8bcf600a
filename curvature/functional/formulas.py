"""Formulas for functions of torch.nn, with correct derivatives of every order, which some fused kernels lack."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class MixesSamples(ValueError):
    """A batch norm makes samples depend on each other; `tensors` are the arguments of the call."""

    def __init__(self, *tensors: Tensor | None) -> None:
        super().__init__("BatchNorm in training mode")
        self.tensors = [x for x in tensors if x is not None]


def layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Tensor:
    dims = list(range(-len(normalized_shape), 0))
    return affine(standardize(input, dims, eps), weight, bias)


def rms_norm(input: Tensor, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Tensor:
    dims = list(range(-len(normalized_shape), 0))
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    return affine(input * (input.square().mean(dims, keepdim=True) + eps).rsqrt(), weight, None)


def group_norm(
    input: Tensor, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Tensor:
    shape = tuple(input.shape)
    grouped = input.reshape(shape[0], num_groups, -1)
    return affine(standardize(grouped, [-1], eps).reshape(shape), weight, bias, channels=True)


def instance_norm(
    input: Tensor, running_mean: Any = None, running_var: Any = None, weight: Any = None, bias: Any = None,
    use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5, *_: Any,
) -> Tensor:  # fmt: skip
    if running_mean is not None and not use_input_stats:
        return batch_norm(input, running_mean, running_var, weight, bias, eps=eps)
    return affine(standardize(input, list(range(2, input.ndim)), eps), weight, bias, channels=True)


def batch_norm(
    input: Tensor, running_mean: Any, running_var: Any, weight: Any = None, bias: Any = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """Batch norm with running statistics; `MixesSamples` where it would use those of the batch."""
    if training or running_mean is None:
        raise MixesSamples(weight, bias, running_mean, running_var)
    shape = _along_channels(input)
    centred = (input - running_mean.reshape(shape)) * (running_var + eps).rsqrt().reshape(shape)
    return affine(centred, weight, bias, channels=True)


def weights_first(norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The norm with its arguments in the order of ``torch.batch_norm``, not of ``torch.nn.functional.batch_norm``."""

    def function(input: Tensor, weight: Any, bias: Any, mean: Any, var: Any, *rest: Any) -> Tensor:
        return norm(input, mean, var, weight, bias, *rest[:3])

    return function


def standardize(x: Tensor, dims: list[int], eps: float) -> Tensor:
    centred = x - x.mean(dims, keepdim=True)
    return centred * (centred.square().mean(dims, keepdim=True) + eps).rsqrt()


def affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, channels: bool = False) -> Tensor:
    shape = _along_channels(x) if channels else None
    for function, p in ((torch.mul, weight), (torch.add, bias)):
        if p is not None:
            x = function(x, p if shape is None else p.reshape(shape))
    return x


def _along_channels(x: Tensor) -> tuple[int, ...]:
    return (1, -1, *[1] * (x.ndim - 2))


def softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    x = input if dtype is None else input.to(dtype)
    e = (x - x.detach().amax(dim, keepdim=True)).exp()
    return e / e.sum(dim, keepdim=True)


def logsumexp(input: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    largest = input.detach().amax(dim, keepdim=True)
    out = (input - largest).exp().sum(dim, keepdim=True).log() + largest
    return out if keepdim else out.squeeze(dim)


def log_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    x = input if dtype is None else input.to(dtype)
    return x - logsumexp(x, dim, keepdim=True)


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """``scaled_dot_product_attention`` by its definition."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    return F.dropout(attention_weights(query, key, attn_mask, scale), dropout_p, dropout_p > 0) @ value


def attention_weights(query: Tensor, key: Tensor, attn_mask: Tensor | None, scale: float | None) -> Tensor:
    """One for each pair of a query and a key; a query that may attend to nothing gets zeros."""
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if attn_mask is None:
        return softmax(scores, -1)
    if attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    else:
        scores = scores + attn_mask
    blind = (scores == -math.inf).all(-1, keepdim=True)
    return softmax(scores.masked_fill(blind, 0.0), -1).masked_fill(blind, 0.0)


def _dropout(draw: Callable[[Tensor, float, bool], Tensor]) -> Callable[..., Tensor]:
    """Dropout with one mask, drawn as torch draws it, for the value and all derivatives."""

    def dropout(input: Tensor, p: float = 0.5, train: bool = True) -> Tensor:
        return input * draw(torch.ones_like(input), p, True) if train else input

    return dropout


def norm(input: Tensor, p: Any = 2, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    x = input if dtype is None else input.to(dtype)
    if p not in (2, "fro", None) or dim is None:
        raise NotImplementedError(f"a norm of order {p} over {dim}")
    return x.square().sum(dim, keepdim=keepdim).sqrt()


def linalg_norm(A: Tensor, ord: Any = None, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    """``torch.linalg.norm``; the matrix norm of order 2, a singular value, has no formula here."""
    if isinstance(dim, tuple | list) and len(dim) > 1 and ord not in (None, "fro"):
        raise NotImplementedError(f"a matrix norm of order {ord}")
    return norm(A, ord, dim, keepdim, dtype)


def var(
    input: Tensor, dim: Any = None, unbiased: Any = True, keepdim: bool = False, *, correction: Any = None
) -> Tensor:
    if dim is None or isinstance(dim, bool):
        raise NotImplementedError("a variance over everything")
    correction = int(unbiased) if correction is None else correction
    square = (input - input.mean(dim, keepdim=True)).square()
    size = math.prod(input.shape[k] for k in ([dim] if isinstance(dim, int) else dim))
    return square.sum(dim, keepdim=keepdim) / (size - correction)


def prod(input: Tensor, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    if dim is None or dtype is not None:
        raise NotImplementedError("a product of everything")
    out = functools.reduce(torch.mul, input.unbind(dim))
    return out.unsqueeze(dim) if keepdim else out


def diff(input: Tensor, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Tensor:
    x = torch.cat([part for part in (prepend, input, append) if part is not None], dim)
    for _ in range(n):
        x = x.narrow(dim, 1, x.shape[dim] - 1) - x.narrow(dim, 0, x.shape[dim] - 1)
    return x


def glu(input: Tensor, dim: int = -1) -> Tensor:
    a, b = input.chunk(2, dim)
    return a * b.sigmoid()


def prelu(input: Tensor, weight: Tensor) -> Tensor:
    if weight.numel() > 1:
        weight = weight.reshape(_along_channels(input))
    return torch.where(input > 0, input, weight * input)


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


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
    index: Tensor, bag: Tensor, bags: int, dtype: torch.dtype, mode: str, per_sample: Any, frozen: int
) -> Tensor:
    """What each looked-up row counts for in its bag."""
    scale = (index != frozen).to(dtype)
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
    if mode == "max":
        chosen, is_empty = (x[:bags] for x in chosen_rows(weight, input, offsets, include_last_offset, padding_idx))
        return weight.gather(0, chosen).masked_fill(is_empty[:, None], 0)
    index, bag = flat_bags(input, offsets, bags, include_last_offset)
    frozen = -1 if padding_idx is None else padding_idx % len(weight)
    scale = weights_in_bags(index, bag, bags, weight.dtype, mode, per_sample_weights, frozen)
    return torch.zeros_like(like).index_add(0, bag, weight[index] * scale[:, None])


def bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Any = None) -> Tensor:
    return affine(torch.einsum("...i,oij,...j->...o", input1, weight, input2), None, bias)


NORMS: dict[Callable[..., Any], Callable[..., Any]] = {
    **dict.fromkeys((F.layer_norm, torch.layer_norm), layer_norm),
    **dict.fromkeys((F.rms_norm, torch.rms_norm), rms_norm),
    **dict.fromkeys((F.group_norm, torch.group_norm), group_norm),
    F.instance_norm: instance_norm,
    F.batch_norm: batch_norm,
    torch.batch_norm: weights_first(batch_norm),
}

FORMULAS: dict[Callable[..., Any], Callable[..., Any]] = {
    **NORMS,
    **dict.fromkeys((torch.softmax, Tensor.softmax), softmax),
    **dict.fromkeys((torch.log_softmax, Tensor.log_softmax), log_softmax),
    **dict.fromkeys((torch.logsumexp, Tensor.logsumexp), logsumexp),
    F.scaled_dot_product_attention: attention,
    torch.dropout: _dropout(torch.dropout),
    torch.feature_dropout: _dropout(torch.feature_dropout),
    **dict.fromkeys((torch.norm, Tensor.norm), norm),
    torch.linalg.vector_norm: lambda x, ord=2, *args, **kwargs: norm(x, ord, *args, **kwargs),
    torch.linalg.norm: linalg_norm,
    **dict.fromkeys((torch.var, Tensor.var), var),
    **dict.fromkeys((torch.std, Tensor.std), lambda *args, **kwargs: var(*args, **kwargs).sqrt()),
    **dict.fromkeys((torch.prod, Tensor.prod), prod),
    **dict.fromkeys((F.bilinear, torch.bilinear), bilinear),
    **dict.fromkeys((torch.diff, Tensor.diff), diff),
    **dict.fromkeys((F.glu, torch._C._nn.glu), glu),
    **dict.fromkeys((F.prelu, torch.prelu, Tensor.prelu), prelu),
    **dict.fromkeys(
        (torch.masked_fill, Tensor.masked_fill), lambda input, mask, value: torch.where(mask, value, input)
    ),
    Tensor.where: lambda input, condition, other: torch.where(condition, input, other),
    **dict.fromkeys(
        (torch.addmm, Tensor.addmm, torch.baddbmm, Tensor.baddbmm),
        lambda input, a, b, *, beta=1, alpha=1: beta * input + alpha * (a @ b),
    ),
}
