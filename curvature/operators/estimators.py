"""Traces and diagonals from products with random vectors.

``k`` is always the number of products with the matrix. Every method stores vectors (P, k).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from curvature.arguments import check_whole
from curvature.linalg import qr
from curvature.operators.base import Operator


class Estimate(NamedTuple):
    """A random estimate.

    Attributes:
        value: unbiased unless the function says otherwise.
        error: the standard error of the value, in the same shape, estimated from the spread of the samples.
    """

    value: Tensor
    error: Tensor


def mean_estimate(samples: Tensor) -> Estimate:
    """The mean over the first dimension and its standard error; zero of one sample, which is exact."""
    spread = samples.std(0) if len(samples) > 1 else torch.zeros_like(samples[0])
    return Estimate(samples.mean(0), spread / math.sqrt(len(samples)))


def products_per_part(k: int, parts: int, function: Callable[..., object]) -> int:
    """Split k products into equal parts; ValueError for less than two each, too few to estimate an error."""
    check_whole("k", k)
    if k < 2 * parts:
        raise ValueError(f"{function.__name__} needs at least {2 * parts} products, found k={k}")
    return k // parts


def xtrace(op: Operator, k: int, generator: torch.Generator | None = None) -> Estimate:
    """XTrace: each vector samples the complement of the range that all others span (arXiv:2301.07825).

    Normal vectors, scaled by their norm on the complement, make the estimate unbiased. Exact for rank less than
    ``k / 2``. The samples are not independent, so the standard error is too
    small, by at most a third in our tests.

    Args:
        op: any symmetric matrix.
        k: number of products, at least 4; more than 2 P are not used.
        generator: by default a new one with seed 0, so that calls repeat; the global random state is untouched.

    Raises:
        ValueError: k is too small.
    """
    size = op.space.size
    half = min(products_per_part(k, 2, xtrace), size)
    z = op.space.normal(half, generator)
    image, basis, leaves, image_of_basis = _leave_one_out(op, z)
    core = basis.mT @ image_of_basis
    # x[k] is z[k] without the range of the other images, and y[k] = M x[k]
    inside = basis.mT @ z
    inside = inside - leaves * (leaves * inside).sum(0)
    x, y = z - basis @ inside, image - image_of_basis @ inside
    norms = x.square().sum(0)
    rest = (size - half + 1) * (x * y).sum(0) / norms.clamp(min=torch.finfo(norms.dtype).tiny)
    return mean_estimate(core.trace() - (leaves * (core @ leaves)).sum(0) + rest)


def xdiag(op: Operator, k: int, generator: torch.Generator | None = None) -> Estimate:
    """XDiag, the counterpart of `xtrace` for the diagonal (arXiv:2301.07825).

    Exact for rank less than ``k / 2``. The samples are not independent, so the standard error is too small: by at most
    a third in most of our tests; for diagonal matrices, which are the worst case, by a half with six products.

    Args:
        op: any symmetric matrix.
        k: number of products, at least 6; with 2 P and more the matrix is multiplied by P unit vectors instead.
        generator: as for `xtrace`.

    Returns:
        The estimate with value and error of shape (P,).

    Raises:
        ValueError: k is too small.
    """
    check_whole("k", k)
    if k < 6:  # both samples of two vectors have the same error if the matrix is diagonal
        raise ValueError(f"xdiag needs at least 6 products, found k={k}")
    if k >= 2 * op.space.size:
        units = torch.eye(op.space.size, dtype=op.space.dtype, device=op.space.device)
        return mean_estimate((op @ units).diagonal()[None])
    z = op.space.signs(k // 2, generator)
    image, basis, leaves, image_of_basis = _leave_one_out(op, z)
    inside = basis.mT @ image
    inside = inside - leaves * (leaves * inside).sum(0)
    full = (basis * image_of_basis).sum(1)
    samples = full[:, None] - (basis @ leaves) * (image_of_basis @ leaves) + z * (image - basis @ inside)
    return mean_estimate(samples.T)


def _leave_one_out(op: Operator, z: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """M z, its orthonormal basis Q (P, k), unit s_k so that all columns but k span ``Q (I - s_k s_k^T)``, and M Q."""
    image = op @ z
    basis, root = qr(image)  # of dependent columns R is singular, and any direction of Q from rounding serves as s_k
    diagonal = root.diagonal()
    floor = (torch.finfo(root.dtype).eps * diagonal.abs().max()).clamp(min=math.sqrt(torch.finfo(root.dtype).tiny))
    small = diagonal.abs() < floor
    root = root + torch.where(small, floor.copysign(diagonal) - diagonal, torch.zeros_like(diagonal)).diag()
    eye = torch.eye(len(root), dtype=root.dtype, device=root.device)
    leaves = torch.linalg.solve_triangular(root.mT, eye, upper=False)
    return image, basis, leaves / leaves.norm(dim=0), op @ basis
