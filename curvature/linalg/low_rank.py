"""Damped inverses of large positive semi-definite matrices from their largest eigenvalues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from curvature.linalg.decompositions import matmul, psd_eighs, qr, try_orthonormal
from curvature.linalg.devices import ByDevice, look, widen

LOW_RANK_MIN_SIZE = ByDevice(256, 4096)  # rows from which it pays off
MAX_RANK_DIVISOR = 3  # with more than a third of the directions, the inverse itself costs no more
KEEP_FACTOR = 3.0  # keep damped eigenvalues above this multiple of the mean of the rest
MAX_SPREAD = 0.75  # of the rest: its standard deviation relative to its damped mean
EXTRA_DIRECTIONS = 16  # searched beyond 9/8 of those needed last time
FIRST_DIRECTIONS = 128  # searched the first time: of few rows, which are damped much, no more stand out


Make = Callable[[], Tensor]  # of a matrix, so that one at a time is in memory
Orthonormalize = Callable[[Tensor], tuple[Tensor, Tensor]]


class Projection(NamedTuple):
    """What the result depends on of a matrix M (d, d), whose dominant subspace has about the orthonormal `basis`."""

    basis: Tensor  # (d, width)
    inner: Tensor  # basis^T M basis
    trace: Tensor  # of M
    square: Tensor  # its squared Frobenius norm


def low_rank_inverses(
    makes: Sequence[Make], dampings: Sequence[float], starts: Sequence[Tensor | None], most: int = FIRST_DIRECTIONS
) -> list[tuple[Tensor, Tensor] | None]:
    """V (d, r) and c with ``c (I - V V^T)`` close to ``(M + damping I)^-1`` for each M; None where r is large.

    Eigenvalues of M far above the rest are kept; the mean replaces all others. The rank follows from the trace and the
    Frobenius norm of the remainder, so directions that the subspace missed are accounted for. The host waits for all
    together: for the bases, the eigenvalues, and the ranks.

    Args:
        makes: each returns an M, symmetric (d, d), all on one device; M is not kept.
        dampings: in the units of each M.
        starts: V of similar matrices, to start from.
        most: directions to search without a start; where they do not suffice, up to a third of all are.
    """
    projections = _projections(makes, starts, most)
    # descending, as the largest are kept
    pairs = [(values.flip(0), turn.flip(1)) for values, turn in psd_eighs([x.inner for x in projections])]
    each = zip(projections, dampings, pairs, strict=True)
    kept = [_choose_rank(x, damping, values) for x, damping, (values, _) in each]
    ranks = torch.stack([rank for *_, rank in kept]).tolist() if kept else []
    inverses = [
        None if rank < 0 else (matmul(x.basis, turn[:, :rank]) * scale[:rank].to(turn), shift.to(turn))
        for x, (_, turn), (scale, shift, _), rank in zip(projections, pairs, kept, ranks, strict=True)
    ]
    widths = [len(x.basis) // MAX_RANK_DIVISOR for x in projections]
    is_worth = lambda k: starts[k] is not None or projections[k].basis.shape[1] < widths[k]
    again = [k for k, x in enumerate(inverses) if x is None and is_worth(k)]  # it has turned, or the rank is larger
    widest = max([widths[k] for k in again], default=0)
    rest = [makes[k] for k in again], [dampings[k] for k in again], [None] * len(again), widest
    for k, inverse in zip(again, low_rank_inverses(*rest) if again else (), strict=True):
        inverses[k] = inverse
    return inverses


def _projections(makes: Sequence[Make], starts: Sequence[Tensor | None], most: int) -> list[Projection]:
    """`_project` of each; the host asks once whether all bases are finite."""
    tried = [_project(make(), start, most, try_orthonormal) for make, start in zip(makes, starts, strict=True)]
    fine = look([ok for _, ok in tried])
    careful = lambda x: (qr(x)[0], torch.ones((), dtype=torch.bool, device=x.device))
    return [
        projection if is_fine else _project(make(), start, most, careful)[0]
        for (projection, _), is_fine, make, start in zip(tried, fine, makes, starts, strict=True)
    ]


def _project(matrix: Tensor, start: Tensor | None, most: int, orthonormal: Orthonormalize) -> tuple[Projection, Tensor]:
    """By a step of subspace iteration, or two without a start, and whether the bases are finite."""
    most = most if start is None else start.shape[1] * 9 // 8 + EXTRA_DIRECTIONS
    width = min(len(matrix) // MAX_RANK_DIVISOR, most)
    generator = torch.Generator(matrix.device).manual_seed(0)
    known = 0 if start is None else start.shape[1]
    fresh = matrix.new_empty(len(matrix), width - known).normal_(generator=generator)
    basis, ok = orthonormal(matmul(matrix, fresh if start is None else torch.cat([start, fresh], 1)))
    if start is None:
        basis, again = orthonormal(matmul(matrix, basis))
        ok = ok & again
    inner = matmul(basis.mT, matmul(matrix, basis))
    return Projection(basis, inner, widen(matrix.diagonal()).sum(), widen(matrix.square().sum())), ok


def _choose_rank(projection: Projection, damping: float, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Lengths of the columns of V, c, and the fewest columns whose remainder is flat enough; -1 if none suffice."""
    exact = widen(values)
    before = lambda x: torch.cat([x.new_zeros(1), x.cumsum(0)])  # sums over the first 0, 1, ...
    remaining = len(projection.basis) - torch.arange(len(values) + 1, device=values.device)
    mean = (projection.trace - before(exact)) / remaining
    square = (projection.square - before(exact.square())) / remaining
    following = torch.cat([exact, exact[-1:]])
    fits = (following + damping <= KEEP_FACTOR * (mean + damping)) & (mean >= 0)
    fits &= (square - mean.square()).clamp(min=0).sqrt() <= MAX_SPREAD * (mean + damping)
    rank = fits.int().argmax()
    rest = (mean + damping).gather(0, rank[None])
    scale = (1 - rest / (exact + damping)).clamp(min=0).sqrt()
    return scale, 1 / rest[0], torch.where(fits.any(), rank, -1)
