"""Sketches of second moments that are too large to store: a few directions, and the mean of the rest.

A sketch is a tensor S (1, r + 1, d) that stands for ``sum_k s_k s_k^T + |s_last|^2 / d I``, where k runs over all rows
but the last. `sketch_rows` leaves the last row zero, `compress` makes the others orthogonal. The trace is the sum of
squares of S, and scaling the matrix by c scales S by sqrt(c).
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvature.linalg.decompositions import matmul, psd_eigh
from curvature.linalg.outcomes import count_recovery

SKETCH_RANK = 128  # directions kept
# Rows kept of a batch; random signs mix more into these, which does not change the expected moment.
MAX_SKETCH_ROWS = 2 * SKETCH_RANK
MAX_DENSE_SIDE = 2 * MAX_SKETCH_ROWS + 1  # a dense side of at most this size is no larger than its sketch


def is_sketch(side: Tensor) -> bool:
    """Whether a Kronecker factor is a sketch, not a matrix (g, d, d) or a diagonal (g, d)."""
    return side.ndim == 3 and side.shape[1] != side.shape[2]


def sketch_rows(rows: Tensor) -> Tensor:
    """The sketch of ``rows^T rows`` for rows (n, d)."""
    if len(rows) > MAX_SKETCH_ROWS:
        generator = torch.Generator(rows.device).manual_seed(0)
        signs = torch.randint(2, (MAX_SKETCH_ROWS, len(rows)), generator=generator, device=rows.device)
        signs = signs.to(rows.dtype) * 2 - 1
        rows = matmul(signs, rows) / MAX_SKETCH_ROWS**0.5
    return torch.cat([rows, torch.zeros_like(rows[:1])])[None]


def add_moments(one: Tensor, other: Tensor) -> Tensor:
    """The sum of two moments of the same kind."""
    if not is_sketch(one):
        return one + other
    last = (one[:, -1:].square() + other[:, -1:].square()).sqrt()
    both = torch.cat([one[:, :-1], other[:, :-1], last], 1)
    return _compress_or(None, both) if both.shape[1] > 2 * MAX_SKETCH_ROWS else both


def add_moments_(total: Tensor, new: Tensor) -> Tensor:
    """The sum of two moments of one kind, in the memory of `total` unless these are sketches."""
    return add_moments(new, total) if is_sketch(total) else total.add_(new)


def fill_slot(side: Tensor, rank: int, size: int) -> Tensor:
    """Zeros with this sketch in slot `rank`: the sum over `size` processes holds the sketches of all."""
    small = compress(side)
    slots = small.new_zeros(size, 1, SKETCH_RANK + 1, side.shape[2])
    slots[rank, :, : small.shape[1] - 1], slots[rank, :, -1] = small[:, :-1], small[:, -1]
    return slots


def sum_slots(slots: Tensor) -> Tensor:
    """Add up the moments of all slots."""
    total = slots[0]
    for other in slots[1:]:
        total = add_moments(total, other)
    return total


def scale_moment(side: Tensor, factor: float | Tensor) -> Tensor:
    """A moment times a number."""
    return side * factor**0.5 if is_sketch(side) else side * factor


def average_moments(old: Tensor | None, new: Tensor, weight: float | Tensor) -> Tensor:
    """``(1 - weight) old + weight new``, or `new` if there is no old moment."""
    if not is_sketch(new):
        return new if old is None else old.lerp(new, weight)
    if old is not None:
        new = add_moments(scale_moment(old, 1 - weight), scale_moment(new, weight))
    return _compress_or(old, new)


def _compress_or(old: Tensor | None, sketch: Tensor) -> Tensor:
    """`compress`; if the decomposition fails, `old`, or without one a multiple of the identity of the same trace."""
    try:
        return compress(sketch)
    except torch.linalg.LinAlgError:
        count_recovery("diagonal" if old is None else "kept")
        if old is not None:
            return old
        identity = torch.zeros_like(sketch[:, : SKETCH_RANK + 1])
        identity[:, -1] = (sketch.square().sum() / sketch.shape[2]).sqrt()
        return identity


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


def moment_diagonal(side: Tensor) -> Tensor:
    """The diagonal (g, d) of a moment in any form."""
    if is_sketch(side):
        return side.square().sum(1)
    return side if side.ndim == 2 else side.diagonal(dim1=1, dim2=2)
