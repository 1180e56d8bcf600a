"""Sketches of second moments that are too large to store: a few directions, and the mean of the rest.

A sketch is a tensor S (1, r + 1, d) that stands for ``sum_k s_k s_k^T + |s_last|^2 / d I``, where k runs over all rows
but the last. `sketch_rows` leaves the last row zero, `compress` makes the others orthogonal. The trace is the sum of
squares of S, and scaling the matrix by c scales S by sqrt(c).
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvature.linalg.decompositions import matmul, psd_eigh

SKETCH_RANK = 128  # directions kept
# Rows kept of a batch; random signs mix more into these, which does not change the expected moment.
MAX_SKETCH_ROWS = 2 * SKETCH_RANK
MAX_DENSE_SIDE = 2 * MAX_SKETCH_ROWS + 1  # a dense side of at most this size is no larger than its sketch


def sketch_rows(rows: Tensor) -> Tensor:
    """The sketch of ``rows^T rows`` for rows (n, d)."""
    if len(rows) > MAX_SKETCH_ROWS:
        generator = torch.Generator(rows.device).manual_seed(0)
        signs = torch.randint(2, (MAX_SKETCH_ROWS, len(rows)), generator=generator, device=rows.device)
        signs = signs.to(rows.dtype) * 2 - 1
        rows = matmul(signs, rows) / MAX_SKETCH_ROWS**0.5
    return torch.cat([rows, torch.zeros_like(rows[:1])])[None]


def compress(sketch: Tensor) -> Tensor:
    """At most `SKETCH_RANK` orthogonal rows, largest first; the last row holds what they leave out."""
    rows, rest = sketch[0, :-1], sketch[0, -1].square().sum()
    values, vectors = psd_eigh(matmul(rows, rows.mT))
    kept = matmul(vectors[:, -SKETCH_RANK:].flip(1).mT, rows)
    rest = rest + (rows.square().sum() - kept.square().sum()).clamp(min=0)
    last = (rest / rows.shape[1]).sqrt().expand(1, rows.shape[1])
    return torch.cat([kept, last])[None]


def sketch_spectrum(sketch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of a compressed sketch: eigenvectors (d, r), their eigenvalues (r,), and that of all other directions."""
    rows, rest = sketch[0, :-1], sketch[0, -1].square().mean()
    squares = rows.square().sum(1)
    tiny = torch.finfo(rows.dtype).tiny ** 0.5
    # a row that is zero up to rounding has no direction
    nonzero = squares > torch.finfo(rows.dtype).eps * squares.sum()
    unit = torch.where(nonzero[:, None], rows / squares.clamp(min=tiny).sqrt()[:, None], torch.zeros_like(rows))
    return unit.mT, torch.where(nonzero, squares, torch.zeros_like(squares)) + rest, rest
