"""Diagonals: ``sum_n weights[n] sum_k u_kn * w_kn`` of per-sample gradients u and w of k vectors.

The sum over places is inside each factor: ``(sum_t b a)^2``, not ``sum_t b^2 a^2``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from curvature.terms import contractions
from curvature.terms.basic import DenseGradients, IndexedRows, OuterProduct
from curvature.terms.contractions import Term, TermsByVector, chunks, gradients, merge_places, sum_in_place, unfold
from curvature.terms.convolution import Convolution

PATCH_CHUNKS = 4  # by how much more entries are made at a time in products with patches, which take fewer calls then


def sum_of_products(
    left: TermsByVector, right: TermsByVector, weights: Tensor, patches: list[Tensor] | None = None
) -> Tensor:
    """``sum_kn weights[n] u_kn * w_kn``, of the parameter's shape, in memory of its own.

    `left` and `right` are the same object where they are equal. One call fills `patches` with the activations that it
    has unfolded, for the next one with other vectors sent back through the same pass.
    """
    patches = [] if patches is None else patches
    lefts = [merge_places(terms) for terms in left]
    rights = lefts if right is left else [merge_places(terms) for terms in right]
    alone = {len(terms) for terms in (*lefts, *rights)} == {1}
    first = lefts[0][0]
    if alone and isinstance(first, OuterProduct | Convolution) and _are_few_places(first, len(weights), len(lefts)):
        outer = [cast("OuterProduct", unfold(term)) for (term,) in lefts]
        others = outer if rights is lefts else [cast("OuterProduct", unfold(term)) for (term,) in rights]
        return _from_place_pairs(outer, others, weights)
    if alone and isinstance(first, IndexedRows):
        return _from_indexed_rows(lefts, rights, weights)
    if alone and isinstance(first, DenseGradients):
        values: Any = ([term.values for (term,) in terms] for terms in (lefts, rights))  # type: ignore[union-attr]
        both = _products(zip(*values, strict=True))
        return torch.tensordot(weights.to(both.dtype), both, 1)
    if alone and isinstance(first, Convolution):
        return _from_convolutions(lefts, rights, weights, patches)
    return _from_gradients(lefts, rights, weights)


def sum_of_squares(terms: Sequence[Term]) -> Tensor:
    """``sum_n g_n^2``, of the parameter's shape."""
    vectors, count = [terms], len(terms[0])
    return sum_of_products(vectors, vectors, torch.ones(count, dtype=torch.float32, device=terms[0].device))


def _products(pairs: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
    """``sum_k u_k w_k``, in memory of its own."""
    total = torch.mul(*next(pairs))
    for pair in pairs:  # all products at once would be as large as the backprops
        total.addcmul_(*pair)
    return total


def _are_few_places(term: OuterProduct | Convolution, samples: int, vectors: int) -> bool:
    """Whether places are no more than vectors, and products of pairs of them fit into memory."""
    pairs = term.places**2 * samples * (term.outputs + 1) * term.groups
    return term.places <= vectors and pairs <= contractions.CHUNK_ELEMENTS


def _from_place_pairs(left: list[OuterProduct], right: list[OuterProduct], weights: Tensor) -> Tensor:
    """Sum over vectors before multiplying by activations: cheaper if a sample has fewer places than vectors."""
    first = left[0]
    both = _products((u.b[:, :, None], w.b[:, None]) for u, w in zip(left, right, strict=True))
    both *= weights.to(both.dtype)[:, None, None, None, None]
    a = first.a
    inputs = (a[:, :, None] * a[:, None, :]).flatten(0, 2)
    blocks = both.flatten(0, 2).permute(1, 2, 0) @ inputs.transpose(0, 1)
    return first.assemble(blocks[None])[0]


def _from_indexed_rows(left: list[list[Term]], right: list[list[Term]], weights: Tensor) -> Tensor:
    """Add up rows that a sample looks up several times first; build no table per sample."""
    first = left[0][0]
    assert isinstance(first, IndexedRows)
    rows = first.shape[0]
    samples = torch.arange(len(first.index), device=first.index.device)
    numbers, which = _number_keys((samples[:, None] * rows + first.index).flatten())  # a sample and its row

    def sums(term: Term) -> Tensor:
        assert isinstance(term, IndexedRows)
        wide = torch.promote_types(term.values.dtype, torch.float32)
        new = term.values.new_zeros(len(numbers), term.values.shape[-1], dtype=wide)
        return new.index_add_(0, which, term.values.flatten(0, 1).to(wide))

    products = _products((x := sums(u), x if w is u else sums(w)) for (u,), (w,) in zip(left, right, strict=True))
    products *= weights.to(products.dtype)[numbers // rows, None]
    return products.new_zeros(first.shape).index_add_(0, numbers % rows, products)


def _number_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Different keys with zeros after them, and the number of each key among them; unlike `torch.unique`, no wait."""
    ordered, order = keys.sort()
    numbers = torch.cat([keys.new_zeros(1), (ordered[1:] != ordered[:-1]).cumsum(0)])[: len(keys)]
    return torch.zeros_like(keys).scatter_(0, numbers, ordered), torch.empty_like(keys).scatter_(0, order, numbers)


def _from_gradients(left: list[list[Term]], right: list[list[Term]], weights: Tensor) -> Tensor:
    """Build the gradients of a few samples at a time: on a CPU of as many as its cache holds, for all vectors."""

    def of_samples(part: slice) -> Tensor:
        products = None
        for us, ws in zip(left, right, strict=True):
            x = gradients([term.samples(part) for term in us])
            y = x if ws is us else gradients([term.samples(part) for term in ws])
            if products is not None:
                products.addcmul_(x, y)
            else:
                products = x.mul_(y) if isinstance(us[0], contractions.FRESH) else x * y
        assert products is not None
        return torch.tensordot(weights[part].to(products.dtype), products, 1)

    return sum_in_place(map(of_samples, parts(weights, math.prod(left[0][0].shape))))


def parts(weights: Tensor, each: int) -> list[slice]:
    """Samples of which so many entries each are made at a time."""
    is_cpu = weights.device.type == "cpu"
    most = contractions.CACHED_CHUNK_ELEMENTS if is_cpu else contractions.CHUNK_ELEMENTS
    return chunks(len(weights), most, each)


def _from_convolutions(left: TermsByVector, right: TermsByVector, weights: Tensor, patches: list[Tensor]) -> Tensor:
    """One product with a sample's patches for all vectors."""
    first = left[0][0]
    assert isinstance(first, Convolution)
    places, unfolded = first.places, first.groups * first.places * math.prod(first.shape[1:])
    keeps_patches = unfolded * len(weights) <= contractions.CHUNK_ELEMENTS
    if keeps_patches and not patches:
        patches.append(next(first.activations())[1])
    each = len(left) * max(math.prod(first.shape), first.shape[0] * places)

    def of_samples(part: slice) -> Tensor:
        a = patches[0][part] if keeps_patches else next(first.samples(part).activations())[1]
        x = _times_patches(left, part, a)
        products = x.square_() if right is left else x.mul_(_times_patches(right, part, a))
        return torch.tensordot(weights[part].to(products.dtype), products, 1)

    total = sum_in_place(map(of_samples, parts(weights, max(each, 0 if keeps_patches else unfolded) // PATCH_CHUNKS)))
    return total.sum(2).mT.reshape(first.shape)


def _times_patches(vectors: TermsByVector, part: slice, a: Tensor) -> Tensor:
    """Gradients (n, g, i, k, o) for k vectors from the patches (n, t, g, i) of some samples."""
    k = len(vectors)
    rows = [cast("Convolution", term).samples(part).backprops().permute(0, 2, 3, 1) for (term,) in vectors]
    b = rows[0] if len(rows) == 1 else torch.cat(rows, 2)
    return (a.permute(0, 2, 3, 1) @ b.mT).unflatten(3, (k, -1))
