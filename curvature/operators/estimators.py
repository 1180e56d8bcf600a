"""Traces and diagonals from products with random vectors.

``k`` is always the number of products with the matrix. Every method stores vectors (P, k).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from curvature.arguments import check_whole
from curvature.linalg import qr
from curvature.operators.base import Operator
from curvature.operators.block_diagonal import Curvature, as_operator

PARTNERS = 3  # samples of a diagonal with which each is compared: all pairs tell hardly more


class Estimate(NamedTuple):
    """A random estimate.

    Attributes:
        value: unbiased unless the function says otherwise.
        error: the standard error of the value, in the same shape: the value is within two of them in about 95 of 100
            cases. It is estimated from the samples, widened as Student's t is for few of them, and at least rounding.
    """

    value: Tensor
    error: Tensor


def mean_estimate(samples: Tensor, covariance: Tensor | float = 0.0) -> Estimate:
    """The mean over the first dimension and its standard error; of one sample, which is exact, that of rounding.

    `covariance` is that of two samples, estimated. Their variance is its own estimate less that, so the mean has the
    variance ``spread / count + covariance``. It has a limit: samples that agree to rounding are exact.
    """
    value, count = samples.mean(0), len(samples)
    spread = samples.var(0) if count > 1 else torch.zeros_like(value)
    shared = (covariance + torch.zeros_like(spread)).clamp(min=0)
    variance = spread / count + shared.minimum(count * spread)
    rounding = torch.finfo(value.dtype).eps * value.abs().max()
    return Estimate(value, variance.sqrt() * _student(count - 1) + rounding)


def _student(degrees: int) -> float:
    """How much wider an interval of two standard errors is that are estimated (Abramowitz and Stegun, 26.7.5)."""
    inverse = 1 / max(degrees, 1)
    return 1 + inverse * (1.25 + inverse * (1.531 + inverse * (1.43 + inverse * 0.922)))


def xtrace(op: Curvature, k: int, generator: torch.Generator | None = None) -> Estimate:
    """XTrace: each vector samples the complement of the range that all others span (arXiv:2301.07825).

    Normal vectors, scaled by their norm on the complement, make the estimate unbiased. Exact for rank less than
    ``k / 2``. The samples are not independent: the standard error counts the covariance of each two, which what they
    are without the other's vector tells.

    Args:
        op: any symmetric matrix.
        k: number of products, at least 4; more than 2 P are not used.
        generator: by default a new one with seed 0, so that calls repeat; the global random state is untouched.

    Raises:
        ValueError: k is too small.
    """
    op = as_operator(op)
    size = op.space.size
    check_whole("k", k, 4)  # two samples at least, to estimate an error
    half = min(k // 2, size)
    z = op.space.normal(half, generator)
    image, basis, leaves, image_of_basis = _leave_one_out(op, z)
    core = basis.mT @ image_of_basis
    # x[k] is z[k] without the range of the other images, and y[k] = M x[k]
    inside = basis.mT @ z
    parts = leaves * (leaves * inside).sum(0)
    x, y = z - basis @ (inside - parts), image - image_of_basis @ (inside - parts)
    bends, norms = (x * y).sum(0), x.square().sum(0).clamp(min=torch.finfo(z.dtype).tiny)
    of_leaves = leaves.mT @ core @ leaves
    lost = of_leaves.diagonal()
    samples = core.trace() - lost + (size - half + 1) * bends / norms
    # row k, column j: sample k without the vector j, whose image has the direction w beside leaves[k]
    cosines = leaves.mT @ leaves
    known, sines = _sines(cosines)
    across = lambda of: (of - cosines * of.diagonal()[:, None]) / sines  # of leaves[j] to w, in each row
    w_z, w_y = across(inside.mT @ leaves), across(y.mT @ basis @ leaves)
    w_w = (lost - 2 * cosines * (of_leaves + of_leaves.mT) / 2 + cosines.square() * lost[:, None]) / sines.square()
    wider = (bends[:, None] + 2 * w_z * w_y + w_z.square() * w_w) / (norms[:, None] + w_z.square())
    change = (samples[:, None] - (core.trace() - lost[:, None] - w_w + (size - half + 2) * wider)) * known
    return mean_estimate(samples, (change * change.mT).sum() / max(1, half * (half - 1)))


def xdiag(op: Curvature, k: int, generator: torch.Generator | None = None) -> Estimate:
    """XDiag, the counterpart of `xtrace` for the diagonal (arXiv:2301.07825).

    Exact for rank less than ``k / 2``. The standard error counts the covariance of the samples, as that of `xtrace`.

    Args:
        op: any symmetric matrix.
        k: number of products, at least 6; with 2 P and more the matrix is multiplied by P unit vectors instead.
        generator: as for `xtrace`.

    Returns:
        The estimate with value and error of shape (P,).

    Raises:
        ValueError: k is too small.
    """
    op = as_operator(op)
    check_whole("k", k, 6)  # both samples of two vectors have the same error if the matrix is diagonal
    if k >= 2 * op.space.size:
        units = torch.eye(op.space.size, dtype=op.space.dtype, device=op.space.device)
        return mean_estimate((op @ units).diagonal()[None])
    z = op.space.signs(k // 2, generator)
    image, basis, leaves, image_of_basis = _leave_one_out(op, z)
    inside = basis.mT @ image
    inside_leaves = (leaves * inside).sum(0)
    left, right = basis @ leaves, image_of_basis @ leaves
    full = (basis * image_of_basis).sum(1)
    samples = full[:, None] - left * right + z * (image - basis @ (inside - leaves * inside_leaves))
    # as in `xtrace`, of each vector and the next few
    total, count, last = torch.zeros_like(full), len(inside_leaves), min(PARTNERS, len(inside_leaves) // 2)
    for k in range(1, last + 1):
        turned = lambda of, k=k: of.roll(-k, -1)
        cosines = (leaves * turned(leaves)).sum(0)
        known, sines = _sines(cosines)
        along = (turned(leaves) * inside).sum(0) - cosines * inside_leaves
        back = (leaves * turned(inside)).sum(0) - cosines * turned(inside_leaves)
        change = (turned(left) - cosines * left) * (turned(right) - cosines * right - z * along)
        change_back = (left - cosines * turned(left)) * (right - cosines * turned(right) - turned(z) * back)
        total += (change * change_back) @ (known / sines**4)
    return mean_estimate(samples.mT, total / (count * last))


def _sines(cosines: Tensor) -> tuple[Tensor, Tensor]:
    """Where two directions are far enough apart to tell them (others are taken for one), and the sines between them."""
    squares = 1 - cosines.square()
    known = squares > torch.finfo(squares.dtype).eps ** 0.5
    return known, squares.where(known, 1).sqrt()


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
