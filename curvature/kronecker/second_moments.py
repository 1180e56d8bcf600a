"""Sums of outer products of rows, symmetric ones computed in parts."""

from __future__ import annotations

from torch import Tensor

from curvature.terms import sum_in_place

WHOLE_ELEMENTS = 1 << 19  # more are squared in parts, which take less memory
PARTS = 4
SYMMETRIC_MIN_COLUMNS, SYMMETRIC_MIN_ROWS = 256, 512  # size from which a symmetric product is computed in parts
SYMMETRIC_PARTS = 4


def second_moment(left: Tensor, right: Tensor, diagonal: bool) -> Tensor:
    """``sum_n left right^T``: (n, g, d) twice to (g, d, d), or to its diagonal (g, d)."""
    if diagonal or left.shape[2] == 1:
        size = max(1, -(-len(left) // PARTS)) if left.numel() > WHOLE_ELEMENTS else max(1, len(left))
        pairs = zip(left.split(size), right.split(size), strict=True)
        entries = sum_in_place((b * c).sum(0) for b, c in pairs)
        return entries if diagonal else entries[..., None]
    rows, columns = left.permute(1, 2, 0), right.transpose(0, 1)
    is_large = left.shape[0] >= SYMMETRIC_MIN_ROWS and left.shape[2] >= SYMMETRIC_MIN_COLUMNS
    return _symmetric(rows, columns) if left is right and is_large else rows @ columns


def _symmetric(left: Tensor, right: Tensor) -> Tensor:
    """The symmetric product ``left @ right`` of (g, d, n) and (g, n, d), three eighths of it by mirroring."""
    d = left.shape[1]
    found = left.new_empty(len(left), d, d)
    ends = [round(k * d / SYMMETRIC_PARTS) for k in range(SYMMETRIC_PARTS + 1)]
    for start, end in zip(ends, ends[1:], strict=False):
        found[:, start:end, :end] = left[:, start:end] @ right[:, :, :end]
        found[:, :start, start:end] = found[:, start:end, :start].mT
    return found


def has_few_rows(rows: Tensor) -> bool:
    """Whether the second moment of rows (n, g, d) is larger than they are."""
    return len(rows) < rows.shape[2]
