"""The Lanczos method."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from curvature.linalg import eigenvalue_rounding
from curvature.operators import Operator


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
        return self.diagonal.diag() + beta.diag(1) + beta.diag(-1)


def lanczos(op: Operator, k: int, start: Tensor | None = None, generator: torch.Generator | None = None) -> Tridiagonal:
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
    generator = generator or op.space.generator()
    first = op.space.normal(1, generator) if start is None else op.space.checked(start, (op.space.size,), "start")
    alphas, betas, basis = lanczos_from_starts(op, k, first.reshape(-1, 1), generator)
    return Tridiagonal(alphas[0], betas[0], basis[0].mT)


def lanczos_from_starts(
    op: Operator, k: int, starts: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """`lanczos` from several starts (P, c): diagonals (c, k), off-diagonals (c, k - 1), bases as rows (c, k, P)."""
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
    """Remove the span of (c, m, P) from rows (c, P); twice, since rounding leaves a rest after the first time."""
    for _ in range(2):
        rows = rows - ((basis @ rows[:, :, None]).mT @ basis)[:, 0]
    return rows
