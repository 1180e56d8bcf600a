"""What all terms have in common: rows of a parameter, several vectors, precision, fewer terms of the same sum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from curvature.terms.basic import DenseGradients, ElementwiseProduct, IndexedRows, OuterProduct, Samples
from curvature.terms.convolution import Convolution, TransposedConvolution


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
