"""Decompositions that do not give up at the first failure."""

from __future__ import annotations

import torch
from torch import Tensor


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (clamped at zero) and eigenvectors of positive semi-definite matrices (..., d, d).

    Tries the matrix as it is, then in float64, then with growing jitter on the diagonal.

    Raises:
        torch.linalg.LinAlgError: nothing of that succeeded.
    """
    symmetric = (matrix + matrix.mT) / 2
    wide = symmetric if symmetric.dtype in (torch.float32, torch.float64) else symmetric.float()
    eye = torch.eye(wide.shape[-1], dtype=torch.float64, device=wide.device)
    mean = wide.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].double()
    for jitter in (None, 0.0, 1e-10, 1e-8, 1e-6, 1e-4):
        try:
            tried = wide if jitter is None else wide.double() + jitter * mean * eye
            values, vectors = torch.linalg.eigh(tried)
            return values.clamp(min=0).to(matrix.dtype), vectors.to(matrix.dtype)
        except torch.linalg.LinAlgError:
            continue
    raise torch.linalg.LinAlgError(
        f"eigendecomposition of a {tuple(matrix.shape)} matrix failed, also in float64 with jitter"
    )
