"""Sides of Kronecker products that are zero outside of diagonal blocks: to cut them up, and to put results together.

A cut is the numbers of rows of the blocks of a side, in their order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from curvature.kronecker.factors import Scheme

Cuts = Sequence[Sequence[int]]


def cuts_of(scheme: Scheme) -> list[tuple[int, ...]]:
    """The cuts of both sides of a product, of one number where a side is whole; a bias is one more row of the last."""
    biases = 0, len(scheme.arrangement.shapes) - 1
    sides = zip(scheme.widths, biases, scheme.sketched, scheme.diagonal, strict=True)
    return [_cut(width, bias, None if few or flat else scheme.block_size) for width, bias, few, flat in sides]


def _cut(width: int, bias: int, size: int | None) -> tuple[int, ...]:
    if size is None or width - bias <= size:
        return (width,)
    count, rest = divmod(width - bias, size)
    *others, last = [size] * count + [rest] * (rest > 0)
    return *others, last + bias


def parts_of(sides: Sequence[Tensor], cuts: Cuts) -> list[Tensor]:
    """The diagonal blocks (g, b, b) of all sides (g, d, d)."""
    return [
        side[:, end - size : end, end - size : end]
        for side, cut in zip(sides, cuts, strict=True)
        for size, end in zip(cut, itertools.accumulate(cut), strict=True)
    ]


def joined(made: Sequence[tuple[Tensor, ...]], cuts: Cuts) -> list[tuple[Tensor, ...]]:
    """Of each side, what was made of its parts: vectors (g, b) one after the other, matrices as diagonal blocks."""
    queue = iter(made)
    return [tuple(map(_together, zip(*itertools.islice(queue, len(cut)), strict=True))) for cut in cuts]


def _together(parts: Sequence[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    if parts[0].ndim == 2:
        return torch.cat(list(parts), 1)
    size = sum(part.shape[1] for part in parts)
    whole, end = parts[0].new_zeros(len(parts[0]), size, size), 0
    for part in parts:
        start, end = end, end + part.shape[1]
        whole[:, start:end, start:end] = part
    return whole
