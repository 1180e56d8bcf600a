"""The largest eigenvalues of a symmetric matrix from products alone.

Block Lanczos with full reorthogonalization (Golub and Van Loan, Matrix Computations, chapter 10). A block of k columns
finds eigenvalues of a multiplicity up to k. A residual ``||M u - theta u||`` bounds the distance from theta to an
eigenvalue.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from curvature.linalg.decompositions import qr, symmetric_eigh


def largest_eigenpairs(
    product: Callable[[Tensor], Tensor], starts: Tensor, rtol: float | None = None, max_products: int | None = None
) -> tuple[Tensor, Tensor]:
    """The k largest eigenvalues, ascending, and eigenvectors (P, k), from random columns (P, k)."""
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
        scale = torch.linalg.matrix_norm(core, 2).clamp(min=torch.finfo(core.dtype).tiny)
        residual = ((image @ rotation - values * vectors) / scale).norm(dim=0).max()  # squares may underflow
        if residual <= rtol or basis.shape[1] == size:
            return values, vectors
        if basis.shape[1] >= most:
            raise RuntimeError(
                f"lanczos reached a relative residual of {float(residual):.3g}, not {rtol:.3g}, with {basis.shape[1]} "
                "products: allow more by lanczos_eigenvalues(..., max_products=), or a larger rtol"
            )
        block = _next_block(basis, image[:, -block.shape[1] :])


def _next_block(basis: Tensor, image: Tensor) -> Tensor:
    """Orthonormal columns that span the part of `image` outside the basis; if there is none, rounding supplies some."""
    width = min(image.shape[1], len(basis) - basis.shape[1])
    for _ in range(2):
        for _ in range(2):  # rounding leaves a rest after the first time
            image = image - basis @ (basis.mT @ image)
        image = qr(image)[0][:, :width]
    return image
