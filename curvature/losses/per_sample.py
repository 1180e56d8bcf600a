"""Per-sample losses: the loss of every sample alone, and the mass of each sample in the loss of a batch."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from curvature.losses.table import TORCH_LOSSES, Loss, name_of, reduction_of, resolve

log = logging.getLogger("curvature")


def per_sample_losses(
    loss: Loss, output: Tensor, target: Any, count: int, output_dim: int = 0, target_dim: int = 0
) -> Tensor:
    """The loss of every sample alone (N,): l_n is ``loss`` called on a batch of that one sample.

    Differentiable in ``output``. If all of a sample is ignored, nan with gradient zero, as torch's mean. The output has
    N = ``count`` samples along ``output_dim``, or m consecutive rows for each; so has every tensor of the target (which
    may be None, or a tuple, list or dict) along ``target_dim``, with its own m. Of a callable only the arguments are
    split into samples; ``weight`` and ``pos_weight`` of a torch loss are split with the output.
    """
    loss, mean, output_dim = _checked(loss, output, target, count, output_dim, target_dim)
    row = TORCH_LOSSES.get(type(loss))
    if row is not None and isinstance(target, Tensor) and row.broadcasts and count > 1:
        own_target_dim = target_dim % target.ndim
        if output.ndim - output_dim != target.ndim - own_target_dim:
            raise ValueError(
                f"{name_of(loss)} compares output {tuple(output.shape)} and target {tuple(target.shape)} entry by "
                f"entry, which mixes the samples in their dims {output_dim} and {own_target_dim}: give both the same "
                "shape"
            )
    dim = dim_of_terms(loss, output, target, output_dim, target_dim)
    if row is None or dim is None:
        return _sample_by_sample(loss, output, target, count, output_dim, target_dim)

    terms = row.terms(loss, output, target)
    sums = _sum_by_sample(terms, count, dim)
    if not mean:
        return sums
    masses = row.masses(loss, target) if row.masses else None
    return sums / (terms.numel() // count if masses is None else _sum_by_sample(masses, count, dim))


def sample_masses(
    loss: Loss, output: Tensor, target: Any, count: int, output_dim: int = 0, target_dim: int = 0
) -> Tensor:
    """The masses m_n of the samples in the loss of a batch, which is ``sum_n m_n l_n / sum_n m_n`` for a mean.

    m_n is the number of terms of sample n or, with class indices, the total weight of its classes that are not ignored;
    without a target, all count. It is 1 if the loss is a sum (that of the batch is then ``sum_n m_n l_n``), or averages
    over samples ("batchmean"). Those of a callable have to be found (`masses`). Shape (N,), at least float32.
    """
    loss, mean, output_dim = _checked(loss, output, target, count, output_dim, target_dim)
    ones = torch.ones(count, dtype=torch.promote_types(output.dtype, torch.float32), device=output.device)
    row = TORCH_LOSSES.get(type(loss))
    if row is None or not mean or getattr(loss, "reduction", "mean") == "batchmean":
        return ones
    masses = row.masses(loss, target) if row.masses and isinstance(target, Tensor) else None
    if masses is not None:
        return _sum_by_sample(masses.to(ones), count, target_dim % target.ndim)
    if row.classes is not None and output_dim == row.classes % output.ndim:
        return ones
    return ones * (math.prod(row.shape_of_terms(output)) // count)


def dim_of_terms(loss: Loss, output: Tensor, target: Any, output_dim: int = 0, target_dim: int = 0) -> int | None:
    """The samples' dim of the terms, where torch makes the batch's loss of the same as each sample's; else try it."""
    row = TORCH_LOSSES.get(type(loss))
    # batchmean divides by the size of dim 0, not by a number of terms
    if row is None or not isinstance(target, Tensor) or getattr(loss, "reduction", "mean") == "batchmean":
        return None
    dim = output_dim = output_dim % output.ndim
    target_dim %= target.ndim
    if row.heads and dim == 1:
        return None
    if row.classes is not None:
        classes = row.classes % output.ndim
        if dim == classes:
            return None
        dim -= dim > classes
    if target.shape == output.shape and target_dim == output_dim and not row.heads:
        return dim
    return dim if list(target.shape) == row.shape_of_terms(output) and target_dim == dim else None


def is_entrywise(loss: Loss) -> bool:
    """Whether a torch loss treats all entries of output and target alike, so that their axes may be permuted."""
    row = TORCH_LOSSES.get(type(resolve(loss)))
    plain = getattr(loss, "weight", None) is getattr(loss, "pos_weight", None) is None
    return row is not None and row.classes is None and not row.heads and plain


def _sample_by_sample(loss: Loss, output: Tensor, target: Any, count: int, output_dim: int, target_dim: int) -> Tensor:
    """Run any callable on every sample alone, by ``vmap`` or, if that fails, in a loop."""
    leaves: list[Tensor] = []
    map_target(leaves.append, target)
    tensors = [output, *leaves]
    dims = [output_dim, *(target_dim % leaf.ndim for leaf in leaves)]

    def alone(piece: Tensor, *pieces: Tensor) -> Tensor:
        rest = iter(pieces)
        value = loss(piece, map_target(lambda _: next(rest), target))
        return require_scalar(loss, value, "a batch of one sample").to(piece.device)  # it may be where the target is

    cut = [t.unflatten(dim, (count, -1)) for t, dim in zip(tensors, dims, strict=True)]
    # clones, because a loss may work in place
    try:
        batched = [t.clone() for t in cut]
        values: Tensor = torch.func.vmap(alone, in_dims=tuple(dims), randomness="error")(*batched)
        return values
    except Exception as error:  # anything that vmap does not support; an error of the loss itself recurs below
        _log_loop(name_of(loss), str(error))
    samples = zip(*(t.unbind(dim) for t, dim in zip(cut, dims, strict=True)), strict=True)
    try:
        return torch.stack([alone(*(t.clone() for t in sample)) for sample in samples])
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        try:
            require_scalar(loss, loss(output.detach().clone(), target), "the batch")
        except Exception:
            raise error from None  # it takes neither
        raise ValueError(
            f"{name_of(loss)}: it takes the batch, but not one of its samples as a batch of one: {error}. If it "
            "squeezes all axes of size one, squeeze(-1) leaves that of the samples alone"
        ) from error


def require_scalar(loss: Loss, value: Any, what: str) -> Tensor:
    if not isinstance(value, Tensor) or value.ndim:
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{name_of(loss)} must return a scalar tensor for {what}, got {found}")
    return value


@cache
def _log_loop(name: str, why: str) -> None:
    log.info("%s: one sample after the other, because vmap cannot: %s", name, why)


def map_target(function: Callable[[Tensor], Any], target: Any) -> Any:
    """Apply ``function`` to the tensors of a target, in order, and rebuild its containers."""
    if target is None:
        return None
    if isinstance(target, Tensor):
        return function(target)
    if isinstance(target, dict):
        return {key: map_target(function, value) for key, value in target.items()}
    if isinstance(target, tuple | list):
        parts = [map_target(function, value) for value in target]
        if isinstance(target, list):
            return parts
        return type(target)(*parts) if hasattr(target, "_fields") else tuple(parts)
    raise ValueError(f"a target must be a tensor, None, a tuple, list or dict of these, got {type(target).__name__}")


def _checked(
    loss: Loss, output: Tensor, target: Any, count: int, output_dim: int, target_dim: int
) -> tuple[Loss, bool, int]:
    """The resolved loss, whether it is a mean, and the samples' dim of the output counted from the front.

    Every tensor must have N samples of at least one row each.
    """
    loss = resolve(loss)
    mean = reduction_of(loss) == "mean"
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    tensors = [("output", output, output_dim)]
    map_target(lambda t: tensors.append(("target", t, target_dim)), target)
    for what, tensor, dim in tensors:
        if not -tensor.ndim <= dim < tensor.ndim:
            raise ValueError(f"{what} of shape {tuple(tensor.shape)} has no dim {dim} to hold the {count} samples")
        size = tensor.shape[dim]
        if size == 0 or size % count:
            raise ValueError(f"{what} has size {size} along dim {dim}, which is not a multiple of the {count} samples")
    return loss, mean, output_dim % output.ndim


def _sum_by_sample(tensor: Tensor, count: int, dim: int) -> Tensor:
    """Sum (.., N*m, ..) to (N,)."""
    if tensor.shape == (count,):
        return tensor
    return tensor.movedim(dim, 0).reshape(count, -1).sum(1)
