"""Extreme eigenvalues, the density of all of them and the log-determinant, from products alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from curvature.estimators.estimate import Estimate, mean_estimate
from curvature.estimators.lanczos import lanczos_from_starts
from curvature.linalg import damp_eigenvalues, eigenvalue_rounding, symmetric_eigh
from curvature.operators import Operator

MAX_BASIS_ENTRIES = 2**28  # numbers that the bases of starts that go together may take


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

    Block Lanczos with k starts and full reorthogonalisation (Golub and Van Loan, Matrix Computations, chapter 10), so
    that multiple eigenvalues come with their multiplicity. It stops when each residual ``||M u - theta u||`` is small;
    there is an eigenvalue no further from theta than that.

    Args:
        op: any symmetric matrix.
        k: how many.
        rtol: allowed residual, relative to the largest eigenvalue found in size; by default sqrt(eps).
        max_products: most products with the matrix, for each of which two vectors are kept; by default 300, or 20 k.
        generator: for the starts; by default a new one with seed 0.

    Raises:
        ValueError: k is not between 1 and P.
        RuntimeError: the products did not suffice.
    """
    size = op.space.size
    if not 1 <= k <= size:
        raise ValueError(f"a matrix with {size} rows has no {k} largest eigenvalues")
    rtol = torch.finfo(op.space.dtype).eps ** 0.5 if rtol is None else rtol
    most = min(size, max(300, 20 * k) if max_products is None else max_products)
    block = torch.linalg.qr(op.space.normal(k, generator)).Q
    basis = image = block[:, :0]
    core = basis.mT @ image
    while True:
        basis, image = torch.cat([basis, block], 1), torch.cat([image, op @ block], 1)
        core = _append_border(core, basis.mT @ image[:, -block.shape[1] :])
        values, rotation = symmetric_eigh(core)
        values, rotation = values[-k:], rotation[:, -k:]
        vectors = basis @ rotation
        residual = (image @ rotation - values * vectors).norm(dim=0).max() / _scale(core)
        if residual <= rtol or basis.shape[1] == size:
            return values, vectors
        if basis.shape[1] >= most:
            raise RuntimeError(
                f"lanczos reached a relative residual of {float(residual):.3g}, not {rtol:.3g}, with {basis.shape[1]} "
                "products: allow more by max_products, or a larger rtol"
            )
        block = _next_block(basis, image[:, -block.shape[1] :])


def _append_border(core: Tensor, border: Tensor) -> Tensor:
    """A symmetric matrix (m, m) with new last columns (m + b, b), and the same as rows."""
    known = len(core)
    return torch.cat([torch.cat([core, border[:known].mT]), border], 1)


def _scale(core: Tensor) -> Tensor:
    """The largest eigenvalue in size, or what keeps a division by it finite."""
    return torch.linalg.matrix_norm(core, 2).clamp(min=torch.finfo(core.dtype).tiny)


def _orthogonalize(columns: Tensor, basis: Tensor) -> Tensor:
    """The columns without their part in the span of the basis; twice, since once leaves what rounding leaves."""
    for _ in range(2):
        columns = columns - basis @ (basis.mT @ columns)
    return columns


def _next_block(basis: Tensor, image: Tensor) -> Tensor:
    """Orthonormal columns orthogonal to the basis that span where `image` leads out of it.

    Where it does not, they go on in what directions rounding gives; the second round makes these orthogonal too.
    """
    width = min(image.shape[1], len(basis) - basis.shape[1])
    for _ in range(2):
        image = torch.linalg.qr(_orthogonalize(image, basis)).Q[:, :width]
    return image


def spectral_density(
    op: Operator,
    vectors: int = 10,
    steps: int = 80,
    *,
    grid: Tensor | None = None,
    width: float | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """The density of eigenvalues by stochastic Lanczos quadrature (Ghorbani et al. 2019, arXiv:1901.10159).

    Args:
        op: any symmetric matrix.
        vectors: number of random starts.
        steps: Lanczos steps for each, one product each; P of them make each start's part exact.
        grid: eigenvalues at which the density is wanted, (G,); by default 1024 that cover the spectrum.
        width: standard deviation of the normal distribution that each eigenvalue is drawn as; by default a hundredth of
            the range of the spectrum.
        generator: for the starts; by default a new one with seed 0.

    Returns:
        The grid and the density on it, (G,) each; over the whole line it integrates to one.

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

    Unbiased up to the error of the quadrature, which falls fast with the steps where the damping is not small. That a
    matrix is singular may stay unnoticed without damping.

    Args:
        op: positive definite with the damping.
        damping: added to the matrix.
        k: number of random starts, at least 2.
        steps: Lanczos steps for each, one product each; P of them make each start's part exact.
        generator: for the starts; by default a new one with seed 0.

    Raises:
        ValueError: less than two starts, no steps, or an eigenvalue was met that is not positive.
    """
    if k < 2:
        raise ValueError(f"lanczos_logdet needs at least two starts, found k={k}")
    nodes, weights = _quadrature(op, k, steps, generator)
    logs = damp_eigenvalues(nodes, eigenvalue_rounding(nodes.abs().max()), float(damping), repr(op)).log()
    return mean_estimate(op.space.size * (weights * logs).sum(1))


def _quadrature(op: Operator, vectors: int, steps: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Nodes and weights, (vectors, steps): ``z^T f(M) z = sum weights f(nodes)`` for random unit vectors z."""
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
