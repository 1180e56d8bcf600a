"""Sizes up to which matrices are built unasked, and what is said above them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from curvature.operators.space import Space

DENSE_LIMIT = 30_000  # most rows of a matrix that is built implicitly
MAX_DIRECT_SIZE = 2000  # most rows of a matrix that is built and decomposed where products would do


def require_dense_size(space: Space) -> None:
    """
    Raises:
        ValueError: a matrix over this space has more than `DENSE_LIMIT` rows.
    """
    rows = space.size
    if rows > DENSE_LIMIT:
        gigabytes = rows**2 * space.dtype.itemsize / 1e9
        raise ValueError(
            f"this needs a dense {rows} x {rows} matrix ({gigabytes:.0f} GB), over the limit of {DENSE_LIMIT}. "
            "These need products only: conjugate_gradient, eigenvalues(k), hutchpp_trace, xtrace, xdiag, "
            "lanczos_eigenvalues, lanczos_logdet, spectral_density"
        )


def require_held_size(
    names: Sequence[str], what: str, rows: int, dtype: torch.dtype, structures: Sequence[str]
) -> None:
    """
    Args:
        names: of a layer's parameters.
        what: is held of them, with this number of rows.
        structures: to choose instead, the last to hold it all the same.

    Raises:
        ValueError: there are more than `DENSE_LIMIT` rows.
    """
    if rows > DENSE_LIMIT:
        layer = names[0].rpartition(".")[0] or names[0]
        gigabytes = rows**2 * dtype.itemsize / 1e9
        raise ValueError(
            f"{layer}: {what} would have {rows} x {rows} entries ({gigabytes:.0f} GB), over the limit of {DENSE_LIMIT} "
            f"rows; choose structure={{{layer!r}: {structures[0]!r}}}"
            + "".join(f" or {other!r}" for other in structures[1:-1])
            + f", or {structures[-1]!r} to build it all the same"
        )


def warn_of_products(space: Space) -> None:
    """Warn that a large matrix is built column by column."""
    if space.size > MAX_DIRECT_SIZE:
        warnings.warn(
            f"this takes {space.size} products with the matrix, one for each row. Estimates take some tens: "
            "hutchpp_trace or xtrace for the trace, xdiag for the diagonal, eigenvalues(k), lanczos_logdet",
            stacklevel=4,
        )


def warn_of_decomposition(space: Space) -> None:
    """Warn that all eigenvalues of a large matrix are asked for."""
    rows = space.size
    if rows > MAX_DIRECT_SIZE:
        gigabytes = rows**2 * space.dtype.itemsize / 1e9
        warnings.warn(
            f"this decomposes a {rows} x {rows} matrix ({gigabytes:.1f} GB, some {rows**3:.0e} operations). From some "
            "tens of products, eigenvalues(k) gives the k largest, and spectral_density the density of all",
            stacklevel=4,
        )
