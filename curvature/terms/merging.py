"""The same gradients in fewer terms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from curvature.terms.basic import OuterProduct
from curvature.terms.convolution import Convolution
from curvature.terms.row_slices import Term


def merge_places(terms: Sequence[Term]) -> list[Term]:
    """Merge terms that differ only in their places (a recurrent weight is read once per step)."""
    if len(terms) == 1:
        return list(terms)
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


def merge_terms(terms: Sequence[Term]) -> list[Term]:
    """The same gradients in as few terms as possible: reads of a matrix and of its transpose merge, too."""
    return merge_places([term.untransposed if isinstance(term, OuterProduct) else term for term in terms])


def sum_in_place(tensors: Iterable[Tensor]) -> Tensor:
    """The sum, accumulated in the first tensor."""
    first, *others = tensors
    for other in others:
        first += other
    return first
