"""Krylov spaces: extreme eigenvalues, spectral densities and log-determinants from products alone."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from curvature.linalg import eigenvalue_rounding
from curvature.operators import Operator


class Tridiagonal(NamedTuple):
    """``basis^T M basis``, which is tridiagonal, of k Lanczos steps.

    Attributes:
        diagonal: (k,).
        off_diagonal: (k - 1,); zero where the basis went on with a new vector.
        basis: (P, k), orthonormal; the first column is the start.
    """

    diagonal: Tensor
    off_diagonal: Tensor
    basis: Tensor

    def to_dense(self) -> Tensor:
        """(k, k)."""
        beta = self.off_diagonal
        return self.diagonal.diag() + beta.diag(1) + beta.diag(-1)


def lanczos(op: Operator, k: int, start: Tensor | None = None, generator: torch.Generator | None = None) -> Tridiagonal:
    """k steps of Lanczos' method with full reorthogonalisation (Golub and Van Loan, Matrix Computations, chapter 10).

    Where the space spanned so far is mapped into itself, the basis goes on with a random vector orthogonal to it, so
    that k = P gives all eigenvalues with their multiplicities.

    Args:
        op: any symmetric matrix.
        k: number of steps, one product each; more than P are not made.
        start: (P,); by default a normal vector.
        generator: for the random vectors; by default a new one with seed 0.

    Raises:
        ValueError: k is not positive, the start is zero or has another shape.
    """
    generator = generator or op.space.generator()
    first = op.space.normal(1, generator) if start is None else op.space.checked(start, (op.space.size,), "start")
    alphas, betas, basis = lanczos_from_starts(op, k, first.reshape(-1, 1), generator)
    return Tridiagonal(alphas[0], betas[0], basis[0].mT)


def lanczos_from_starts(
    op: Operator, k: int, starts: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """`lanczos` from several starts (P, c) at once: (c, k), (c, k - 1) and the bases as rows (c, k, P)."""
    if k < 1:
        raise ValueError(f"lanczos needs at least one step, found k={k}")
    norms = starts.norm(dim=0)
    if not (norms > 0).all():
        raise ValueError("lanczos needs a start that is not zero")
    steps, count = min(k, op.space.size), starts.shape[1]
    basis = starts.new_zeros(count, steps, op.space.size)
    basis[:, 0] = (starts / norms).T
    alphas, betas = starts.new_zeros(count, steps), starts.new_zeros(count, steps - 1)
    scale = torch.zeros_like(norms)
    for step in range(steps):
        known, image = basis[:, : step + 1], (op @ basis[:, step].T).T
        scale = torch.maximum(scale, image.norm(dim=1))
        alphas[:, step] = (basis[:, step] * image).sum(1)
        if step + 1 < steps:
            rest = _orthogonalize(image, known)
            beta = rest.norm(dim=1)
            ended = ~(beta > math.sqrt(op.space.size) * eigenvalue_rounding(scale))
            if ended.any():
                fresh = _orthogonalize(op.space.normal(count, generator).T, known)
                rest, beta = torch.where(ended[:, None], fresh, rest), torch.where(ended, 0, beta)
            betas[:, step] = beta
            rest = _orthogonalize(rest / rest.norm(dim=1, keepdim=True), known)
            basis[:, step + 1] = rest / rest.norm(dim=1, keepdim=True)
    return alphas, betas, basis


def _orthogonalize(rows: Tensor, basis: Tensor) -> Tensor:
    """Rows (c, P) without their part in the span of (c, m, P); twice, since once leaves what rounding leaves."""
    for _ in range(2):
        rows = rows - ((basis @ rows[:, :, None]).mT @ basis)[:, 0]
    return rows
