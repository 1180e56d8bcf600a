"""Damped inverses of large positive semi-definite matrices from their largest eigenvalues."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from curvature.linalg.decompositions import matmul, psd_eigh

LOW_RANK_MIN_SIZE = 256  # rows from which it pays off
MAX_RANK_DIVISOR = 3  # with more than a third of the directions, the inverse itself costs no more
KEEP_FACTOR = 3.0  # keep damped eigenvalues above this multiple of the mean of the rest
MAX_SPREAD = 0.75  # of the rest: its standard deviation relative to its damped mean
EXTRA_DIRECTIONS = 16  # searched beyond 5/4 of those needed last time


class LowRankInverse(NamedTuple):
    """``shift (I - V V^T)``, close to ``(M + damping I)^-1``.

    Attributes:
        vectors: V (d, r); columns of zeros at its end are not needed, see `nonzero_columns`.
        shift: a number ().
        fits: a flag (): it is close. Otherwise that needs more columns.
    """

    vectors: Tensor
    shift: Tensor
    fits: Tensor


def low_rank_inverse(matrix: Tensor, damping: float, start: Tensor | None) -> LowRankInverse:
    """``(M + damping I)^-1`` from the largest eigenvalues of M.

    Eigenvalues of M far above the rest are kept; the mean replaces all others. The rank follows from the trace and the
    Frobenius norm of the remainder, so directions that the subspace missed are accounted for.

    Args:
        matrix: M, symmetric (d, d).
        damping: in the units of M.
        start: V of a similar matrix, to start from. Without, all columns are tried that pay off.
    """
    limit = len(matrix) // MAX_RANK_DIVISOR
    width = limit if start is None else min(limit, start.shape[1] * 5 // 4 + EXTRA_DIRECTIONS)
    return _truncate(matrix, damping, *_ritz_pairs(matrix, _basis(matrix, start, width)))


def nonzero_columns(vectors: Tensor) -> Tensor:
    """Number of columns (..., d, r) up to the last that is not zero, (...)."""
    places = torch.arange(1, vectors.shape[-1] + 1, device=vectors.device)
    return ((vectors != 0).any(-2) * places).amax(-1)


def _basis(matrix: Tensor, start: Tensor | None, width: int) -> Tensor:
    """An orthonormal basis (d, width) close to the dominant subspace, by subspace iteration."""
    generator = torch.Generator(matrix.device).manual_seed(0)
    known = 0 if start is None else start.shape[1]
    fresh = matrix.new_empty(len(matrix), width - known).normal_(generator=generator)
    found = fresh if start is None else torch.cat([start, fresh], 1)
    for _ in range(2 if start is None else 1):
        found = torch.linalg.qr(matmul(matrix, found)).Q
    return found


def _ritz_pairs(matrix: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Ritz values, descending, and vectors (d, k)."""
    values, turn = psd_eigh(matmul(basis.mT, matmul(matrix, basis)))
    return values.flip(0), matmul(basis, turn.flip(1))


def _truncate(matrix: Tensor, damping: float, values: Tensor, vectors: Tensor) -> LowRankInverse:
    """Keep the fewest eigenpairs whose remainder is flat enough."""
    exact = values.double()
    before = lambda x: torch.cat([x.new_zeros(1), x.cumsum(0)])  # sums over the first 0, 1, ...
    counts = torch.arange(len(values) + 1, device=matrix.device)
    mean = (matrix.diagonal().double().sum() - before(exact)) / (len(matrix) - counts)
    square = (matrix.square().sum().double() - before(exact.square())) / (len(matrix) - counts)
    following = torch.cat([exact, exact[-1:]])
    fits = (following + damping <= KEEP_FACTOR * (mean + damping)) & (mean >= 0)
    fits &= (square - mean.square()).clamp(min=0).sqrt() <= MAX_SPREAD * (mean + damping)
    fewest = fits.int().argmax()
    rest = (mean + damping).gather(0, fewest[None])
    scale = (1 - rest / (exact + damping)).clamp(min=0).sqrt() * (counts[:-1] < fewest)
    return LowRankInverse(vectors * scale.to(vectors.dtype), (1 / rest[0]).to(vectors.dtype), fits.any())
