"""Gradients, norms and Gram matrices of a sum of terms.

Norms and Gram matrices do not build the gradients if inner products of activations and of backprops are cheaper
(arXiv:1510.01799 for one place, arXiv:2009.03106 for more).

Indices: n sample, t place, g group, i input, o output.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import compress, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from curvature.terms.basic import DenseGradients, ElementwiseProduct, IndexedRows, OuterProduct
from curvature.terms.convolution import Convolution, TransposedConvolution
from curvature.terms.row_slices import RowSlice, Term

CHUNK_ELEMENTS = 1 << 24  # split the work if a temporary result has more elements
CACHED_CHUNK_ELEMENTS = 1 << 18  # likewise for results made in a loop, where fresh memory costs more than arithmetic
GRAM_ENTRY_COST = 350  # extra multiplications that an entry of a Gram matrix over places costs (measured, one thread)
CANCELLED = 10.0  # in roots of rounding: if a smaller share of inner products of places is left, it has too few digits
LARGEST_CANCELLED = 0.01  # that share in half precision
PRODUCT_ELEMENTS = 1 << 18  # of backprops that inner products take at a time ...
PRODUCT_PIECES = 4  # ... but not in more pieces than these


class RowRange(NamedTuple):
    """Rows start to stop of a parameter and their terms."""

    start: int
    stop: int
    terms: Sequence[Term]


class Norms(NamedTuple):
    """Squared norms (N,), and of which samples too little is left of what they sum, a mask (N,); None: of none."""

    squares: Tensor
    cancelled: Tensor | None = None

    def where(self) -> Tensor:
        """Indices of these samples."""
        if self.cancelled is None:
            return torch.empty(0, dtype=torch.long, device=self.squares.device)
        return self.cancelled.nonzero()[:, 0]


def row_ranges(terms: Sequence[Term]) -> list[RowRange]:
    """The disjoint row ranges of a parameter that are read separately, in order; else one range with the given terms.

    Rows outside all ranges are never read.
    """
    found: dict[tuple[int, int], list[Term]] = {}
    for term in terms:
        if isinstance(term, RowSlice):
            found.setdefault(term.rows, []).append(term.term)
        else:
            found.setdefault((0, term.shape[0] if term.shape else 1), []).append(term)
    ordered = sorted(found)
    apart = all(one[1] <= other[0] for one, other in pairwise(ordered))
    if not apart or not any(isinstance(term, RowSlice) for term in terms):
        return [RowRange(0, terms[0].shape[0] if terms[0].shape else 1, terms)]
    return [RowRange(*rows, found[rows]) for rows in ordered]


def name_of_rows(name: str, start: int, stop: int) -> str:
    """The name of some rows of a parameter."""
    return f"{name}[{start}:{stop}]"


def merge_places(terms: Sequence[Term]) -> list[Term]:
    """Merge terms that differ only in their places (a recurrent weight is read once per step)."""
    out: list[Term] = []
    groups: list[list[OuterProduct]] = []
    for term in terms:
        if not isinstance(term, OuterProduct):
            out.append(term)
            continue
        for group in groups:
            if group[0].merges_with(term):
                group.append(term)
                break
        else:
            groups.append([term])
    for group in groups:
        one = group[0]
        if len(group) > 1:
            one = replace(one, a=torch.cat([u.a for u in group], 1), b=torch.cat([u.b for u in group], 1))
        out.append(one)
    return out


def unfold(term: Term) -> Term:
    """A convolution as the outer product of its patches; other terms unchanged."""
    return term.unfold() if isinstance(term, Convolution) else term


def gradients(terms: Sequence[Term]) -> Tensor:
    """Per-sample gradients (N, *shape): the sum of the terms."""
    unsliced = merge_terms([term for term in terms if not isinstance(term, RowSlice)])
    parts = [term for term in terms if isinstance(term, RowSlice)]
    if parts:
        found = [term.term.gradients() for term in parts]
        out = found[0].new_zeros(len(found[0]), *parts[0].shape)
        for term, g in zip(parts, found, strict=True):
            out[:, slice(*term.rows)] += g
    else:
        out = unsliced.pop(0).gradients()
    for other in unsliced:
        out = out + other.gradients()
    return out


def weighted_sum(terms: Sequence[Term], weights: Tensor) -> Tensor:
    """``sum_n weights[n] g[n]``, of the parameter's shape, without the per-sample gradients."""
    first, *others = (term.weighted_sum(weights) for term in merge_terms(terms))
    for other in others:
        first = first + other
    return first


def norms_squared(terms: Sequence[Term]) -> Tensor:
    """Squared norms (N,) of the per-sample gradients, which are built only if that is cheaper.

    Or if the places of a sample cancel, so that relative errors are at most about the root of rounding (3e-4 in single
    precision), or those of the gradients themselves.
    """
    return each_norms_squared([terms])[0]


def each_norms_squared(parameters: Iterable[Sequence[Term]]) -> list[Tensor]:
    """`norms_squared` of the terms of each parameter; the host waits for the device once, not for each of them."""
    ranges = [[direct_forms(piece.terms) for piece in row_ranges(terms)] for terms in parameters]
    found = [[_norms_at_once(terms) for terms in own] for own in ranges]
    for terms, norms in _with_cancelled(ranges, found):
        where = norms.where()
        norms.squares[where] = _norms_by_gradients([term.samples(where) for term in terms])
    return [sum_in_place(norms.squares for norms in own) for own in found]


def _with_cancelled(
    ranges: Sequence[Sequence[list[Term]]], found: Sequence[Sequence[Norms]]
) -> list[tuple[list[Term], Norms]]:
    """The terms, and their norms, of which too little is left for some samples."""
    both = [pair for own in zip(ranges, found, strict=True) for pair in zip(*own, strict=True)]
    both = [(terms, norms) for terms, norms in both if norms.cancelled is not None]
    flags = [norms.cancelled.any() for _, norms in both if norms.cancelled is not None]
    are_any = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist() if flags else []
    return list(compress(both, are_any))


def gram(terms: Sequence[Term]) -> Tensor:
    """Inner products (N, N) of the per-sample gradients; errors relative to both norms as those of `norms_squared`."""
    apart = row_ranges(terms)
    if apart[0].terms is not terms:
        return sum_in_place(gram(piece.terms) for piece in apart)
    terms = direct_forms(terms)
    n = len(terms[0])
    if _pairs_cheaper(terms, samples=n):
        found, where = _summed_pairs(terms, terms), _norms_by_pairs(terms).where()
        if len(where):
            found[where] = _by_gradients(terms, where, terms)
            found[:, where] = found[where].T
        return found
    flat = _rows(gradients(terms))
    return flat @ flat.T


def cross_gram(left: Sequence[Term], right: Sequence[Term]) -> Tensor:
    """Inner products (N, M) between the gradients of two sets of samples."""
    left, right = direct_forms(left), direct_forms(right)
    if all(_pairs_cheaper(terms, samples=max(len(left[0]), len(right[0]))) for terms in (left, right, [*left, *right])):
        found = _summed_pairs(left, right)
        rows, columns = (_norms_by_pairs(terms).where() for terms in (left, right))
        if len(rows):
            found[rows] = _by_gradients(left, rows, right)
        if len(columns):
            found[:, columns] = _by_gradients(right, columns, left).T
        return found
    return _rows(gradients(left)) @ _rows(gradients(right)).mT


def inner_products(terms: Sequence[Term], vector: Tensor) -> Tensor:
    """Inner products (N,) of the per-sample gradients with a tensor of the parameter's shape."""
    return sum_in_place(_inner_products(u, vector) for u in direct_forms(terms))


def _inner_products(term: Term, vector: Tensor) -> Tensor:
    """Some samples at a time: what is made of them is as large as their backprops."""
    samples = len(term)
    if not isinstance(term, OuterProduct | Convolution):
        return term.inner_products(vector)
    pieces = min(samples, PRODUCT_PIECES, -(-term.b.numel() // PRODUCT_ELEMENTS))
    if pieces <= 1:
        return term.inner_products(vector)
    size = -(-samples // pieces)
    parts = (slice(start, start + size) for start in range(0, samples, size))
    return torch.cat([term.samples(part).inner_products(vector) for part in parts])


def stack_terms(parts: Sequence[Sequence[Term]]) -> list[Term] | None:
    """Concatenate the samples of all parts; None if their terms differ in form."""
    found: list[Term] = []
    if len({len(terms) for terms in parts}) > 1:
        return None
    for column in zip(*parts, strict=True):
        outers = [term for term in column if isinstance(term, OuterProduct)]
        denses = [term for term in column if isinstance(term, DenseGradients)]
        if len(outers) == len(column) and all(outers[0].stacks_with(term) for term in outers):
            a, b = torch.cat([term.a for term in outers]), torch.cat([term.b for term in outers])
            found.append(replace(outers[0], a=a, b=b))
        elif len(denses) == len(column):
            found.append(DenseGradients(torch.cat([term.values for term in denses])))
        else:
            return None
    return found


def merge_terms(terms: Sequence[Term]) -> list[Term]:
    """The same gradients in as few terms as possible: reads of a matrix and of its transpose merge, too."""
    return merge_places([term.untransposed if isinstance(term, OuterProduct) else term for term in terms])


def direct_forms(terms: Sequence[Term]) -> list[Term]:
    """The terms in the form that is fastest to sum."""
    return [t.direct if isinstance(t, TransposedConvolution | ElementwiseProduct) else t for t in merge_terms(terms)]


def _form(term: Term) -> tuple[int, int, bool]:
    """Groups, inputs plus outputs over all groups, and whether the axes are permuted."""
    if isinstance(term, OuterProduct):
        groups = term.b.shape[2]
        return groups, groups * (term.a.shape[3] + term.b.shape[3]), term.order is not None
    if isinstance(term, Convolution):
        return term.groups, term.shape[0] + term.groups * math.prod(term.shape[1:]), False
    return 1, term.shape[-1] + 1, False


def _pairs_cheaper(terms: Sequence[Term], samples: int) -> bool:
    """Whether inner products over pairs of places need fewer operations than building the gradients.

    Building costs t * numel multiplications per sample; pairs cost (sum of t)^2 * (i + o) per pair of samples. With one
    place and one term, pairs always win.
    """
    if any(isinstance(u, DenseGradients | RowSlice) for u in terms):
        return False
    forms = [_form(u) for u in terms]
    if len(terms) > 1 and any(groups > 1 or permuted for groups, _, permuted in forms):
        return False  # terms of different axis orders can only be compared entry by entry
    places = sum(u.places for u in terms)
    width = max(width for _, width, _ in forms)
    each = width if samples == 1 else 2 * width + GRAM_ENTRY_COST
    return places * places * each * samples <= 2 * (places + samples) * math.prod(terms[0].shape)


def _gradient_chunks(terms: Sequence[Term]) -> Iterator[Tensor]:
    """Build the gradients for a bounded number of samples at a time."""
    step = max(1, CHUNK_ELEMENTS // max(1, math.prod(terms[0].shape)))
    for start in range(0, max(1, len(terms[0])), step):
        yield gradients([u.samples(slice(start, start + step)) for u in terms])


def _kernel(u: Term, v: Term) -> Tensor:
    """Inner products of single places, summed over groups: p places of u, q places of v, to (..., p, q).

    Outer products hold (..., p, g, i) and (..., p, g, o); indexed rows (..., p) and (..., p, width).
    """
    if isinstance(u, OuterProduct) and isinstance(v, OuterProduct):
        ua, ub, va, vb = (x.movedim(-2, 0) for x in (u.a, u.b, v.a, v.b))
        return ((ua @ va.mT) * (ub @ vb.mT)).sum(0)
    if isinstance(u, IndexedRows) and isinstance(v, IndexedRows):
        return (u.values @ v.values.mT) * (u.index[..., :, None] == v.index[..., None, :])
    if isinstance(u, OuterProduct):
        return _kernel(v, u).mT
    assert isinstance(u, IndexedRows) and isinstance(v, OuterProduct)
    places = v.b.shape[-3]
    index = u.index[..., None, :].expand(*u.index.shape[:-1], places, u.index.shape[-1])
    return (u.values @ v.a[..., 0, :].mT) * torch.gather(v.b[..., 0, :], -1, index).mT


def _norms_by_gradients(terms: Sequence[Term]) -> Tensor:
    return torch.cat([torch.linalg.vector_norm(_rows(g), dim=1).square() for g in _gradient_chunks(terms)])


def _by_gradients(left: Sequence[Term], where: Tensor, right: Sequence[Term]) -> Tensor:
    """Inner products of some samples of the left with all of the right."""
    some = _rows(gradients([term.samples(where) for term in left]))
    return torch.cat([some @ _rows(g).T for g in _gradient_chunks(right)], 1)


def _rows(g: Tensor) -> Tensor:
    """(N, *shape) as (N, P), also without samples."""
    return g.reshape(len(g), math.prod(g.shape[1:]))


def _norms_at_once(terms: Sequence[Term]) -> Norms:
    return _norms_by_pairs(terms) if _pairs_cheaper(terms, samples=1) else Norms(_norms_by_gradients(terms))


def _norms_by_pairs(terms: Sequence[Term]) -> Norms:
    """From inner products of places."""
    terms = merge_terms([unfold(t) for t in terms])
    if len(terms) == 1 and isinstance(terms[0], OuterProduct) and terms[0].places == 1:  # nothing can cancel
        a, b = terms[0].a, terms[0].b
        return Norms((a.square().sum(3) * b.square().sum(3)).sum((1, 2)))
    pairs = [(_pair_norms(u, v), 1 if u is v else 2) for k, u in enumerate(terms) for v in terms[k:]]
    found, added = (sum_in_place(times * both[k] for both, times in pairs) for k in (0, 1))
    share = min(LARGEST_CANCELLED, CANCELLED * torch.finfo(found.dtype).eps ** 0.5)
    return Norms(found.clamp(min=0), found < share * added)


def _pair_norms(u: Term, v: Term) -> tuple[Tensor, Tensor]:
    """Sums (N,) of the inner products of a sample's places, and of their absolute values."""
    step = max(1, CHUNK_ELEMENTS // max(1, u.places * v.places))
    parts = (slice(k, k + step) for k in range(0, max(1, len(u)), step))
    kernels = (_kernel(u.samples(part), v.samples(part)) for part in parts)
    pairs = [(kernel.sum((1, 2)), kernel.abs().sum((1, 2))) for kernel in kernels]
    found, added = zip(*pairs, strict=True)
    return torch.cat(found), torch.cat(added)


def _flat(term: Term) -> Term:
    """Flatten samples and places into one axis."""
    if isinstance(term, OuterProduct):
        return replace(term, a=term.a.flatten(0, 1), b=term.b.flatten(0, 1))
    assert isinstance(term, IndexedRows)
    return replace(term, index=term.index.flatten(), values=term.values.flatten(0, 1), valid=None)


def _summed_pairs(left: Sequence[Term], right: Sequence[Term]) -> Tensor:
    left, right = (merge_terms([unfold(t) for t in terms]) for terms in (left, right))
    return sum_in_place(_pair_gram(u, v) for u in left for v in right)


def _pair_gram(u: Term, v: Term) -> Tensor:
    n, m = len(u), len(v)
    single = [_flat(_place(v, k)) for k in range(v.places)]  # one place at a time: summing over the last axis is slow
    step = max(1, CACHED_CHUNK_ELEMENTS // max(1, u.places * m))
    rows = []
    for start in range(0, n, step):
        part = u.samples(slice(start, start + step))
        flat = _flat(part)
        rows.append(sum_in_place(_kernel(flat, other).unflatten(0, (len(part), -1)).sum(1) for other in single))
    return torch.cat(rows)


def _place(term: Term, k: int) -> Term:
    """The term at place k alone."""
    if isinstance(term, OuterProduct):
        return replace(term, a=term.a[:, k : k + 1], b=term.b[:, k : k + 1])
    assert isinstance(term, IndexedRows)
    return replace(term, index=term.index[:, k : k + 1], values=term.values[:, k : k + 1], valid=None)


def sum_in_place(tensors: Iterable[Tensor]) -> Tensor:
    """The sum, accumulated in the first tensor."""
    first, *others = tensors
    for other in others:
        first += other
    return first


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
