"""Diagonals of the curvature of each sample's own loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from curvature.functional import ExactNorms
from curvature.gradients import Batch, differences, either_form, over_samples, tried_by_vmap
from curvature.linalg import full_precision, without_autocast
from curvature.losses import Injection, Loss
from curvature.matrices.block_structure import require_injection, seed_of
from curvature.matrices.builders import EXACT, hessian
from curvature.matrices.passes import DataSource, RecordedBatch, zeros
from curvature.operators import Space
from curvature.recording import preserve_state
from curvature.terms import gradients

PRODUCT_ELEMENTS = 1 << 24  # entries of the rows of all samples' Hessians that are computed together


@either_form
def per_sample_fisher_diagonals(
    model: nn.Module,
    loss: Loss | None,
    x: Any,
    y: Any,
    inject: Injection = EXACT,
    *,
    parameters: Iterable[str] | None = None,
    sample_dim: int | tuple[int, int, int] = 0,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """Diagonal of the Fisher matrix of each sample's own loss, or of whatever else ``inject`` estimates.

    Args:
        model: as for `per_sample_gradients`.
        loss: as for `fisher_diagonal`.
        x: as for `per_sample_gradients`. A batch may be empty.
        y: as for `per_sample_gradients`.
        inject: as for `fisher_diagonal`.
        parameters: as for `per_sample_gradients`.
        sample_dim: as for `per_sample_gradients`.
        generator: as for `fisher_diagonal`.

    Returns:
        ``{name: (N, *parameter.shape)}`` in the order of ``named_parameters()``, in units of loss / parameter^2 and at
        least single precision. Row n is what `fisher_diagonal` gives for sample n alone; with a mean over one term per
        sample the rows average to that of the batch.

    Raises:
        ValueError, TypeError: as for `fisher_diagonal`.

    With `exact` it is the diagonal of the Gauss-Newton matrix for cross-entropy, mean squared error and binary
    cross-entropy with logits. One forward pass, and one backward pass for each vector of the injection.
    """
    source = DataSource(model, loss, (x, y), sample_dim, parameters=parameters)
    require_injection(inject)
    space = source.space
    drawn = torch.Generator(space.device).manual_seed(seed_of(generator))
    totals = zeros(space, 0)

    def visit(run: RecordedBatch) -> None:
        for name, rows in totals.items():
            totals[name] = rows.new_zeros(run.batch.count, *rows.shape[1:])
        for chunk in run.chunks(inject, drawn):
            with without_autocast(space.devices.values()):
                for name, total in totals.items():
                    lefts, rights = chunk.of(name) or ([], [])
                    for left, right in zip(lefts, rights, strict=True):
                        u = gradients(left)
                        total += u * (u if right is left else gradients(right))

    if source.batch(x, y).count:
        source.each(visit)
    return totals


@either_form
@full_precision()
def per_sample_hessian_diagonals(
    model: nn.Module,
    loss: Loss,
    x: Any,
    y: Any,
    *,
    parameters: Iterable[str] | None = None,
    sample_dim: int | tuple[int, int, int] = 0,
) -> dict[str, Tensor]:
    """Diagonal of the Hessian of each sample's own loss with respect to the parameters.

    Args and errors as for `per_sample_gradients`; a model that draws random numbers is refused, too.

    Returns:
        ``{name: (N, *parameter.shape)}`` in the order of ``named_parameters()``, in units of loss / parameter^2 and at
        least single precision.

    One product with every sample's Hessian for each entry of the parameters, by ``torch.func.vmap`` over samples;
    where that cannot follow the model, or is not what `hessian` gives for the last sample, sample by sample.
    """
    batch = Batch.of(model, loss, x, y, sample_dim, parameters)
    space = Space.of(batch.parameters)
    if not batch.count:
        return zeros(space, 0)

    def alone(n: int) -> dict[str, Tensor]:
        sample = batch.sample(n)
        of = hessian(batch.model, loss, (sample.x, sample.y), sample_dim=sample_dim, parameters=list(batch.parameters))
        return of.to_dict(of.diagonal())

    empty = batch.without_terms(range(batch.count))
    counted = [n for n in range(batch.count) if n not in empty]
    if not counted:
        return zeros(space, batch.count)
    last = alone(counted[-1])
    diagonals = None if batch.is_uneven else tried_by_vmap(lambda: _by_vmap(batch, space))
    if diagonals and not differences({name: rows[counted[-1]] for name, rows in diagonals.items()}, last):
        left = torch.tensor(empty, dtype=torch.long, device="cpu")
        return {name: rows.index_fill(0, left.to(rows.device), 0) for name, rows in diagonals.items()}
    diagonals = zeros(space, batch.count)
    for n in counted:
        for name, diagonal in (last if n == counted[-1] else alone(n)).items():
            diagonals[name][n] = diagonal
    return diagonals


def _by_vmap(batch: Batch, space: Space) -> dict[str, Tensor]:
    dtypes = {name: p.dtype for name, p in batch.parameters.items()}
    values = space.flatten({name: p.detach() for name, p in batch.parameters.items()})
    count = max(1, min(batch.count, PRODUCT_ELEMENTS // space.size))
    size = max(1, PRODUCT_ELEMENTS // (space.size * count))

    def diagonal_of(loss: Callable[[dict[str, Tensor], Any, Any], Tensor]) -> Callable[..., Tensor]:
        def diagonal(flat: Tensor, x: Any, y: Any) -> Tensor:
            def value(flat: Tensor) -> Tensor:
                return loss({name: part.to(dtypes[name]) for name, part in space.split(flat).items()}, x, y)

            products = vjp(grad(value), flat)[1]
            numbers = torch.arange(space.size, device=flat.device)

            def entry(number: Tensor) -> Tensor:
                return torch.where(numbers == number, products((numbers == number).to(flat.dtype))[0], 0).sum()

            return vmap(entry, chunk_size=size)(numbers)

        return diagonal

    with preserve_state(batch.model), sdpa_kernel(SDPBackend.MATH), ExactNorms():
        return space.split(over_samples(batch, diagonal_of, values, count).detach())
