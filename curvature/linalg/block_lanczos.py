"""The largest eigenvalues of a symmetric matrix from products alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from curvature.linalg.decompositions import qr, symmetric_eigh


def largest_eigenpairs(
    product: Callable[[Tensor], Tensor], starts: Tensor, rtol: float | None = None, max_products: int | None = None
) -> tuple[Tensor, Tensor]:
    """As many of the largest eigenvalues as there are starts, ascending, (k,), and eigenvectors as columns (P, k).

    Block Lanczos with full reorthogonalization (Golub and Van Loan, Matrix Computations, chapter 10); multiple
    eigenvalues come with their multiplicity. It stops when each residual ``||M u - theta u||`` is small; the residual
    bounds the distance from theta to an eigenvalue.

    Args:
        product: columns (P, c) to columns (P, c).
        starts: random columns, (P, k).
        rtol: allowed residual relative to the largest absolute eigenvalue found; by default sqrt(eps).
        max_products: maximum number of products, each of which stores two vectors; by default the larger of 300 and
            20 k.

    Raises:
        RuntimeError: no convergence within ``max_products``.
    """
    size, k = starts.shape
    rtol = torch.finfo(starts.dtype).eps ** 0.5 if rtol is None else rtol
    most = min(size, max(300, 20 * k) if max_products is None else max_products)
    block = qr(starts)[0]
    basis = image = block[:, :0]
    core = basis.mT @ image
    while True:
        basis, image = torch.cat([basis, block], 1), torch.cat([image, product(block)], 1)
        border = basis.mT @ image[:, -block.shape[1] :]
        core = torch.cat([torch.cat([core, border[: len(core)].mT]), border], 1)
        values, rotation = symmetric_eigh(core)
        values, rotation = values[-k:], rotation[:, -k:]
        vectors = basis @ rotation
        residual = ((image @ rotation - values * vectors) / _scale(core)).norm(dim=0).max()  # squares may underflow
        if residual <= rtol or basis.shape[1] == size:
            return values, vectors
        if basis.shape[1] >= most:
            raise RuntimeError(
                f"lanczos reached a relative residual of {float(residual):.3g}, not {rtol:.3g}, with {basis.shape[1]} "
                "products: allow more by lanczos_eigenvalues(..., max_products=), or a larger rtol"
            )
        block = _next_block(basis, image[:, -block.shape[1] :])


def _scale(core: Tensor) -> Tensor:
    """The largest absolute eigenvalue, clamped so that dividing by it is finite."""
    return torch.linalg.matrix_norm(core, 2).clamp(min=torch.finfo(core.dtype).tiny)


def _orthogonalize(columns: Tensor, basis: Tensor) -> Tensor:
    """Remove the span of the basis from the columns; twice, since rounding leaves a rest after the first time."""
    for _ in range(2):
        columns = columns - basis @ (basis.mT @ columns)
    return columns


def _next_block(basis: Tensor, image: Tensor) -> Tensor:
    """Orthonormal columns that span the part of `image` outside the basis; if there is none, rounding supplies some."""
    width = min(image.shape[1], len(basis) - basis.shape[1])
    for _ in range(2):
        image = qr(_orthogonalize(image, basis))[0][:, :width]
    return image
