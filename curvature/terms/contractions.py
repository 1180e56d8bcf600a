"""Gradients, norms, Gram matrices and linear maps of a sum of terms.

Norms and Gram matrices do without the gradients where inner products of pairs of places are cheaper. Of two places,
that of the gradients is the product of that of their activations and that of their backprops (arXiv:1510.01799 for one
place, arXiv:2009.03106 for more).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import reduce
from itertools import compress, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvature.terms.basic import DenseGradients, ElementwiseProduct, IndexedRows, OuterProduct, Samples, WithDirectForm
from curvature.terms.convolution import Convolution, TransposedConvolution

CHUNK_ELEMENTS = 1 << 24  # split the work if a temporary result has more elements
CACHED_CHUNK_ELEMENTS = 1 << 18  # likewise for results made in a loop, where fresh memory costs more than arithmetic
GRAM_ENTRY_COST = 350  # extra multiplications that an entry of a Gram matrix over places costs (measured, one thread)
CANCELLED = 10.0  # in roots of rounding: if a smaller share of inner products of places is left, it has too few digits
LARGEST_CANCELLED = 0.01  # that share in half precision
PRODUCT_ELEMENTS = 1 << 18  # of backprops that inner products take at a time ...
PRODUCT_PIECES = 4  # ... but not in more pieces than these
PIECE_ENTRIES = 1 << 20  # of the gradients that are built at a time

FRESH = OuterProduct | Convolution | IndexedRows  # terms that make their gradients anew
WithRows = OuterProduct | Convolution | IndexedRows | DenseGradients  # terms that may be had by rows


@dataclass(frozen=True)
class RowSlice:
    """`term` holds the gradients of rows ``start, start + 1, ...`` of a parameter of `shape`."""

    term: OuterProduct | Convolution | TransposedConvolution | IndexedRows | DenseGradients | ElementwiseProduct
    start: int
    shape: tuple[int, ...]

    @property
    def device(self) -> torch.device:
        return self.term.device

    @property
    def places(self) -> int:
        return self.term.places

    @property
    def rows(self) -> tuple[int, int]:
        """First row, and one past the last."""
        return self.start, self.start + self.term.shape[0]

    def __len__(self) -> int:
        return len(self.term)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        inner = self.term.weighted_sum(weights)
        out = inner.new_zeros(self.shape)
        out[slice(*self.rows)] = inner
        return out

    def inner_products(self, vector: Tensor) -> Tensor:
        return self.term.inner_products(vector.view(self.shape)[slice(*self.rows)])

    def place_products(self, vector: Tensor) -> Tensor:
        return self.term.place_products(vector.view(self.shape)[slice(*self.rows)])

    def gradients(self) -> Tensor:
        inner = self.term.gradients()
        out = inner.new_zeros(len(inner), *self.shape)
        out[:, slice(*self.rows)] = inner
        return out

    def samples(self, part: Samples) -> RowSlice:
        return replace(self, term=self.term.samples(part))


Term = OuterProduct | Convolution | TransposedConvolution | IndexedRows | DenseGradients | ElementwiseProduct | RowSlice
TermsByVector = Sequence[Sequence[Term]]  # for each vector, the terms of one parameter


def to_device(term: Any, device: torch.device | str) -> Any:
    """The term with its tensors detached and on `device`."""
    if isinstance(term, Tensor):
        return term.detach().to(device)
    if not is_dataclass(term) or isinstance(term, type):
        return term
    return replace(term, **{f.name: to_device(getattr(term, f.name), device) for f in fields(term)})


def merge_places(terms: Sequence[Term]) -> list[Term]:
    """Merge terms that differ only in their places (a recurrent weight is read once per step)."""
    if len(terms) == 1:
        return list(terms)
    out: list[Term] = []
    groups: dict[Any, list[OuterProduct]] = {}
    for term in terms:
        if isinstance(term, OuterProduct):
            groups.setdefault(term.form, []).append(term)
        else:
            out.append(term)
    for group in groups.values():
        one = group[0]
        if len(group) > 1:
            one = replace(one, a=torch.cat([u.a for u in group], 1), b=torch.cat([u.b for u in group], 1))
        out.append(one)
    return out


def unfold(term: Term) -> Term:
    """A convolution as the outer product of its patches; other terms unchanged."""
    return term.unfold() if isinstance(term, Convolution) else term


def merge_terms(terms: Sequence[Term]) -> list[Term]:
    """The same gradients in as few terms as possible: reads of a matrix and of its transpose merge, too."""
    return merge_places([term.untransposed if isinstance(term, OuterProduct) else term for term in terms])


def sum_in_place(tensors: Iterable[Tensor]) -> Tensor:
    """The sum, accumulated in the first tensor."""
    others = iter(tensors)
    total = next(others)
    for other in others:
        total += other
    return total


def chunks(count: int, most: int, each: int = 1) -> list[slice]:
    """Ranges of samples with no more than `most` entries, of which each sample has so many."""
    step = max(1, most // max(1, each))
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


class RowRange(NamedTuple):
    """Rows start to stop of a parameter and their terms."""

    start: int
    stop: int
    terms: Sequence[Term]


class Piece(NamedTuple):
    """Entries ``start, start + 1, ...`` of the flattened gradients of some samples."""

    samples: slice
    start: int
    values: Tensor  # (samples, entries)


def row_ranges(terms: Sequence[Term]) -> list[RowRange]:
    """The disjoint row ranges of a parameter that are read separately, in order; else one range with all terms."""
    whole = RowRange(0, terms[0].shape[0] if terms[0].shape else 1, terms)
    if RowSlice not in map(type, terms):
        return [whole]
    terms_of_rows: dict[tuple[int, int], list[Term]] = {}
    for term in terms:
        rows = term.rows if isinstance(term, RowSlice) else (whole.start, whole.stop)
        terms_of_rows.setdefault(rows, []).append(term.term if isinstance(term, RowSlice) else term)
    ordered = sorted(terms_of_rows)
    apart = all(one[1] <= other[0] for one, other in pairwise(ordered))
    return [RowRange(*rows, terms_of_rows[rows]) for rows in ordered] if apart else [whole]


def gradients(terms: Sequence[Term]) -> Tensor:
    """Per-sample gradients (N, *shape): the sum of the terms."""
    if len(terms) == 1:
        return terms[0].gradients()
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


def promote(term: Term, dtype: torch.dtype) -> Term:
    """Raise tensors of lower precision to `dtype`: under autocast, the two sides of a term differ."""
    if isinstance(term, RowSlice):
        inner = promote(term.term, dtype)
        assert not isinstance(inner, RowSlice)
        return replace(term, term=inner)
    known = {k: x for k, x in vars(term).items() if isinstance(x, Tensor) and x.is_floating_point()}
    low = {k: x for k, x in known.items() if torch.promote_types(x.dtype, dtype) != x.dtype}
    raised: dict[str, Any] = {k: x.to(torch.promote_types(x.dtype, dtype)) for k, x in low.items()}
    return replace(term, **raised) if raised else term


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
    """What `settle` makes `norms_squared` of, for each range of rows; on an accelerator the host does not wait."""
    return [_tentative_norms(direct_forms(piece.terms)) for piece in row_ranges(terms)]


def tentative_gram(terms: Sequence[Term]) -> list[Tentative]:
    """The same for inner products (N, N), whose errors relative to both norms are those of `norms_squared`."""
    return [_tentative_gram(direct_forms(piece.terms)) for piece in row_ranges(terms)]


def settle(parameters: Iterable[Sequence[Tentative]]) -> list[Tensor]:
    """The right values for each parameter; the host waits for the device once, not for each of them."""
    parameters = list(parameters)
    doubtful = [(x, x.cancelled.any()) for tentative in parameters for x in tentative if x.cancelled is not None]
    flags = [flag.to(doubtful[0][1].device) for _, flag in doubtful]
    for x, _ in compress(doubtful, torch.stack(flags).tolist() if flags else ()):
        x.settle()
    return [sum_in_place(x.values for x in tentative) for tentative in parameters]


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
    values = sum_pairs(terms, terms)

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
    return settle(map(tentative_norms_squared, parameters))


def cross_gram(left: Sequence[Term], right: Sequence[Term]) -> Tensor:
    """Inner products (N, M) between the gradients of two sets of samples."""
    left, right = direct_forms(left), direct_forms(right)
    if all(
        gram_cheaper_by_pairs(terms, samples=max(len(left[0]), len(right[0])))
        for terms in (left, right, [*left, *right])
    ):
        gram = sum_pairs(left, right)
        for products, terms, others in ((gram, left, right), (gram.T, right, left)):
            _, cancelled = norms_by_pairs(terms)
            if cancelled is not None and len(some := cancelled.nonzero()[:, 0]):
                products[some] = _by_gradients(terms, some, others)
        return gram
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
    built = (DenseGradients(g.reshape(-1, *shape)) for _, g in _build_gradients(terms))
    return torch.cat([term.projected(left, right) for term in built])


def pieces(terms: Sequence[Term]) -> Iterator[Piece]:
    """All entries of the per-sample gradients: some rows of all samples, or all rows of some."""
    for part in row_ranges(terms):
        count, rest = len(part.terms[0]), math.prod(part.terms[0].shape[1:])
        with_rows = _with_rows(part.terms)
        if with_rows is None:
            for samples, g in _build_gradients(part.terms):
                yield Piece(samples, part.start * rest, g.flatten(1))
            continue
        for rows in chunks(part.stop - part.start, PIECE_ENTRIES, count * rest):
            some = gradients([term.rows(rows.start, rows.stop) for term in with_rows])
            entries = (rows.stop - rows.start) * rest
            yield Piece(slice(0, count), (part.start + rows.start) * rest, some.reshape(count, entries))


def _with_rows(terms: Sequence[Term]) -> list[WithRows] | None:
    """The terms in as few as possible, if each of them can be had by rows."""
    with_rows: list[WithRows] = []
    for direct in direct_forms(terms):
        term = promote(direct, torch.float32)
        if not isinstance(term, WithRows) or not term.has_rows:
            return None
        with_rows.append(term)
    return with_rows


def _build_gradients(terms: Sequence[Term]) -> Iterator[tuple[slice, Tensor]]:
    for part, g in gradient_chunks(terms, PIECE_ENTRIES):
        yield part, g.to(torch.promote_types(g.dtype, torch.float32))


def stack_terms(parts: Sequence[Sequence[Any]]) -> list[Term] | None:
    """Concatenate the samples of all parts; None if their terms differ in form."""
    stacked: list[Term] = []
    if len({len(terms) for terms in parts}) > 1:
        return None
    for column in zip(*parts, strict=True):
        kinds = set(map(type, column))
        if kinds == {OuterProduct} and len({(term.form, term.b.shape[1:]) for term in column}) == 1:
            a, b = torch.cat([term.a for term in column]), torch.cat([term.b for term in column])
            stacked.append(replace(column[0], a=a, b=b))
        elif kinds == {DenseGradients}:
            stacked.append(DenseGradients(torch.cat([term.values for term in column])))
        else:
            return None
    return stacked


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


def norms_cheaper_by_pairs(terms: Sequence[Term]) -> bool:
    """Whether norms by pairs of places need fewer multiplications: (sum of t)^2 * (i + o) and not t * numel."""
    if not _have_pairs(terms):
        return False
    first, places = terms[0], sum(u.places for u in terms)
    width = first.gram_cost if len(terms) == 1 and isinstance(first, Convolution) else max(_form(u)[1] for u in terms)
    return places == len(terms) == 1 or places * width <= math.prod(first.shape)


def gram_cheaper_by_pairs(terms: Sequence[Term], samples: int) -> bool:
    """The same for inner products of this many samples: each pair of them has all pairs of places."""
    if not _have_pairs(terms):
        return False
    places = sum(u.places for u in terms)
    each = 2 * max(_form(u)[1] for u in terms) + GRAM_ENTRY_COST
    return places * places * each * samples <= 2 * (places + samples) * math.prod(terms[0].shape)


def _have_pairs(terms: Sequence[Term]) -> bool:
    """Terms of different axis orders can only be compared entry by entry."""
    if not {DenseGradients, RowSlice}.isdisjoint(map(type, terms)):
        return False
    return len(terms) == 1 or not any(groups > 1 or permuted for groups, _, permuted in map(_form, terms))


def _form(term: Term) -> tuple[int, int, bool]:
    """Groups, inputs plus outputs over all groups, and whether the axes are permuted."""
    if isinstance(term, OuterProduct):
        groups = term.b.shape[2]
        return groups, groups * (term.a.shape[3] + term.b.shape[3]), term.order is not None
    if isinstance(term, Convolution):
        return term.groups, term.shape[0] + term.groups * math.prod(term.shape[1:]), False
    return 1, term.shape[-1] + 1, False


def norms_by_pairs(terms: Sequence[Term]) -> tuple[Tensor, Tensor | None]:
    """Squared norms (N,), and of which samples too little is left of what they sum, a mask (N,); None: of none."""
    if len(terms) > 1:
        terms = merge_terms([unfold(t) for t in terms])
    if len(terms) == 1 and isinstance(terms[0], OuterProduct) and terms[0].places == 1:  # nothing can cancel
        squares = (torch.linalg.vector_norm(terms[0].a, dim=3) * torch.linalg.vector_norm(terms[0].b, dim=3)).square()
        return squares[:, 0, 0] if squares.shape[1:].numel() == 1 else squares.sum((1, 2)), None
    squares, added = _pair_norms(terms[0], terms[0])
    for times, u, v in [(1 if u is v else 2, u, v) for k, u in enumerate(terms) for v in terms[k:]][1:]:
        products, bounds = _pair_norms(u, v)
        squares, added = squares + times * products, added + times * bounds
    share = min(LARGEST_CANCELLED, CANCELLED * torch.finfo(squares.dtype).eps ** 0.5)
    return squares.clamp(min=0), squares < share * added


def _pair_norms(u: Term, v: Term) -> tuple[Tensor, Tensor]:
    """Sums (N,) of the inner products of a sample's places, and bounds of the sums of their absolute values."""
    parts = chunks(len(u), CHUNK_ELEMENTS, _form(u)[0] * u.places * v.places)
    if len(parts) > 1:
        squares, added = zip(*(_pair_norms(u.samples(part), v.samples(part)) for part in parts), strict=True)
        return torch.cat(squares), torch.cat(added)
    left, right = (x.flatten(1) for x in (u.grams() if isinstance(u, Convolution) else _grams(u, v)))
    norms = [torch.linalg.vector_norm(x, dim=1) for x in (left, right)]
    return torch.linalg.vecdot(left, right), norms[0] * norms[1]


def _grams(u: Term, v: Term) -> tuple[Tensor, Tensor]:
    """Inner products of activations, and of backprops, at p places of u and q places of v, (..., g, p, q)."""
    if isinstance(u, OuterProduct) and isinstance(v, OuterProduct):
        ua, ub, va, vb = (x.transpose(-3, -2) for x in (u.a, u.b, v.a, v.b))
        return ua @ va.mT, ub @ vb.mT
    if isinstance(u, IndexedRows) and isinstance(v, IndexedRows):
        values = u.values @ v.values.mT
        same = u.index[..., :, None] == v.index[..., None, :]
        return same.to(values.dtype)[..., None, :, :], values[..., None, :, :]
    if isinstance(u, OuterProduct):
        left, right = _grams(v, u)
        return left.mT, right.mT
    assert isinstance(u, IndexedRows) and isinstance(v, OuterProduct)
    places = v.b.shape[-3]
    index = u.index[..., None, :].expand(*u.index.shape[:-1], places, u.index.shape[-1])
    left, right = u.values @ v.a[..., 0, :].mT, torch.gather(v.b[..., 0, :], -1, index).mT
    return left[..., None, :, :], right[..., None, :, :]


def _map_tensors(term: Term, change: Callable[[Tensor], Tensor]) -> Term:
    """The term with other tensors of activations and backprops."""
    if isinstance(term, OuterProduct):
        return replace(term, a=change(term.a), b=change(term.b))
    assert isinstance(term, IndexedRows)
    return replace(term, index=change(term.index), values=change(term.values), valid=None)


def sum_pairs(left: Sequence[Term], right: Sequence[Term]) -> Tensor:
    """Inner products (N, M) of the gradients of two sets of samples."""
    left, right = (merge_terms([unfold(t) for t in terms]) for terms in (left, right))
    return sum_in_place(_pair_gram(u, v) for u in left for v in right)


def _pair_gram(u: Term, v: Term) -> Tensor:
    # one place at a time: summing over the last axis is slow
    single = [_map_tensors(v, lambda x, place=k: x[:, place]) for k in range(v.places)]  # type: ignore[misc]
    rows = []
    for part in chunks(len(u), CACHED_CHUNK_ELEMENTS, u.places * len(v)):
        flat = _map_tensors(u.samples(part), lambda x: x.flatten(0, 1))
        of_places = (torch.mul(*_grams(flat, other)).sum(-3) for other in single)  # (n * t, m), over groups
        rows.append(sum_in_place(x.unflatten(0, (part.stop - part.start, -1)).sum(1) for x in of_places))
    return torch.cat(rows)


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
