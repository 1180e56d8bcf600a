"""Extreme eigenvalues, spectral densities and log-determinants from products alone, by the Lanczos method."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from curvature.arguments import check_whole
from curvature.linalg import damp_eigenvalues, eigenvalue_rounding, largest_eigenpairs, symmetric_eigh
from curvature.operators.base import Operator
from curvature.operators.block_diagonal import Curvature, as_operator
from curvature.operators.estimators import Estimate, mean_estimate

MAX_BASIS_ENTRIES = 2**28  # entries of the bases of starts that run together


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
