"""Second moments that are too large to write down: sums of outer products by few directions and the mean of the rest.

A sketch is a tensor S (1, r + 1, d) that stands for ``sum_k s_k s_k^T + |s_last|^2 / d I``, the first sum over all rows
but the last, which are orthogonal after `compress`. So the trace is the sum of its squares, and to scale the
matrix by c is to scale S by the root of c. Before that, the last row is zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvature.linalg.decompositions import count_recovery, matmul, psd_eigh

SKETCH_RANK = 128  # directions that are kept
# Rows of a batch: more are mixed with random signs, which leaves the expected moment as it is.
MAX_SKETCH_ROWS = 2 * SKETCH_RANK
MAX_DENSE_SIDE = 2 * MAX_SKETCH_ROWS + 1  # sides up to this are no larger than their sketch may be


def is_sketch(side: Tensor) -> bool:
    """Whether a side of a Kronecker product is one, not a matrix (g, d, d) nor a diagonal (g, d)."""
    return side.ndim == 3 and side.shape[1] != side.shape[2]


def sketch_rows(rows: Tensor) -> Tensor:
    """``rows^T rows`` for rows (n, d)."""
    if len(rows) > MAX_SKETCH_ROWS:
        generator = torch.Generator(rows.device).manual_seed(0)
        signs = torch.randint(2, (MAX_SKETCH_ROWS, len(rows)), generator=generator, device=rows.device)
        signs = signs.to(rows.dtype) * 2 - 1
        rows = matmul(signs, rows) / MAX_SKETCH_ROWS**0.5
    return torch.cat([rows, torch.zeros_like(rows[:1])])[None]


def add_moments(one: Tensor, other: Tensor) -> Tensor:
    """The sum of two moments of one kind."""
    if not is_sketch(one):
        return one + other
    last = (one[:, -1:].square() + other[:, -1:].square()).sqrt()
    both = torch.cat([one[:, :-1], other[:, :-1], last], 1)
    return _compress_or(None, both) if both.shape[1] > 2 * MAX_SKETCH_ROWS else both


def add_moments_(total: Tensor, new: Tensor) -> Tensor:
    """The sum of two moments of one kind, in the memory of `total` unless these are sketches."""
    return add_moments(new, total) if is_sketch(total) else total.add_(new)


def fill_slot(side: Tensor, rank: int, size: int) -> Tensor:
    """One whose sum over `size` processes, this one being `rank`, holds those of all."""
    small = compress(side)
    slots = small.new_zeros(size, 1, SKETCH_RANK + 1, side.shape[2])
    slots[rank, :, : small.shape[1] - 1], slots[rank, :, -1] = small[:, :-1], small[:, -1]
    return slots


def sum_slots(slots: Tensor) -> Tensor:
    """The sum of the moments in the slots."""
    total = slots[0]
    for other in slots[1:]:
        total = add_moments(total, other)
    return total


def scale_moment(side: Tensor, factor: float | Tensor) -> Tensor:
    """A side times a number."""
    return side * factor**0.5 if is_sketch(side) else side * factor


def average_moments(old: Tensor | None, new: Tensor, weight: float | Tensor) -> Tensor:
    """``(1 - weight) old + weight new``, or `new` where there is no old one."""
    if not is_sketch(new):
        return new if old is None else old.lerp_(new, weight)
    if old is not None:
        new = add_moments(scale_moment(old, 1 - weight), scale_moment(new, weight))
    return _compress_or(old, new)


def _compress_or(old: Tensor | None, sketch: Tensor) -> Tensor:
    """`compress`; where the decomposition fails what there was, or a sketch of the trace alone."""
    try:
        return compress(sketch)
    except torch.linalg.LinAlgError:
        count_recovery("diagonal" if old is None else "kept")
        if old is not None:
            return old
        alone = torch.zeros_like(sketch[:, : SKETCH_RANK + 1])
        alone[:, -1] = (sketch.square().sum() / sketch.shape[2]).sqrt()
        return alone


def compress(sketch: Tensor) -> Tensor:
    """At most `SKETCH_RANK` orthogonal rows, the largest first; the last row takes what they leave out."""
    rows, rest = sketch[0, :-1], sketch[0, -1].square().sum()
    values, vectors = psd_eigh(matmul(rows, rows.mT))
    kept = matmul(vectors[:, -SKETCH_RANK:].flip(1).mT, rows)
    rest = rest + (rows.square().sum() - kept.square().sum()).clamp(min=0)
    last = (rest / rows.shape[1]).sqrt().expand(1, rows.shape[1])
    return torch.cat([kept, last])[None]


def sketch_spectrum(sketch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of one that was merged: eigenvectors (d, r), their eigenvalues (r,), and that of all other directions."""
    rows, rest = sketch[0, :-1], sketch[0, -1].square().mean()
    squares = rows.square().sum(1)
    tiny = torch.finfo(rows.dtype).tiny ** 0.5
    # a row that is zero to rounding is no direction
    live = squares > torch.finfo(rows.dtype).eps * squares.sum()
    unit = torch.where(live[:, None], rows / squares.clamp(min=tiny).sqrt()[:, None], torch.zeros_like(rows))
    return unit.mT, torch.where(live, squares, torch.zeros_like(squares)) + rest, rest


def moment_diagonal(side: Tensor) -> Tensor:
    """(g, d) of a side, however it is kept."""
    if is_sketch(side):
        return side.square().sum(1)
    return side if side.ndim == 2 else side.diagonal(dim1=1, dim2=2)
