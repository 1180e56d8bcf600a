"""Sums of outer products of rows, symmetric ones in parts; fewer samples where a mean needs no more rows."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from curvature.linalg import ByDevice
from curvature.terms import IndexedRows, sum_in_place

WHOLE_ELEMENTS = 1 << 19  # more are squared in parts, which take less memory
PARTS = 4
# Size from which a symmetric product is computed in parts; never on an accelerator
SYMMETRIC_MIN_COLUMNS, SYMMETRIC_MIN_ROWS, SYMMETRIC_MIN_ELEMENTS = 256, 128, ByDevice(1 << 16, sys.maxsize)
SYMMETRIC_PARTS = 4
# of a moment that are computed at a time where its rows are not next to each other
BLOCK_ELEMENTS = ByDevice(1 << 19, sys.maxsize)
COPIED_ELEMENTS = ByDevice(1 << 15, 1 << 20)  # of rows, up to which a copy of them costs less than some calls
ROWS_PER_INPUT = 8  # rows of activations, per column of their moment, that a running mean needs
MIN_SUBSAMPLE = 16  # samples that these rows come from, at least
ALIGNED_ENTRIES = 16  # of a row, that BLAS wants to begin at multiples of so many


def second_moment(left: Tensor, right: Tensor, diagonal: bool) -> Tensor:
    """``sum_n left right^T``: (n, g, d) twice to (g, d, d), or to its diagonal (g, d)."""
    if diagonal or left.shape[2] == 1:
        count = left.shape[0]
        size = -(-count // PARTS) if left.numel() > WHOLE_ELEMENTS else count
        pairs = zip(left.split(size), right.split(size), strict=True) if size < count else [(left, right)]
        entries = sum_in_place((b * c).sum(0) for b, c in pairs)
        return entries if diagonal else entries[..., None]
    rows, columns = left.permute(1, 2, 0), right.transpose(0, 1)
    if left is not right or not _is_large(left):
        return torch.bmm(rows, columns)
    return _fill_symmetric(left.new_empty(len(rows), rows.shape[1], rows.shape[1]), rows, columns)


def second_moment_with_constant(rows: Tensor, value: float) -> Tensor:
    """`second_moment` of rows (n, g, d), as if each had one more entry of this value, the last: (g, d + 1, d + 1).

    That entry takes no part in the product of many rows, and the result has space after each of its rows: where these
    begin at odd places in memory, the product takes up to three times as long.
    """
    groups, d = rows.shape[1:]
    if rows.numel() <= COPIED_ELEMENTS.at(rows.device):
        whole = F.pad(rows, (0, 1), value=value)
        return torch.bmm(whole.permute(1, 2, 0), whole.transpose(0, 1))
    stride = -(-(d + 1) // ALIGNED_ENTRIES) * ALIGNED_ENTRIES
    found = rows.new_empty(groups, d + 1, stride)[:, :, : d + 1]
    left, right, own = rows.permute(1, 2, 0), rows.transpose(0, 1), found[:, :-1, :-1]
    if _is_large(rows):
        _fill_symmetric(own, left, right)
    else:
        size = max(1, BLOCK_ELEMENTS.at(rows.device) // d)
        for start in range(0, d, size):
            torch.bmm(left[:, start : start + size], right, out=own[:, start : start + size])
    found[:, -1, :-1] = found[:, :-1, -1] = value * rows.sum(0)
    found[:, -1, -1].fill_(value**2 * rows.shape[0])
    return found


def _is_large(rows: Tensor) -> bool:
    count, _, columns = rows.shape
    is_large = count * columns >= SYMMETRIC_MIN_ELEMENTS.at(rows.device)
    return is_large and count >= SYMMETRIC_MIN_ROWS and columns >= SYMMETRIC_MIN_COLUMNS


def _fill_symmetric(found: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Fill with the symmetric product ``left @ right`` of (g, d, n) and (g, n, d), three eighths of it by mirroring."""
    ends = [round(k * left.shape[1] / SYMMETRIC_PARTS) for k in range(SYMMETRIC_PARTS + 1)]
    for start, end in zip(ends, ends[1:], strict=False):
        torch.bmm(left[:, start:end], right[:, :, :end], out=found[:, start:end, :end])
        found[:, :start, start:end] = found[:, start:end, :start].mT
    return found


def has_few_rows(rows: Tensor) -> bool:
    """Whether the second moment of rows (n, g, d) is larger than they are."""
    return rows.shape[0] < rows.shape[2]


def subsample_samples(terms: Sequence[Any], sharing: str, rank: int = 0, world_size: int = 1) -> Sequence[Any]:
    """Every k-th sample if there are many places for each input: the mean of `a a^T` needs no more.

    The mean over a batch is an estimate anyway, and enters a running mean. With several processes, whose parts of the
    batch are equal, the chosen samples together are those that one process would choose from the whole batch.
    """
    whole = [term for term in terms if not isinstance(term, IndexedRows)]
    if not whole:
        return terms
    inputs = math.prod(whole[0].shape) // (whole[0].groups * whole[0].outputs)
    rows = world_size * sum(len(term) * (term.places if sharing == "expand" else 1) for term in whole)
    stride = rows // (ROWS_PER_INPUT * inputs)
    stride = min([stride, *(world_size * len(term) // MIN_SUBSAMPLE for term in whole)])
    if stride < 2:
        return terms
    some = lambda term: term.samples(slice(-rank * len(term) % stride, None, stride))
    return [term if isinstance(term, IndexedRows) else some(term) for term in terms]
