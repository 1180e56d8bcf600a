"""Damped inverses of large positive semi-definite matrices from their largest eigenvalues."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from curvature.linalg.decompositions import matmul, psd_eighs, qr, try_orthonormal
from curvature.linalg.devices import widen
from curvature.linalg.outcomes import look

LOW_RANK_MIN_SIZE = 256  # rows from which it pays off
MAX_RANK_DIVISOR = 3  # with more than a third of the directions, the inverse itself costs no more
KEEP_FACTOR = 3.0  # keep damped eigenvalues above this multiple of the mean of the rest
MAX_SPREAD = 0.75  # of the rest: its standard deviation relative to its damped mean
WIDTH_STEP = 64  # small matrices are filled up to a multiple of this, to be decomposed together
EXTRA_DIRECTIONS = 16  # searched beyond 5/4 of those needed last time


Make = Callable[[], Tensor]  # of a matrix, so that one at a time is in memory


def low_rank_inverses(
    makes: Sequence[Make], damping: float, starts: Sequence[Tensor | None]
) -> list[tuple[Tensor, Tensor] | None]:
    """V (d, r) and c with ``c (I - V V^T)`` close to ``(M + damping I)^-1`` for each M; None where r is large.

    Eigenvalues of M far above the rest are kept; the mean replaces all others. The rank follows from the trace and the
    Frobenius norm of the remainder, so directions that the subspace missed are accounted for. The host waits for all
    together: for the bases, the eigenvalues, and the ranks.

    Args:
        makes: each returns an M, symmetric (d, d), all on one device. It is called three times, and M is not kept.
        damping: in the units of M.
        starts: V of similar matrices, to start from.
    """
    bases = _bases(makes, starts)
    pairs = _ritz_pairs(makes, bases)
    kept = [_truncated(make(), damping, *pair) for make, pair in zip(makes, pairs, strict=True)]
    ranks = torch.stack([rank for *_, rank in kept]).tolist() if kept else []
    found = [
        None if rank < 0 else (vectors[:, :rank].contiguous(), shift)
        for (vectors, shift, _), rank in zip(kept, ranks, strict=True)
    ]
    turned = [k for k, start in enumerate(starts) if found[k] is None and start is not None]  # the subspace, too far
    anew = low_rank_inverses([makes[k] for k in turned], damping, [None] * len(turned)) if turned else []
    for k, own in zip(turned, anew, strict=True):
        found[k] = own
    return found


Orthonormalize = Callable[[Tensor], Tensor]


def _bases(makes: Sequence[Make], starts: Sequence[Tensor | None]) -> list[Tensor]:
    """`_basis` of each; the host asks once whether all have succeeded."""
    flags: list[Tensor] = []

    def tried(x: Tensor) -> Tensor:
        found, ok = try_orthonormal(x)
        flags.append(ok)
        return found

    bases, ends = [], []
    for make, start in zip(makes, starts, strict=True):
        bases.append(_basis(make(), start, tried))
        ends.append(len(flags))
    fine = look(flags)
    for k, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if not all(fine[begin:end]):
            bases[k] = _basis(makes[k](), starts[k], lambda x: qr(x)[0])
    return bases


def _basis(matrix: Tensor, start: Tensor | None, orthonormal: Orthonormalize) -> Tensor:
    """An orthonormal basis (d, width) close to the dominant subspace, by subspace iteration."""
    limit = len(matrix) // MAX_RANK_DIVISOR
    width = limit if start is None else min(limit, start.shape[1] * 5 // 4 + EXTRA_DIRECTIONS)
    generator = torch.Generator(matrix.device).manual_seed(0)
    known = 0 if start is None else start.shape[1]
    fresh = matrix.new_empty(len(matrix), width - known).normal_(generator=generator)
    found = fresh if start is None else torch.cat([start, fresh], 1)
    for _ in range(2 if start is None else 1):
        found = orthonormal(matmul(matrix, found))
    return found


def _ritz_pairs(makes: Sequence[Make], bases: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Ritz values, descending, and vectors (d, k) of each. Those of about one size are decomposed together."""
    sizes = [-(-basis.shape[1] // WIDTH_STEP) * WIDTH_STEP for basis in bases]
    found: dict[int, tuple[Tensor, Tensor]] = {}
    inner = [matmul(basis.mT, matmul(make(), basis)) for make, basis in zip(makes, bases, strict=True)]
    # negative numbers beyond the end come first among the eigenvalues, and have no part in the others
    padded = {
        size: torch.stack([_padded(x, size) for x, own in zip(inner, sizes, strict=True) if own == size])
        for size in dict.fromkeys(sizes)
    }
    for size, (values, turns) in zip(padded, psd_eighs(list(padded.values())), strict=True):
        alike = [k for k, own in enumerate(sizes) if own == size]
        for k, own, turn in zip(alike, values.flip(1), turns.flip(2), strict=True):
            width = bases[k].shape[1]
            found[k] = own[:width], matmul(bases[k], turn[:width, :width])
    return [found[k] for k in range(len(bases))]


def _padded(x: Tensor, size: int) -> Tensor:
    whole = torch.diag_embed(x.new_full((size,), -1.0))
    whole[: len(x), : len(x)] = x
    return whole


def _truncated(matrix: Tensor, damping: float, values: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """V with too many columns, c, and the fewest columns whose remainder is flat enough; -1 if no number suffices."""
    exact = widen(values)
    before = lambda x: torch.cat([x.new_zeros(1), x.cumsum(0)])  # sums over the first 0, 1, ...
    remaining = len(matrix) - torch.arange(len(values) + 1, device=matrix.device)
    mean = (widen(matrix.diagonal()).sum() - before(exact)) / remaining
    square = (widen(matrix.square().sum()) - before(exact.square())) / remaining
    following = torch.cat([exact, exact[-1:]])
    fits = (following + damping <= KEEP_FACTOR * (mean + damping)) & (mean >= 0)
    fits &= (square - mean.square()).clamp(min=0).sqrt() <= MAX_SPREAD * (mean + damping)
    rank = fits.int().argmax()
    rest = (mean + damping).gather(0, rank[None])
    scale = (1 - rest / (exact + damping)).clamp(min=0).sqrt()
    return vectors * scale.to(vectors.dtype), (1 / rest[0]).to(vectors.dtype), torch.where(fits.any(), rank, -1)
