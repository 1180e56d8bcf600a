"""Extreme eigenvalues, spectral densities and log-determinants from products alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from curvature.estimators.estimate import Estimate, mean_estimate
from curvature.estimators.tridiagonal import lanczos_from_starts
from curvature.linalg import damp_eigenvalues, eigenvalue_rounding, largest_eigenpairs, symmetric_eigh
from curvature.operators import Operator

MAX_BASIS_ENTRIES = 2**28  # entries of the bases of starts that run together


def lanczos_eigenvalues(
    op: Operator,
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
    op: Operator,
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
    if not 1 <= k <= op.space.size:
        raise ValueError(f"a matrix with {op.space.size} rows has no {k} largest eigenvalues")
    return largest_eigenpairs(op.__matmul__, op.space.normal(k, generator), rtol, max_products)


def spectral_density(
    op: Operator,
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
        ValueError: no vectors or no steps.
    """
    nodes, weights = _quadrature(op, vectors, steps, generator)
    least, largest = nodes.min(), nodes.max()
    if width is None:
        spread = largest - least
        spread = torch.where(spread > eigenvalue_rounding(nodes.abs().max()), spread, nodes.abs().max())
        width = float(spread) / 100 or 1.0
    if grid is None:
        margin = 5 * width
        grid = torch.linspace(
            float(least) - margin, float(largest) + margin, 1024, dtype=nodes.dtype, device=nodes.device
        )
    bells = torch.exp(-0.5 * ((grid[:, None] - nodes.flatten()) / width) ** 2) / (width * math.sqrt(2 * math.pi))
    return grid, bells @ weights.flatten() / len(nodes)


def lanczos_logdet(
    op: Operator, damping: float = 0.0, k: int = 10, steps: int = 80, *, generator: torch.Generator | None = None
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
    if k < 2:
        raise ValueError(f"lanczos_logdet needs at least two starts, found k={k}")
    nodes, weights = _quadrature(op, k, steps, generator)
    logs = damp_eigenvalues(nodes, eigenvalue_rounding(nodes.abs().max()), float(damping), repr(op)).log()
    return mean_estimate(op.space.size * (weights * logs).sum(1))


def _quadrature(op: Operator, vectors: int, steps: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Nodes and weights (vectors, steps) with ``z^T f(M) z = sum weights f(nodes)`` for random unit vectors z."""
    if vectors < 1:
        raise ValueError(f"stochastic Lanczos quadrature needs random vectors, found {vectors}")
    generator = generator or op.space.generator()
    together = max(1, MAX_BASIS_ENTRIES // (min(steps, op.space.size) * op.space.size))
    cores = []
    for starts in op.space.normal(vectors, generator).split(together, 1):
        alphas, betas, _ = lanczos_from_starts(op, steps, starts, generator)
        cores.append(alphas.diag_embed() + betas.diag_embed(1) + betas.diag_embed(-1))
    values, rotations = symmetric_eigh(torch.cat(cores))
    return values, rotations[:, 0].square()
