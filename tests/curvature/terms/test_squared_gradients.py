"""Sums of products of the gradients of several vectors, against gradients that are built one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from curvature.terms import Convolution, OuterProduct, StackedTerms, Term, contractions, joined, sum_of_products
from support.cases.case import seeded

pytestmark = pytest.mark.fast

N, VECTORS = 5, 3


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def convolved(groups: int, x: Tensor) -> Term:
    return Convolution(x, draw(N, 1, 6, 6, 5), (6, 4 // groups, 3, 3), (1, 1), (1, 1), groups, (1, 1, 1, 1))


def outer(groups: int, a: Tensor) -> Term:
    return OuterProduct(a, draw(N, a.shape[1], groups, 3), (groups * 3, 4))


def stacked(vectors: list[list[Term]]) -> StackedTerms:
    return StackedTerms(replace(vectors[0][0], b=torch.cat([term.b for (term,) in vectors])), VECTORS, N)


@pytest.mark.parametrize("chunk", [500, 1 << 24])
@pytest.mark.parametrize("is_square", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("places", ["pixels", 1, 2])
def test_sums_of_products(places, groups: int, is_square: bool, chunk: int, monkeypatch) -> None:
    monkeypatch.setattr(contractions, "CACHED_CHUNK_ELEMENTS", chunk)
    with seeded(0):
        data = draw(N, 1, 4, 6, 5) if places == "pixels" else draw(N, places, groups, 4)
        make = convolved if places == "pixels" else outer
        left, right = ([[make(groups, data)] for _ in range(VECTORS)] for _ in range(2))
        weights = torch.rand(N, dtype=torch.float64)
    right = left if is_square else right
    expected = sum(
        torch.tensordot(weights, u.gradients() * w.gradients(), 1) for (u,), (w,) in zip(left, right, strict=True)
    )
    torch.testing.assert_close(sum_of_products(left, right, weights, []), expected)
    stack = stacked(left)
    found = sum_of_products(stack, stack if is_square else stacked(right), weights, [])
    torch.testing.assert_close(found, expected)


def test_tensors_are_joined_without_a_copy_where_they_follow_each_other() -> None:
    whole = draw(4, 2, 3)
    assert joined(whole.unbind()).data_ptr() == whole.data_ptr()
    for parts in (whole.unbind()[::-1], whole.unbind()[::2], whole.mT.unbind(), [whole[0], whole[2], whole[1]]):
        torch.testing.assert_close(joined(parts), torch.cat(list(parts)), rtol=0, atol=0)
