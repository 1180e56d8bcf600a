"""Norms and Gram matrices of gradients that nobody builds: inner products of pairs of places.

Of two places, that of the gradients is the product of that of their activations and that of their backprops
(arXiv:1510.01799 for one place, arXiv:2009.03106 for more).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from curvature.terms.basic import DenseGradients, IndexedRows, OuterProduct
from curvature.terms.convolution import Convolution
from curvature.terms.term import RowSlice, Term, chunks, merge_terms, sum_in_place, unfold

CHUNK_ELEMENTS = 1 << 24  # split the work if a temporary result has more elements
CACHED_CHUNK_ELEMENTS = 1 << 18  # likewise for results made in a loop, where fresh memory costs more than arithmetic
GRAM_ENTRY_COST = 350  # extra multiplications that an entry of a Gram matrix over places costs (measured, one thread)
CANCELLED = 10.0  # in roots of rounding: if a smaller share of inner products of places is left, it has too few digits
LARGEST_CANCELLED = 0.01  # that share in half precision


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
        found = (torch.linalg.vector_norm(terms[0].a, dim=3) * torch.linalg.vector_norm(terms[0].b, dim=3)).square()
        return found[:, 0, 0] if found.shape[1:].numel() == 1 else found.sum((1, 2)), None
    found, added = _pair_norms(terms[0], terms[0])
    for times, u, v in [(1 if u is v else 2, u, v) for k, u in enumerate(terms) for v in terms[k:]][1:]:
        products, bounds = _pair_norms(u, v)
        found, added = found + times * products, added + times * bounds
    share = min(LARGEST_CANCELLED, CANCELLED * torch.finfo(found.dtype).eps ** 0.5)
    return found.clamp(min=0), found < share * added


def _pair_norms(u: Term, v: Term) -> tuple[Tensor, Tensor]:
    """Sums (N,) of the inner products of a sample's places, and bounds of the sums of their absolute values."""
    parts = chunks(len(u), CHUNK_ELEMENTS, _form(u)[0] * u.places * v.places)
    if len(parts) > 1:
        found, added = zip(*(_pair_norms(u.samples(part), v.samples(part)) for part in parts), strict=True)
        return torch.cat(found), torch.cat(added)
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


def _mapped(term: Term, change: Callable[[Tensor], Tensor]) -> Term:
    """The term with other tensors of activations and backprops."""
    if isinstance(term, OuterProduct):
        return replace(term, a=change(term.a), b=change(term.b))
    assert isinstance(term, IndexedRows)
    return replace(term, index=change(term.index), values=change(term.values), valid=None)


def summed_pairs(left: Sequence[Term], right: Sequence[Term]) -> Tensor:
    """Inner products (N, M) of the gradients of two sets of samples."""
    left, right = (merge_terms([unfold(t) for t in terms]) for terms in (left, right))
    return sum_in_place(_pair_gram(u, v) for u in left for v in right)


def _pair_gram(u: Term, v: Term) -> Tensor:
    # one place at a time: summing over the last axis is slow
    single = [_mapped(v, lambda x, place=k: x[:, place]) for k in range(v.places)]  # type: ignore[misc]
    rows = []
    for part in chunks(len(u), CACHED_CHUNK_ELEMENTS, u.places * len(v)):
        flat = _mapped(u.samples(part), lambda x: x.flatten(0, 1))
        of_places = (torch.mul(*_grams(flat, other)).sum(-3) for other in single)  # (n * t, m), over groups
        rows.append(sum_in_place(x.unflatten(0, (part.stop - part.start, -1)).sum(1) for x in of_places))
    return torch.cat(rows)
