"""Second moments that are too large to write down: sums of outer products by few directions and the mean of the rest.

A sketch is a tensor S (1, r + 1, d) that stands for ``sum_k s_k s_k^T + |s_last|^2 / d I``, the first sum over all rows
but the last, which are orthogonal once they were `merged`. So the trace is the sum of its squares, and to scale the
matrix by c is to scale S by the root of c. Rows of a moment that is still to be merged have a last row of zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from curvature.linalg.decompositions import eigh, matmul, note

RANK = 128  # directions that are kept
ROWS = 2 * RANK  # of a batch; more are mixed with random signs, which leaves the expected moment as it is
SMALL = 2 * ROWS + 1  # sides up to this are no larger than their sketch may be


def is_sketch(side: Tensor) -> bool:
    """Whether a side of a Kronecker product is one, not a matrix (g, d, d) nor a diagonal (g, d)."""
    return side.ndim == 3 and side.shape[1] != side.shape[2]


def sketched(rows: Tensor) -> Tensor:
    """``rows^T rows`` for rows (n, d)."""
    if len(rows) > ROWS:
        generator = torch.Generator(rows.device).manual_seed(0)
        signs = torch.randint(2, (ROWS, len(rows)), generator=generator, device=rows.device).to(rows.dtype) * 2 - 1
        rows = matmul(signs, rows) / ROWS**0.5
    return torch.cat([rows, torch.zeros_like(rows[:1])])[None]


def added(one: Tensor, other: Tensor) -> Tensor:
    """The sum of two moments of one kind."""
    if not is_sketch(one):
        return one + other
    last = (one[:, -1:].square() + other[:, -1:].square()).sqrt()
    both = torch.cat([one[:, :-1], other[:, :-1], last], 1)
    return _merged_or(None, both) if both.shape[1] > 2 * ROWS else both


def slotted(side: Tensor, rank: int, size: int) -> Tensor:
    """One whose sum over `size` processes, this one being `rank`, holds those of all."""
    small = merged(side)
    slots = small.new_zeros(size, 1, RANK + 1, side.shape[2])
    slots[rank, :, : small.shape[1] - 1], slots[rank, :, -1] = small[:, :-1], small[:, -1]
    return slots


def gathered(slots: Tensor) -> Tensor:
    """The sum of the moments in the slots."""
    total = slots[0]
    for other in slots[1:]:
        total = added(total, other)
    return total


def scaled(side: Tensor, factor: float | Tensor) -> Tensor:
    """A side times a number."""
    return side * factor**0.5 if is_sketch(side) else side * factor


def mixed(old: Tensor | None, new: Tensor, weight: float | Tensor) -> Tensor:
    """``(1 - weight) old + weight new``, or `new` where there is no old one."""
    if not is_sketch(new):
        return new if old is None else old.lerp_(new, weight)
    return _merged_or(old, new if old is None else added(scaled(old, 1 - weight), scaled(new, weight)))


def _merged_or(old: Tensor | None, sketch: Tensor) -> Tensor:
    """`merged`; where the decomposition fails what there was, or a sketch of the trace alone."""
    try:
        return merged(sketch)
    except torch.linalg.LinAlgError:
        note("diagonal" if old is None else "kept")
        if old is not None:
            return old
        alone = torch.zeros_like(sketch[:, : RANK + 1])
        alone[:, -1] = (sketch.square().sum() / sketch.shape[2]).sqrt()
        return alone


def merged(sketch: Tensor) -> Tensor:
    """The same with at most `RANK` orthogonal rows, the largest first; what they leave out goes to the last row."""
    rows, rest = sketch[0, :-1], sketch[0, -1].square().sum()
    values, vectors = eigh(matmul(rows, rows.mT))
    kept = matmul(vectors[:, -RANK:].flip(1).mT, rows)
    rest = rest + (rows.square().sum() - kept.square().sum()).clamp(min=0)
    last = (rest / rows.shape[1]).sqrt().expand(1, rows.shape[1])
    return torch.cat([kept, last])[None]


def spectrum(sketch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of one that was merged: eigenvectors (d, r), their eigenvalues (r,), and that of all other directions."""
    rows, rest = sketch[0, :-1], sketch[0, -1].square().mean()
    squares = rows.square().sum(1)
    tiny = torch.finfo(rows.dtype).tiny ** 0.5
    # a row that is zero to rounding is no direction
    live = squares > torch.finfo(rows.dtype).eps * squares.sum()
    unit = torch.where(live[:, None], rows / squares.clamp(min=tiny).sqrt()[:, None], torch.zeros_like(rows))
    return unit.mT, torch.where(live, squares, torch.zeros_like(squares)) + rest, rest


def diagonal_of(side: Tensor) -> Tensor:
    """(g, d) of a side, however it is kept."""
    if is_sketch(side):
        return side.square().sum(1)
    return side if side.ndim == 2 else side.diagonal(dim1=1, dim2=2)
