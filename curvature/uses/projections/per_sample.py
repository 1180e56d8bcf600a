"""Projected gradients of the samples of one batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from curvature.gradients import Batch, either_form, sample_terms
from curvature.losses import Loss
from curvature.uses.projections.projection import Projection


@either_form
def per_sample_projections(
    model: nn.Module,
    loss: Loss,
    x: Any,
    y: Any,
    projection: Projection,
    *,
    parameters: Iterable[str] | None = None,
    sample_dim: int | tuple[int, int, int] = 0,
) -> Tensor:
    """The projection (N, K) of the gradient of each sample's own loss.

    It is ``projection(per_sample_gradients(model, loss, x, y, parameters=parameters))``, without the gradients: a
    sample has the same projection in every batch and in every call with the same seed, unless the forward pass draws
    random numbers (dropout in training mode).

    Args:
        projection: `SignProjection(k)`, `NormalProjection(k)` or `KroneckerProjection(side)`.

    The other arguments are those of `per_sample_gradients`. A batch may be empty.

    Raises:
        TypeError: ``projection`` is none of these.
        ValueError, TypeError: as for `per_sample_gradients`; BatchNorm in training mode is refused by name.

    Beside what a forward and a backward pass take, memory is about ten megabytes, K numbers for each sample, and the
    gradients of parameters that no layer rule explains, N at once. Time: a `KroneckerProjection` takes less than a
    backward pass if its side is small beside the layers, a dense projection N * K products for each parameter.
    """
    require_projection(projection)
    return projection.of_terms(sample_terms(Batch.of(model, loss, x, y, sample_dim, parameters)))


def require_projection(projection: Projection) -> None:
    """Refuse what is no projection.

    Raises:
        TypeError: it says so.
    """
    if not isinstance(projection, Projection):
        raise TypeError(
            f"projection: expected a SignProjection, NormalProjection or KroneckerProjection, "
            f"found a {type(projection).__name__}"
        )
