"""Damped inverses of large positive semi-definite matrices from their largest eigenvalues."""

from __future__ import annotations

import torch
from torch import Tensor

from curvature.linalg.decompositions import matmul, psd_eigh

LOW_RANK_MIN_SIZE = 256  # rows from which on it pays
MAX_RANK_DIVISOR = 3  # an approximation of more than this part of the rows costs as much as the inverse itself
KEEP_FACTOR = 3.0  # a damped eigenvalue so many times that of the rest is kept
MAX_SPREAD = 0.75  # largest standard deviation of the rest, relative to its damped mean
EXTRA_DIRECTIONS = 16  # directions more than were needed the last time, and a quarter


def low_rank_inverse(matrix: Tensor, damping: float, start: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """V (d, r) and a number c, ``c (I - V V^T)`` being about ``(M + damping I)^-1``; None if that takes a large r.

    Eigenvalues of M far above the rest are kept, and the mean stands for all others. Which these are follows from the
    trace and the Frobenius norm of what is left, hence whatever the subspace has missed counts among them.

    Args:
        matrix: M, symmetric (d, d).
        damping: in its units.
        start: the V of a matrix not much different, to begin with.
    """
    limit = len(matrix) // MAX_RANK_DIVISOR
    width = limit if start is None else min(limit, start.shape[1] * 5 // 4 + EXTRA_DIRECTIONS)
    found = _truncate(matrix, damping, _ritz_pairs(matrix, _basis(matrix, start, width)))
    if found is None and start is not None:  # it has turned too far
        found = _truncate(matrix, damping, _ritz_pairs(matrix, _basis(matrix, None, limit)))
    return found


def _basis(matrix: Tensor, start: Tensor | None, width: int) -> Tensor:
    """An orthonormal basis (d, width) of about the dominant subspace, by subspace iteration."""
    generator = torch.Generator(matrix.device).manual_seed(0)
    known = 0 if start is None else start.shape[1]
    fresh = torch.randn(
        len(matrix), width - known, generator=generator, dtype=matrix.dtype, device=matrix.device
    )  # fmt: skip
    found = fresh if start is None else torch.cat([start, fresh], 1)
    for _ in range(2 if start is None else 1):
        found = torch.linalg.qr(matmul(matrix, found)).Q
    return found


def _ritz_pairs(matrix: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Ritz values, descending, and vectors (d, k)."""
    values, turn = psd_eigh(matmul(basis.mT, matmul(matrix, basis)))
    return values.flip(0), matmul(basis, turn.flip(1))


def _truncate(matrix: Tensor, damping: float, pairs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | None:
    values, vectors = pairs
    wide = values.double()
    before = lambda x: torch.cat([x.new_zeros(1), x.cumsum(0)])  # sums over the first 0, 1, ...
    left = len(matrix) - torch.arange(len(values) + 1, device=matrix.device)
    mean = (matrix.diagonal().double().sum() - before(wide)) / left
    square = (matrix.square().sum().double() - before(wide.square())) / left
    following = torch.cat([wide, wide[-1:]])
    fits = (following + damping <= KEEP_FACTOR * (mean + damping)) & (mean >= 0)
    fits &= (square - mean.square()).clamp(min=0).sqrt() <= MAX_SPREAD * (mean + damping)
    if not bool(fits.any()):
        return None
    rank = int(fits.int().argmax())
    rest = mean[rank] + damping
    scale = (1 - rest / (wide[:rank] + damping)).clamp(min=0).sqrt()
    return vectors[:, :rank] * scale.to(vectors.dtype), (1 / rest).to(vectors.dtype)
