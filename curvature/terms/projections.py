"""Linear maps of per-sample gradients as matrices (shape[0], all other axes), in single precision at least."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from curvature.terms.basic import DenseGradients, IndexedRows, OuterProduct
from curvature.terms.contractions import direct_forms, gradient_chunks, gradients, row_ranges
from curvature.terms.convolution import Convolution
from curvature.terms.term import Term, chunks, promote, sum_in_place

PIECE_ENTRIES = 1 << 20  # of the gradients that are built at a time

WithRows = OuterProduct | Convolution | IndexedRows | DenseGradients


class Piece(NamedTuple):
    """Entries ``start, start + 1, ...`` of the flattened gradients of some samples."""

    samples: slice
    start: int
    values: Tensor  # (samples, entries)


def project_sides(terms: Sequence[Term], left: Tensor, right: Tensor) -> Tensor:
    """``left g[n] right^T`` (N, k, l) for left (k, shape[0]) and right (l, all other axes)."""
    return sum_in_place(
        _project_sides(part.terms, left[:, part.start : part.stop], right) for part in row_ranges(terms)
    )


def _project_sides(terms: Sequence[Term], left: Tensor, right: Tensor) -> Tensor:
    with_rows = _with_rows(terms)
    if with_rows is not None:
        return sum_in_place(term.projected(left, right) for term in with_rows)
    shape = (left.shape[1], right.shape[1])
    built = (DenseGradients(g.reshape(-1, *shape)) for _, g in _built(terms))
    return torch.cat([term.projected(left, right) for term in built])


def pieces(terms: Sequence[Term]) -> Iterator[Piece]:
    """All entries of the per-sample gradients: some rows of all samples, or all rows of some."""
    for part in row_ranges(terms):
        count, rest = len(part.terms[0]), math.prod(part.terms[0].shape[1:])
        with_rows = _with_rows(part.terms)
        if with_rows is None:
            for samples, g in _built(part.terms):
                yield Piece(samples, part.start * rest, g.flatten(1))
            continue
        for rows in chunks(part.stop - part.start, PIECE_ENTRIES, count * rest):
            some = gradients([term.rows(rows.start, rows.stop) for term in with_rows])
            entries = (rows.stop - rows.start) * rest
            yield Piece(slice(0, count), (part.start + rows.start) * rest, some.reshape(count, entries))


def _with_rows(terms: Sequence[Term]) -> list[WithRows] | None:
    """The terms in as few as possible, if each of them can be had by rows."""
    found: list[WithRows] = []
    for direct in direct_forms(terms):
        term = promote(direct, torch.float32)
        if not isinstance(term, WithRows) or not term.has_rows:
            return None
        found.append(term)
    return found


def _built(terms: Sequence[Term]) -> Iterator[tuple[slice, Tensor]]:
    for part, g in gradient_chunks(terms, PIECE_ENTRIES):
        yield part, g.to(torch.promote_types(g.dtype, torch.float32))
