"""Gradients, norms and Gram matrices of a sum of terms; without the gradients where pairs of places are cheaper."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import compress, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvature.terms import pairs
from curvature.terms.basic import DenseGradients, IndexedRows, OuterProduct, WithDirectForm
from curvature.terms.convolution import Convolution
from curvature.terms.pairs import gram_cheaper_by_pairs, norms_by_pairs, norms_cheaper_by_pairs, summed_pairs
from curvature.terms.term import RowSlice, Term, chunks, merge_terms, sum_in_place

CHUNK_ELEMENTS, CACHED_CHUNK_ELEMENTS = pairs.CHUNK_ELEMENTS, pairs.CACHED_CHUNK_ELEMENTS
PRODUCT_ELEMENTS = 1 << 18  # of backprops that inner products take at a time ...
PRODUCT_PIECES = 4  # ... but not in more pieces than these

FRESH = OuterProduct | Convolution | IndexedRows  # terms that make their gradients anew


class RowRange(NamedTuple):
    """Rows start to stop of a parameter and their terms."""

    start: int
    stop: int
    terms: Sequence[Term]


def row_ranges(terms: Sequence[Term]) -> list[RowRange]:
    """The disjoint row ranges of a parameter that are read separately, in order; else one range with all terms."""
    whole = RowRange(0, terms[0].shape[0] if terms[0].shape else 1, terms)
    if RowSlice not in map(type, terms):
        return [whole]
    found: dict[tuple[int, int], list[Term]] = {}
    for term in terms:
        rows = term.rows if isinstance(term, RowSlice) else (whole.start, whole.stop)
        found.setdefault(rows, []).append(term.term if isinstance(term, RowSlice) else term)
    ordered = sorted(found)
    apart = all(one[1] <= other[0] for one, other in pairwise(ordered))
    return [RowRange(*rows, found[rows]) for rows in ordered] if apart else [whole]


def name_of_rows(name: str, start: int, stop: int) -> str:
    """The name of some rows of a parameter."""
    return f"{name}[{start}:{stop}]"


def gradients(terms: Sequence[Term]) -> Tensor:
    """Per-sample gradients (N, *shape): the sum of the terms."""
    if len(terms) == 1:
        (term,) = terms
        return (term.untransposed if isinstance(term, OuterProduct) else term).gradients()
    first, *others = sorted(merge_terms(terms), key=lambda term: not isinstance(term, RowSlice))
    out = first.gradients()
    if others and not isinstance(first, FRESH | RowSlice):
        out = out.clone()
    for other in others:
        if isinstance(other, RowSlice):
            out[:, slice(*other.rows)] += other.term.gradients()
        else:
            g = other.gradients()
            out = out.add_(g) if out.dtype == g.dtype else out + g
    return out


def weighted_sum(terms: Sequence[Term], weights: Tensor) -> Tensor:
    """``sum_n weights[n] g[n]``, of the parameter's shape, without the per-sample gradients."""
    return reduce(torch.add, (term.weighted_sum(weights) for term in merge_terms(terms)))


@dataclass
class Tentative:
    """Norms or inner products of gradients with some rows of a parameter, wrong where places of a sample cancel."""

    values: Tensor
    cancelled: Tensor | None = None  # a mask (N,) of these samples; None: of none
    correct: Callable[[Tensor], None] | None = None  # enters what the gradients themselves give for some samples

    def __post_init__(self) -> None:
        """On a CPU it costs nothing to look at the mask, and terms need not stay in memory; nor without a mask."""
        if self.cancelled is None or self.values.device.type == "cpu":
            self.settle()

    def settle(self) -> None:
        """Correct values; the terms are let go."""
        if self.cancelled is not None and self.correct is not None and len(some := self.cancelled.nonzero()[:, 0]):
            self.correct(some)
        self.cancelled = self.correct = None


def tentative_norms_squared(terms: Sequence[Term]) -> list[Tentative]:
    """What `settled` makes `norms_squared` of, for each range of rows; on an accelerator the host does not wait."""
    return [_tentative_norms(direct_forms(piece.terms)) for piece in row_ranges(terms)]


def tentative_gram(terms: Sequence[Term]) -> list[Tentative]:
    """The same for inner products (N, N), whose errors relative to both norms are those of `norms_squared`."""
    return [_tentative_gram(direct_forms(piece.terms)) for piece in row_ranges(terms)]


def settled(parameters: Iterable[Sequence[Tentative]]) -> list[Tensor]:
    """The right values for each parameter; the host waits for the device once, not for each of them."""
    parameters = list(parameters)
    doubtful = [(x, x.cancelled.any()) for own in parameters for x in own if x.cancelled is not None]
    flags = [flag.to(doubtful[0][1].device) for _, flag in doubtful]
    for x, _ in compress(doubtful, torch.stack(flags).tolist() if flags else ()):
        x.settle()
    return [sum_in_place(x.values for x in own) for own in parameters]


def _tentative_norms(terms: list[Term]) -> Tentative:
    if not norms_cheaper_by_pairs(terms):
        return Tentative(_norms_by_gradients(terms))
    values, cancelled = norms_by_pairs(terms)

    def correct(some: Tensor) -> None:
        values[some] = _norms_by_gradients([term.samples(some) for term in terms])

    return Tentative(values, cancelled, correct)


def _tentative_gram(terms: list[Term]) -> Tentative:
    if not gram_cheaper_by_pairs(terms, samples=len(terms[0])):
        flat = _rows(gradients(terms))
        return Tentative(flat @ flat.T)
    values = summed_pairs(terms, terms)

    def correct(some: Tensor) -> None:
        values[some] = _by_gradients(terms, some, terms)
        values[:, some] = values[some].T

    return Tentative(values, norms_by_pairs(terms)[1], correct)


def norms_squared(terms: Sequence[Term]) -> Tensor:
    """Squared norms (N,); relative errors are at most about the root of rounding (3e-4 in single precision)."""
    return each_norms_squared([terms])[0]


def least_norms_squared(terms: Sequence[Term]) -> Tensor:
    """`norms_squared`, or zero for samples whose places cancel."""
    return sum_in_place(
        x.values if x.cancelled is None else x.values.masked_fill(x.cancelled, 0)
        for x in tentative_norms_squared(terms)
    )


def each_norms_squared(parameters: Iterable[Sequence[Term]]) -> list[Tensor]:
    """`norms_squared` of the terms of each parameter; the host waits for the device once, not for each of them."""
    return settled(map(tentative_norms_squared, parameters))


def cross_gram(left: Sequence[Term], right: Sequence[Term]) -> Tensor:
    """Inner products (N, M) between the gradients of two sets of samples."""
    left, right = direct_forms(left), direct_forms(right)
    if all(
        gram_cheaper_by_pairs(terms, samples=max(len(left[0]), len(right[0])))
        for terms in (left, right, [*left, *right])
    ):
        found = summed_pairs(left, right)
        for products, terms, others in ((found, left, right), (found.T, right, left)):
            _, cancelled = norms_by_pairs(terms)
            if cancelled is not None and len(some := cancelled.nonzero()[:, 0]):
                products[some] = _by_gradients(terms, some, others)
        return found
    return _rows(gradients(left)) @ _rows(gradients(right)).mT


def inner_products(terms: Sequence[Term], vector: Tensor) -> Tensor:
    """Inner products (N,) of the per-sample gradients with a tensor of the parameter's shape."""
    return sum_in_place(_inner_products(u, vector) for u in direct_forms(terms))


def _inner_products(term: Term, vector: Tensor) -> Tensor:
    """Some samples at a time: what is made of them is as large as their backprops."""
    pieces = 1
    if isinstance(term, OuterProduct | Convolution):
        pieces = min(len(term), PRODUCT_PIECES, math.ceil(term.b.numel() / PRODUCT_ELEMENTS))
    if pieces <= 1:
        return term.inner_products(vector)
    parts = chunks(len(term), math.ceil(len(term) / pieces))
    return torch.cat([term.samples(part).inner_products(vector) for part in parts])


def stack_terms(parts: Sequence[Sequence[Any]]) -> list[Term] | None:
    """Concatenate the samples of all parts; None if their terms differ in form."""
    found: list[Term] = []
    if len({len(terms) for terms in parts}) > 1:
        return None
    for column in zip(*parts, strict=True):
        kinds = set(map(type, column))
        if kinds == {OuterProduct} and len({(term.form, term.b.shape[1:]) for term in column}) == 1:
            a, b = torch.cat([term.a for term in column]), torch.cat([term.b for term in column])
            found.append(replace(column[0], a=a, b=b))
        elif kinds == {DenseGradients}:
            found.append(DenseGradients(torch.cat([term.values for term in column])))
        else:
            return None
    return found


def direct_forms(terms: Sequence[Term]) -> list[Term]:
    """The terms in the form that is fastest to sum."""
    return [term.direct if isinstance(term, WithDirectForm) else term for term in merge_terms(terms)]


def gradient_chunks(terms: Sequence[Term], most: int) -> Iterator[tuple[slice, Tensor]]:
    """The gradients for some samples at a time, and which samples: no more than `most` entries."""
    parts = chunks(len(terms[0]), most, math.prod(terms[0].shape)) or [slice(0, 0)]
    for part in parts:
        yield part, gradients(terms if len(parts) == 1 else [term.samples(part) for term in terms])


def _norms_by_gradients(terms: Sequence[Term]) -> Tensor:
    norms = [torch.linalg.vector_norm(_rows(g), dim=1) for _, g in gradient_chunks(terms, CHUNK_ELEMENTS)]
    return (norms[0] if len(norms) == 1 else torch.cat(norms)).square()


def _by_gradients(left: Sequence[Term], where: Tensor, right: Sequence[Term]) -> Tensor:
    """Inner products of some samples of the left with all of the right."""
    some = _rows(gradients([term.samples(where) for term in left]))
    return torch.cat([some @ _rows(g).T for _, g in gradient_chunks(right, CHUNK_ELEMENTS)], 1)


def _rows(g: Tensor) -> Tensor:
    """(N, *shape) as (N, P), also without samples; complex ones as pairs of real numbers."""
    g = torch.view_as_real(g.resolve_conj()) if g.is_complex() else g
    return g.reshape(g.shape[0], math.prod(g.shape[1:]))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The tensors one after the other, as `torch.cat` has them, but without a copy where they are so in memory."""
    first = parts[0]
    memory, size = first.untyped_storage().data_ptr(), first.numel()
    follows = all(
        x.shape == first.shape
        and x.is_contiguous()
        and x.untyped_storage().data_ptr() == memory
        and x.storage_offset() == first.storage_offset() + k * size
        for k, x in enumerate(parts)
    )
    if not follows or first.requires_grad:
        return torch.cat(list(parts))
    return first.as_strided((len(parts) * len(first), *first.shape[1:]), first.stride())
