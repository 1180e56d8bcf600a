"""What products alone tell of a matrix: traces and diagonals with random vectors, and the spectrum by Lanczos' method.

In `xtrace` and `xdiag` k is the number of products with the matrix; they store vectors (P, k).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from curvature.arguments import check_whole
from curvature.linalg import damp_eigenvalues, eigenvalue_rounding, largest_eigenpairs, qr, symmetric_eigh
from curvature.operators.base import Operator
from curvature.operators.block_diagonal import Curvature, as_operator

PARTNERS = 3  # samples of a diagonal with which each is compared: all pairs tell hardly more
MAX_BASIS_ENTRIES = 2**28  # entries of the bases of starts that run together


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


class Tridiagonal(NamedTuple):
    """The tridiagonal matrix ``basis^T M basis`` of k Lanczos steps.

    Attributes:
        diagonal: (k,).
        off_diagonal: (k - 1,); zero where the basis was continued with a random vector.
        basis: (P, k), orthonormal; the first column is the normalized start.
    """

    diagonal: Tensor
    off_diagonal: Tensor
    basis: Tensor

    def to_dense(self) -> Tensor:
        """(k, k)."""
        beta = self.off_diagonal
        return self.diagonal.diag_embed() + beta.diag_embed(1) + beta.diag_embed(-1)


def lanczos(
    op: Curvature, k: int, start: Tensor | None = None, generator: torch.Generator | None = None
) -> Tridiagonal:
    """k Lanczos steps with full reorthogonalization (Golub and Van Loan, Matrix Computations, chapter 10).

    If M maps the span of the basis into itself, a random orthogonal vector continues it, so that k = P gives all
    eigenvalues with their multiplicities.

    Args:
        op: any symmetric matrix.
        k: number of steps, one product each; at most P are made.
        start: (P,); by default a normal vector.
        generator: for the random vectors; by default a new one with seed 0.

    Raises:
        ValueError: k is not positive, or the start is zero or has a wrong shape.
    """
    op = as_operator(op)
    generator = op.space.generator(generator)
    first = op.space.normal(1, generator) if start is None else op.space.checked(start, (op.space.size,), "start")
    with op._one_call():
        alphas, betas, basis = _lanczos_from_starts(op, k, first.reshape(-1, 1), generator)
    return Tridiagonal(alphas[0], betas[0], basis[0].mT)


def lanczos_eigenvalues(
    op: Curvature,
    k: int,
    *,
    rtol: float | None = None,
    max_products: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The k largest eigenvalues, ascending, (k,); arguments and errors as for `lanczos_eigenpairs`.

    The smallest are ``-lanczos_eigenvalues(-M, k)``.
    """
    return lanczos_eigenpairs(op, k, rtol=rtol, max_products=max_products, generator=generator)[0]


def lanczos_eigenpairs(
    op: Curvature,
    k: int,
    *,
    rtol: float | None = None,
    max_products: int | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """The k largest eigenvalues, ascending, (k,), and their eigenvectors as columns (P, k).

    By block Lanczos (`curvature.linalg.largest_eigenpairs`); multiple eigenvalues come with their multiplicity.

    Args:
        op: any symmetric matrix.
        k: number of eigenvalues.
        rtol: allowed residual relative to the largest absolute eigenvalue found; by default sqrt(eps).
        max_products: maximum number of products, each of which stores two vectors; by default the larger of 300 and
            20 k.
        generator: for the starts; by default a new one with seed 0.

    Raises:
        ValueError: k is not between 1 and P.
        RuntimeError: no convergence within ``max_products``.
    """
    op = as_operator(op)
    check_whole("k", k, 1, op.space.size)
    with op._one_call():
        return largest_eigenpairs(op.__matmul__, op.space.normal(k, generator), rtol, max_products)


def spectral_density(
    op: Curvature,
    vectors: int = 10,
    steps: int = 80,
    *,
    grid: Tensor | None = None,
    width: float | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """The density of the eigenvalues by stochastic Lanczos quadrature (Ghorbani et al. 2019, arXiv:1901.10159).

    Args:
        op: any symmetric matrix.
        vectors: number of random starts.
        steps: Lanczos steps per start, one product each; P steps make the quadrature exact.
        grid: where to evaluate the density, (G,); by default 1024 points that cover the spectrum.
        width: standard deviation of the normal distribution that smooths each eigenvalue; by default a hundredth of the
            range of the spectrum.
        generator: for the starts; by default a new one with seed 0.

    Returns:
        The grid and the density on it, (G,) each; the density integrates to one over the real line.

    Raises:
        ValueError: no vectors or no steps, or a width that is not positive.
    """
    op = as_operator(op)
    if width is not None and not width > 0:
        raise ValueError(f"width: expected a positive standard deviation, found {width}")
    nodes, weights = _quadrature(op, vectors, steps, generator)
    least, largest = nodes.min(), nodes.max()
    if width is None:
        spread = largest - least
        spread = torch.where(spread > eigenvalue_rounding(nodes.abs().max()), spread, nodes.abs().max())
        width = float(spread) / 100 or 1.0
    if grid is None:
        margin = 5 * width
        ends = float(least) - margin, float(largest) + margin
        grid = torch.linspace(*ends, 1024, dtype=nodes.dtype, device=nodes.device)
    bells = torch.exp(-0.5 * ((grid[:, None] - nodes.flatten()) / width) ** 2) / (width * math.sqrt(2 * math.pi))
    return grid, bells @ weights.flatten() / len(nodes)


def lanczos_logdet(
    op: Curvature, damping: float = 0.0, k: int = 10, steps: int = 80, *, generator: torch.Generator | None = None
) -> Estimate:
    """``log det(M + damping I)`` by stochastic Lanczos quadrature (Ubaru, Chen and Saad 2017, doi:10.1137/16M1104974).

    Unbiased up to the quadrature error, which decays fast with the steps unless the damping is small. Without damping,
    a singular matrix may go unnoticed.

    Args:
        op: positive definite with the damping.
        damping: added to the matrix.
        k: number of random starts, at least 2.
        steps: Lanczos steps per start, one product each; P steps make the quadrature exact.
        generator: for the starts; by default a new one with seed 0.

    Raises:
        ValueError: fewer than two starts, no steps, or a non-positive eigenvalue.
    """
    op = as_operator(op)
    check_whole("k", k, 2)
    nodes, weights = _quadrature(op, k, steps, generator)
    logs = damp_eigenvalues(nodes, eigenvalue_rounding(nodes.abs().max()), float(damping), repr(op)).log()
    return mean_estimate(op.space.size * (weights * logs).sum(1))


def _quadrature(op: Operator, vectors: int, steps: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Nodes and weights (vectors, steps) with ``z^T f(M) z = sum weights f(nodes)`` for random unit vectors z."""
    check_whole("vectors", vectors, 1)
    check_whole("steps", steps, 1)
    generator = op.space.generator(generator)
    together = max(1, MAX_BASIS_ENTRIES // (min(steps, op.space.size) * op.space.size))
    starts = op.space.normal(vectors, generator).split(together, 1)
    with op._one_call():
        cores = [Tridiagonal(*_lanczos_from_starts(op, steps, some, generator)).to_dense() for some in starts]
    values, rotations = symmetric_eigh(torch.cat(cores))
    return values, rotations[:, 0].square()


def _lanczos_from_starts(
    op: Operator, k: int, starts: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """`lanczos` from several starts (P, c): diagonals (c, k), off-diagonals (c, k - 1), bases as rows (c, k, P)."""
    check_whole("k", k, 1)
    norms = starts.norm(dim=0)
    if not (norms > 0).all():
        raise ValueError("lanczos needs a start that is not zero")
    steps, count = min(k, op.space.size), starts.shape[1]
    basis = starts.new_zeros(count, steps, op.space.size)
    basis[:, 0] = (starts / norms).T
    alphas, betas = starts.new_zeros(count, steps), starts.new_zeros(count, steps - 1)
    scale, unit = torch.zeros_like(norms), torch.ones_like(norms[0])
    for step in range(steps):
        rows, image = basis[:, : step + 1], (op @ basis[:, step].T).T
        if step == 0:  # squares of what is far from one underflow
            unit = torch.where((largest := image.abs().amax()) > 0, largest, unit)
        image = image / unit
        scale = torch.maximum(scale, image.norm(dim=1))
        alphas[:, step] = (basis[:, step] * image).sum(1)
        if step + 1 < steps:
            rest = _orthogonalize(image, rows)
            beta = rest.norm(dim=1)
            ended = ~(beta > math.sqrt(op.space.size) * eigenvalue_rounding(scale))
            if ended.any():
                fresh = _orthogonalize(op.space.normal(count, generator).T, rows)
                rest, beta = torch.where(ended[:, None], fresh, rest), torch.where(ended, 0, beta)
            betas[:, step] = beta
            rest = _orthogonalize(rest / rest.norm(dim=1, keepdim=True), rows)
            basis[:, step + 1] = rest / rest.norm(dim=1, keepdim=True)
    return unit * alphas, unit * betas, basis


def _orthogonalize(rows: Tensor, basis: Tensor) -> Tensor:
    """Remove the span of (c, m, P) from rows (c, P); twice, since rounding leaves a rest after the first time."""
    for _ in range(2):
        rows = rows - ((basis @ rows[:, :, None]).mT @ basis)[:, 0]
    return rows
