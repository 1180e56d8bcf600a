"""The terms of several vectors at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from curvature.terms.basic import DenseGradients, ElementwiseProduct, IndexedRows, OuterProduct
from curvature.terms.convolution import Convolution, TransposedConvolution
from curvature.terms.row_slices import Term

Stackable = OuterProduct | Convolution | TransposedConvolution | IndexedRows | DenseGradients | ElementwiseProduct


class StackedTerms(Sequence[list[Term]]):
    """The terms of one parameter for several vectors that share a pass: one each, made when it is asked for.

    Args:
        term: has what all vectors share, of N samples, and the backprops of k N, those of the first vector first.
        vectors: k.
        samples: N.
    """

    def __init__(self, term: Stackable, vectors: int, samples: int) -> None:
        self.term, self.vectors, self.samples = term, vectors, samples

    def __len__(self) -> int:
        return self.vectors

    def __getitem__(self, k: Any) -> Any:
        if isinstance(k, slice):
            return [self[j] for j in range(self.vectors)[k]]
        start = range(self.vectors)[k] * self.samples
        if self.vectors == 1:
            return [self.term]
        return [_with_backprops(self.term, slice(start, start + self.samples))]


def _with_backprops(term: Any, part: slice) -> Any:
    """The term with some of its backprops, and all else that it has."""
    if isinstance(term, DenseGradients):
        return term.samples(part)
    if isinstance(term, IndexedRows):
        return replace(term, values=term.values[part])
    if isinstance(term, ElementwiseProduct):
        return replace(term, direct=term.direct.samples(part), b=term.b[part])
    if isinstance(term, TransposedConvolution):
        return replace(term, direct=replace(term.direct, source=term.direct.source[part]))
    return replace(term, b=term.b[part])
