"""Linear maps of per-sample gradients: of both sides of them as matrices, or of pieces of bounded size.

A parameter is seen as a matrix (shape[0], all other axes). The map does not depend on the terms that it is computed
from. Results are in single precision at least.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from curvature.terms.basic import DenseGradients, IndexedRows, OuterProduct
from curvature.terms.contractions import direct_forms, gradients, row_ranges
from curvature.terms.convolution import Convolution
from curvature.terms.term import Term, promote, sum_in_place

PIECE_ENTRIES = 1 << 20  # of the gradients that are built at a time

WithRows = OuterProduct | Convolution | IndexedRows | DenseGradients


class Piece(NamedTuple):
    """Entries ``start, start + 1, ...`` of the flattened gradients of some samples."""

    samples: slice
    start: int
    values: Tensor  # (samples, entries)


def project_sides(terms: Sequence[Term], left: Tensor, right: Tensor) -> Tensor:
    """``left g[n] right^T`` (N, k, l): the sum over places of projected backprops and activations.

    Args:
        left, right: (k, shape[0]) and (l, all other axes).

    Gradients of parameters that are not read by rows (groups, more axes) are built, some samples at a time.
    """
    return sum_in_place(
        _project_sides(part.terms, left[:, part.start : part.stop], right) for part in row_ranges(terms)
    )


def _project_sides(terms: Sequence[Term], left: Tensor, right: Tensor) -> Tensor:
    with_rows = _with_rows(terms)
    if with_rows is not None:
        return sum_in_place(term.projected(left, right) for term in with_rows)
    shape = (left.shape[1], right.shape[1])
    built = (DenseGradients(g.reshape(-1, *shape)) for _, g in _by_samples(terms))
    return torch.cat([term.projected(left, right) for term in built])


def pieces(terms: Sequence[Term]) -> Iterator[Piece]:
    """All entries of the per-sample gradients: some rows of all samples, or all rows of some."""
    for part in row_ranges(terms):
        count, rest = len(part.terms[0]), math.prod(part.terms[0].shape[1:])
        with_rows = _with_rows(part.terms)
        if with_rows is None:
            for samples, g in _by_samples(part.terms):
                yield Piece(samples, part.start * rest, g.flatten(1))
            continue
        step = max(1, PIECE_ENTRIES // max(1, count * rest))
        for start in range(part.start, part.stop, step):
            stop = min(start + step, part.stop)
            some = gradients([term.rows(start - part.start, stop - part.start) for term in with_rows])
            yield Piece(slice(0, count), start * rest, some.reshape(count, (stop - start) * rest))


def _with_rows(terms: Sequence[Term]) -> list[WithRows] | None:
    """The terms in as few as possible, if each of them can be had by rows."""
    found: list[WithRows] = []
    for direct in direct_forms(terms):
        term = promote(direct, torch.float32)
        if not isinstance(term, WithRows) or not term.has_rows:
            return None
        found.append(term)
    return found


def _by_samples(terms: Sequence[Term]) -> Iterator[tuple[slice, Tensor]]:
    """The gradients of a bounded number of samples at a time."""
    count, step = len(terms[0]), max(1, PIECE_ENTRIES // max(1, math.prod(terms[0].shape)))
    for start in range(0, max(1, count), step):
        part = slice(start, min(start + step, count))
        found = gradients([term.samples(part) for term in terms])
        yield part, found.to(torch.promote_types(found.dtype, torch.float32))
