"""Decompositions that do not give up at the first failure, and the one rule of what counts as positive definite."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Eigenvalues of singular matrices come out at up to about 4 eps times the largest, at any size that we tried.
ROUNDING = 10.0


class NotDefinite(ValueError):
    """A matrix that should be positive definite is not, to working precision.

    Args:
        what: the matrix.
        values: its eigenvalues, or the least one.
        rounding: how uncertain they are.
        damping: what was added to them in vain.
    """

    def __init__(self, what: str, values: Tensor, rounding: Tensor, damping: float) -> None:
        indefinite = bool((values + damping < -rounding).any())
        state = "indefinite" if indefinite else "singular to working precision"
        with_damping = f" with damping {damping:.3g}" if damping else ""
        needed = 2 * float((rounding - values).max().clamp(min=0))
        super().__init__(
            f"{what} is {state}{with_damping}: its least eigenvalue is {float(values.min()):.3g} without damping. "
            f"Use a damping above {needed:.3g}"
        )


def symmetric_eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues, ascending, and eigenvectors (columns) of symmetric matrices (..., d, d).

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
            return values.to(matrix.dtype), vectors.to(matrix.dtype)
        except torch.linalg.LinAlgError:
            continue
    raise torch.linalg.LinAlgError(
        f"eigendecomposition of a {tuple(matrix.shape)} matrix failed, also in float64 with jitter"
    )


def eigh(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Like `symmetric_eigh` for positive semi-definite matrices: the eigenvalues are clamped at zero."""
    values, vectors = symmetric_eigh(matrix)
    return values.clamp(min=0), vectors


def cholesky_root(matrix: Tensor) -> Tensor | None:
    """Lower triangular roots of symmetric matrices (g, d, d); None where one of them is not positive definite."""
    root, failed = torch.linalg.cholesky_ex(matrix)
    return None if bool(failed.any()) else root


def inverse(matrix: Tensor) -> Tensor:
    """Inverse of symmetric positive definite matrices (g, d, d), by Cholesky; by eigenvalues where that fails."""
    root = cholesky_root(matrix)
    if root is None:
        values, vectors = eigh(matrix)
        largest = values.amax(-1, keepdim=True)
        floor = rounding_of(largest).clamp(min=torch.finfo(values.dtype).tiny)
        return (vectors / torch.maximum(values, floor)[:, None, :]) @ vectors.mT
    return torch.cholesky_inverse(root)


def rounding_of(largest: Tensor) -> Tensor:
    """How far rounding moves the eigenvalues of symmetric matrices whose largest (in size) are given."""
    return ROUNDING * torch.finfo(largest.dtype).eps * largest


def damped_values(values: Tensor, rounding: Tensor, damping: float, what: str) -> Tensor:
    """Eigenvalues plus damping, all positive; what is negative by rounding alone counts as zero.

    An eigenvalue within `rounding` of zero is not told from zero. Then the damping must stand out against rounding.

    Args:
        values: eigenvalues, of any shape.
        rounding: their uncertainty, broadcast to `values`; zero where they are exact.
        damping: in the units of `values`.
        what: the name of the matrix in the error.

    Raises:
        NotDefinite: the damped matrix is singular or indefinite to working precision.
    """
    unsure = values.abs() <= rounding
    trusted = torch.where(unsure, torch.zeros_like(values), values)
    if not (trusted + damping > rounding / ROUNDING).all():
        raise NotDefinite(what, values, rounding, damping)
    return torch.where(unsure, values.clamp(min=0), values) + damping


def cholesky(matrix: Tensor, damping: float, what: str) -> Tensor:
    """Lower triangular L with ``L L^T = matrix + damping I``, for a symmetric (d, d) matrix.

    Cholesky's algorithm often succeeds on a singular matrix by rounding, and solves with it return noise. So the
    condition is estimated by a few steps of inverse iteration, and `damped_values` decides.

    Raises:
        NotDefinite: not positive definite to working precision.
    """
    damped = matrix.clone()
    damped.diagonal().add_(damping)
    root, failed = torch.linalg.cholesky_ex(damped)
    if int(failed):
        values = torch.linalg.eigvalsh(matrix)
        raise NotDefinite(what, values, rounding_of(values.abs().max()), damping)
    least, largest = _extremes(damped, root)
    damped_values(least - damping, rounding_of(largest), damping, what)
    return root


def _extremes(matrix: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """Estimates, good to a small factor, of the least and the largest eigenvalue, given the Cholesky root."""
    generator = torch.Generator(matrix.device).manual_seed(0)
    start = torch.randn(len(matrix), 2, dtype=matrix.dtype, device=matrix.device, generator=generator)
    small = large = start
    for _ in range(4):
        small = torch.cholesky_solve(small / small.norm(dim=0), root)
        large = matrix @ (large / large.norm(dim=0))
    return 1 / small.norm(dim=0).max(), large.norm(dim=0).max()


def symmetrised(matrix: Tensor, what: str) -> Tensor:
    """``(M + M^T) / 2`` of matrices (..., d, d) that are symmetric up to rounding.

    Raises:
        ValueError: some entry differs from its mirror image by more than sqrt(eps) times the largest entry.
    """
    if _is_symmetric(matrix):
        return matrix
    allowed = torch.finfo(matrix.dtype).eps ** 0.5 * matrix.abs().amax((-2, -1), keepdim=True)
    difference = (matrix - matrix.mT).abs()
    if not (difference <= allowed).all():
        raise ValueError(f"{what} is not symmetric: an entry and its mirror image differ by {difference.max():.3g}")
    return (matrix + matrix.mT) / 2 if difference.any() else matrix


def _is_symmetric(matrix: Tensor) -> bool:
    """Whether products with it and with its transpose agree to rounding: much quicker than to compare the entries."""
    size = matrix.shape[-1]
    generator = torch.Generator(matrix.device).manual_seed(0)
    probe = torch.randn(size, 1, dtype=matrix.dtype, device=matrix.device, generator=generator)
    difference = (matmul(matrix, probe) - matmul(matrix.mT, probe)).abs().amax((-2, -1))
    largest = torch.maximum(matrix.amax((-2, -1)), -matrix.amin((-2, -1)))
    return bool((difference <= 10 * torch.finfo(matrix.dtype).eps * size**0.5 * largest).all())


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` in their own precision, also under autocast."""
    with torch.autocast(left.device.type, enabled=False):
        return left @ right


def finite(number: float) -> float:
    """The number as a float.

    Raises:
        ValueError: infinite or not a number.
    """
    if not math.isfinite(number):
        raise ValueError(f"a matrix times or plus {number} is not a matrix")
    return float(number)
