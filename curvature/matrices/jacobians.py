"""The Jacobian of every output entry, sample by sample."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from curvature.matrices.passes import DataSource, RecordedBatch
from curvature.terms import gradients


def per_sample_jacobians(
    model: nn.Module,
    x: Any,
    *,
    parameters: Iterable[str] | None = None,
    sample_dim: int | tuple[int, int, int] = 0,
) -> dict[str, Tensor]:
    """Derivatives of every entry of each sample's output with respect to every parameter.

    Args:
        model: any module with one tensor as output; its parameters that do not require a gradient are left out.
        x: a tensor, a tuple of positional or a dict of keyword arguments, as for `per_sample_gradients`.
        parameters, sample_dim: likewise.

    Returns:
        ``{name: (N, *shape, *parameter.shape)}`` for outputs whose samples have this shape, in the order of
        ``named_parameters()``, in units of output / parameter and at least single precision. All of it is in memory:
        for products with it take `gauss_newton` or `output_changes`.

    Raises:
        ValueError: samples are not independent (BatchNorm in training mode, named), there are none, or nothing requires
            a gradient.
        TypeError: an argument or an output of the wrong kind.

    One forward pass, and one vector for each entry of a sample's output sent back through all samples at once.
    """
    found: dict[str, Tensor] = {}
    DataSource(model, None, (x, None), sample_dim, parameters=parameters).each(lambda run: found.update(_rows(run)))
    return found


def _rows(run: RecordedBatch) -> dict[str, Tensor]:
    count, axis = run.batch.count, run.batch.dims[1]
    shape = run.output.movedim(axis, 0).shape[1:]
    size = run.output.numel() // count
    eye = torch.eye(size, dtype=run.output.dtype, device=run.output.device)
    found = {
        name: torch.zeros(count, size, *p.shape, dtype=run.dtype, device=p.device)
        for name, p in run.batch.parameters.items()
    }
    for start in range(0, size, run.cached_size):
        part = eye[start : start + run.cached_size]
        vectors = part.reshape(-1, 1, *shape).expand(-1, count, *shape).movedim(1, axis + 1)
        for row, terms in enumerate(run.terms(vectors), start):
            for name, parts in terms.items():
                found[name][:, row] = gradients(parts)
    return {name: rows.unflatten(1, shape) if shape else rows[:, 0] for name, rows in found.items()}
