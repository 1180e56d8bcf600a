"""Damped inverses of large positive semi-definite matrices from their largest eigenvalues."""

from __future__ import annotations

import torch
from torch import Tensor

from curvature.linalg.decompositions import matmul, psd_eigh, qr
from curvature.linalg.devices import widen

LOW_RANK_MIN_SIZE = 256  # rows from which it pays off
MAX_RANK_DIVISOR = 3  # with more than a third of the directions, the inverse itself costs no more
KEEP_FACTOR = 3.0  # keep damped eigenvalues above this multiple of the mean of the rest
MAX_SPREAD = 0.75  # of the rest: its standard deviation relative to its damped mean
EXTRA_DIRECTIONS = 16  # searched beyond 5/4 of those needed last time


def low_rank_inverse(matrix: Tensor, damping: float, start: Tensor | None) -> tuple[Tensor, Tensor] | None:
    """V (d, r) and c with ``c (I - V V^T)`` close to ``(M + damping I)^-1``; None if that needs a large r.

    Eigenvalues of M far above the rest are kept; the mean replaces all others. The rank follows from the trace and the
    Frobenius norm of the remainder, so directions that the subspace missed are accounted for.

    Args:
        matrix: M, symmetric (d, d).
        damping: in the units of M.
        start: V of a similar matrix, to start from.
    """
    limit = len(matrix) // MAX_RANK_DIVISOR
    width = limit if start is None else min(limit, start.shape[1] * 5 // 4 + EXTRA_DIRECTIONS)
    found = _truncate(matrix, damping, _ritz_pairs(matrix, _basis(matrix, start, width)))
    if found is None and start is not None:  # the subspace has turned too far
        found = _truncate(matrix, damping, _ritz_pairs(matrix, _basis(matrix, None, limit)))
    return found


def _basis(matrix: Tensor, start: Tensor | None, width: int) -> Tensor:
    """An orthonormal basis (d, width) close to the dominant subspace, by subspace iteration."""
    generator = torch.Generator(matrix.device).manual_seed(0)
    known = 0 if start is None else start.shape[1]
    fresh = matrix.new_empty(len(matrix), width - known).normal_(generator=generator)
    found = fresh if start is None else torch.cat([start, fresh], 1)
    for _ in range(2 if start is None else 1):
        found = qr(matmul(matrix, found))[0]
    return found


def _ritz_pairs(matrix: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Ritz values, descending, and vectors (d, k)."""
    values, turn = psd_eigh(matmul(basis.mT, matmul(matrix, basis)))
    return values.flip(0), matmul(basis, turn.flip(1))


def _truncate(matrix: Tensor, damping: float, pairs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor] | None:
    """Keep the fewest eigenpairs whose remainder is flat enough; None if no number of them suffices."""
    values, vectors = pairs
    exact = widen(values)
    before = lambda x: torch.cat([x.new_zeros(1), x.cumsum(0)])  # sums over the first 0, 1, ...
    remaining = len(matrix) - torch.arange(len(values) + 1, device=matrix.device)
    mean = (widen(matrix.diagonal()).sum() - before(exact)) / remaining
    square = (widen(matrix.square().sum()) - before(exact.square())) / remaining
    following = torch.cat([exact, exact[-1:]])
    fits = (following + damping <= KEEP_FACTOR * (mean + damping)) & (mean >= 0)
    fits &= (square - mean.square()).clamp(min=0).sqrt() <= MAX_SPREAD * (mean + damping)
    if not bool(fits.any()):
        return None
    rank = int(fits.int().argmax())
    rest = mean[rank] + damping
    scale = (1 - rest / (exact[:rank] + damping)).clamp(min=0).sqrt()
    return vectors[:, :rank] * scale.to(vectors.dtype), (1 / rest).to(vectors.dtype)
