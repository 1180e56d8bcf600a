"""The exact general path: per-sample gradients of any model, one sample at a time by definition.

``torch.func.vmap`` of the gradient over samples; where vmap cannot follow the model, a loop of batch size one.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from curvature.gradients.batch import Batch
from curvature.recording import call, logits, map_tensors

log = logging.getLogger("curvature")
CHUNK = 1 << 27  # elements of the per-sample gradients above which vmap works on part of the batch at a time


def by_vmap(batch: Batch, names: set[str]) -> dict[str, Tensor]:
    """(N, *shape) for each name.

    Raises:
        Exception: whatever vmap raises where an operation of the model has no batched form.
    """
    parameters = batch.parameters
    wanted = {k: p.detach() for k, p in parameters.items() if k in names}
    n, dims = batch.count, batch.dims
    batched = map_tensors(lambda t: t.ndim > dims[0] and t.shape[dims[0]] == n, batch.x)
    in_x = _flags(batched, dims[0])
    y = map_tensors(lambda t: t.unflatten(dims[2], (n, -1)), batch.y)
    in_y = map_tensors(lambda t: dims[2], y) if y is not None else None

    def loss(values: dict[str, Tensor], x: Any, y: Any) -> Tensor:
        x = _restored(x, batched, dims[0])

        def run(*args: Any, **kwargs: Any) -> Any:
            return functional_call(batch.model, values, args, kwargs)

        return batch.loss(logits(call(run, x)), y)

    chunk = max(1, CHUNK // max(1, sum(p.numel() for p in wanted.values())))
    found = vmap(grad(loss), (None, in_x, in_y), randomness="different", chunk_size=chunk)(wanted, batch.x, y)
    return {k: g.detach() for k, g in found.items()}


def _flags(batched: Any, dim: int) -> Any:
    """`in_dims` of vmap from a tree of booleans."""
    if isinstance(batched, dict):
        return {k: _flags(v, dim) for k, v in batched.items()}
    if isinstance(batched, tuple):
        return tuple(_flags(v, dim) for v in batched)
    return dim if batched is True else None


def _restored(x: Any, batched: Any, dim: int) -> Any:
    """Give every sample its axis of size one back."""
    if isinstance(batched, dict):
        return {k: _restored(x[k], v, dim) for k, v in batched.items()}
    if isinstance(batched, tuple):
        return tuple(_restored(v, flag, dim) for v, flag in zip(x, batched, strict=True))
    return x.unsqueeze(dim) if batched is True and isinstance(x, Tensor) else x


def by_loop(batch: Batch, names: set[str]) -> dict[str, Tensor]:
    """(N, *shape) for each name, by N forward and backward passes of one sample."""
    rows = []
    for n in range(batch.count):
        try:
            found = batch.alone(n).gradients()
        except Exception as error:
            raise RuntimeError(
                f"{', '.join(sorted(names))}: no per-sample rule, and sample {n} alone does not run: {error}"
            ) from error
        rows.append({k: found[k] for k in names})
    return {k: torch.stack([row[k] for row in rows]) for k in names}


def general_gradients(batch: Batch, names: set[str], loop: bool) -> tuple[dict[str, Tensor], bool]:
    """By vmap, or by the loop where asked for or where vmap fails; and whether it was the loop."""
    if not loop:
        try:
            return by_vmap(batch, names), False
        except Exception as error:
            log.info("vmap cannot follow the model (%s); looping over the samples", str(error).split("\n")[0])
    return by_loop(batch, names), True
