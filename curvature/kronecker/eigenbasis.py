"""Diagonals in a basis: the corrected eigenvalues of Kronecker factors (arXiv:1806.03884, equation 11).

Indices: k vector, n sample, t place, g group, i input, o output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from curvature.kronecker.applied import two_sided
from curvature.kronecker.factors import Scheme
from curvature.linalg import matmul
from curvature.terms import (
    Convolution,
    DenseGradients,
    IndexedRows,
    OuterProduct,
    RowSlice,
    Term,
    TermsByVector,
    contractions,
    gradients,
    merge_places,
    squared_gradients,
    sum_in_place,
    unfold,
)

Biasless = IndexedRows | DenseGradients | RowSlice  # terms of parameters that no bias accompanies


@dataclass(frozen=True)
class Basis:
    """A basis for the gradients of one weight, with or without a bias, arranged as (g, o, i)."""

    scheme: Scheme  # how the weight is read
    rows: Tensor | None  # U_B, orthogonal, vectors as columns (g, o, o); None for the identity
    columns: Tensor | None  # U_A (g, i, i), or None

    def products(self, lefts: TermsByVector, rights: TermsByVector, weights: Tensor) -> Tensor:
        """``sum_kn weights[n] (U_B^T u_kn U_A) * (U_B^T w_kn U_A)`` entry by entry, u and w arranged as (g, o, i).

        Args:
            lefts, rights: the weight's terms of u and w for every vector; the same object where they are the same. A
                bias needs none of its own.
            weights: (N,).
        """
        same = rights is lefts
        lefts = [_merged(terms) for terms in lefts]
        rights = lefts if same else [_merged(terms) for terms in rights]
        if {len(terms) for terms in (*lefts, *rights)} != {1}:
            return self._from_gradients(lefts, rights, weights)
        first = lefts[0][0]
        reading = self.scheme.reading(first)
        if reading is None or reading.flipped:
            return self._from_gradients(lefts, rights, weights)
        is_outer, places = isinstance(first, OuterProduct | Convolution), first.places
        if is_outer and places <= min(self.scheme.arrangement.sides[1:]):  # fewer rotations than of gradients
            parts = self._parts(places, weights)
            return sum_in_place(self._from_places(lefts, rights, weights, part) for part in parts)
        # looked-up rows alone are rotated where the one-hot side stays as it is
        if isinstance(first, IndexedRows) and self.columns is None and places**2 <= math.prod(first.shape):
            return self._from_indexed_rows(lefts, rights, weights)
        return self._from_gradients(lefts, rights, weights)

    def carried(self, values: Tensor, old: Basis) -> Tensor:
        """The diagonal in this basis of the matrix that is diagonal in an old one, with `values` (g, o, i) there.

        The trace is kept.
        """
        rows, columns = (
            _squared_products(new, before, values.dtype)
            for new, before in ((self.rows, old.rows), (self.columns, old.columns))
        )
        return two_sided(rows, values, None if columns is None else columns.mT)

    def _parts(self, places: int, weights: Tensor) -> Iterator[slice]:
        """On a CPU, of as many samples as its cache holds when they are rotated at every place."""
        groups, outputs, inputs = self.scheme.arrangement.sides
        step = contractions.CHUNK_ELEMENTS // max(1, groups * places * max(inputs, (outputs + 1) * places))
        if weights.device.type == "cpu":
            step = min(step, contractions.CACHED_CHUNK_ELEMENTS // max(1, groups * places * max(inputs, outputs)))
        step = max(1, step)
        return (slice(start, start + step) for start in range(0, max(1, len(weights)), step))

    def _from_places(self, lefts: TermsByVector, rights: TermsByVector, weights: Tensor, part: slice) -> Tensor:
        """Of some samples, so few that `squared_gradients` can work with pairs of places."""
        a = self._activations(lefts[0][0].samples(part))
        ours = [[self._outer(a, term.samples(part))] for (term,) in lefts]
        theirs = ours if rights is lefts else [[self._outer(a, term.samples(part))] for (term,) in rights]
        return squared_gradients.sum_of_products(ours, theirs, weights[part])

    def turned(self, term: Term) -> OuterProduct:
        """A term of the weight, with what it brings of the bias, in this basis: gradients (N, g, o, i)."""
        return self._outer(self._activations(term), term)

    def _activations(self, term: Term) -> Tensor:
        """Rotated activations (n, t, g, i), with the input of a bias; the same for all vectors."""
        whole = unfold(term)
        assert isinstance(whole, OuterProduct)
        a = whole.a.to(self.scheme.dtype)
        if len(self.scheme.arrangement.shapes) > 1:
            a = F.pad(a, (0, 1), value=float(whole.has_bias))
        return _rotate(a, self.columns)

    def _outer(self, a: Tensor, term: Term) -> OuterProduct:
        b = _rotate(_backprops(term).to(self.scheme.dtype), self.rows)
        return OuterProduct(a, b, self.scheme.arrangement.sides)

    def _from_indexed_rows(self, lefts: TermsByVector, rights: TermsByVector, weights: Tensor) -> Tensor:
        first = lefts[0][0]
        assert isinstance(first, IndexedRows)

        def rotated(vectors: TermsByVector) -> list[list[Term]]:
            values = [_rotate(_backprops(term).to(self.scheme.dtype), self.rows)[:, :, 0] for (term,) in vectors]
            return [[replace(first, values=v)] for v in values]

        ours = rotated(lefts)
        return squared_gradients.sum_of_products(ours, ours if rights is lefts else rotated(rights), weights).T[None]

    def _from_gradients(self, lefts: TermsByVector, rights: TermsByVector, weights: Tensor) -> Tensor:
        """From the gradients themselves, by chunks of samples: on a CPU of as many as its cache holds."""
        total = torch.zeros(self.scheme.arrangement.sides, dtype=self.scheme.dtype, device=weights.device)
        for part in squared_gradients.parts(weights, self.scheme.arrangement.dimension):
            for us, ws in zip(lefts, rights, strict=True):
                x = self._gradients(us, part)
                y = x if ws is us else self._gradients(ws, part)
                total += torch.tensordot(weights[part].to(x.dtype), x * y, 1)
        return total

    def _gradients(self, terms: Sequence[Term], part: slice) -> Tensor:
        """Rotated gradients (n, g, o, i) of some samples; a bias is read only where the weight is."""
        some = [term.samples(part) for term in terms]
        parts = [gradients(some)]
        for shape in self.scheme.arrangement.shapes[1:]:
            bias = [_backprops(term).sum(1) for term in some if not isinstance(term, Biasless) and term.has_bias]
            parts.append(sum_in_place(bias).reshape(-1, *shape) if bias else parts[0].new_zeros(len(some[0]), *shape))
        x = self.scheme.arrangement.to_matrices([g.to(self.scheme.dtype) for g in parts])
        return two_sided(None if self.rows is None else self.rows.mT, x, self.columns)


def _squared_products(new: Tensor | None, old: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Squares of the inner products of the vectors of two bases; None where these are the same."""
    if new is old:
        return None
    if new is None or old is None:
        return cast("Tensor", old if new is None else new.mT).to(dtype).square()
    return matmul(new.to(dtype).mT, old.to(dtype)).square()


def _merged(terms: Sequence[Term]) -> list[Term]:
    """`merge_places`, unless the bias is added at some of the places only."""
    flags = {term.has_bias for term in terms if not isinstance(term, Biasless)}
    return list(terms) if len(flags) > 1 else merge_places(terms)


def _rotate(x: Tensor, side: Tensor | None) -> Tensor:
    """Vectors (n, t, g, d) in a basis (g, d, d)."""
    if side is None:
        return x
    return matmul(x.flatten(0, 1).transpose(0, 1), side).transpose(0, 1).unflatten(0, x.shape[:2])


def _backprops(term: Term) -> Tensor:
    """Backprops (n, t, g, o)."""
    assert not isinstance(term, DenseGradients | RowSlice)
    return term.backprops()
