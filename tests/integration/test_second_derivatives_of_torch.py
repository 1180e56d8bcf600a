"""Functions of torch whose second derivative is not finite or not there, where the first one is fine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvature
from support.cases.case import Raw

pytestmark = [pytest.mark.fast, pytest.mark.usefixtures("double")]
ENTROPY = nn.CrossEntropyLoss()


def spread_of_one(m: Any, x: Tensor) -> Tensor:
    """Torch's gradient of a standard deviation that is zero is zero, its derivative is not finite."""
    h = m.a(x)
    return m.b(h / (1 + h[..., :1].std(-1, unbiased=False, keepdim=True)))


NOT_FINITE = {
    "a spread of one entry": spread_of_one,
    "logcumsumexp": lambda m, x: m.b(m.a(x)[:, None].expand(-1, 2, -1).logcumsumexp(1)[:, -1]),
}


def prepared(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Raw(NOT_FINITE[name], a=nn.Linear(4, 5), b=nn.Linear(5, 3))
    return model, torch.randn(5, 4), torch.randint(3, (5,))


@pytest.mark.parametrize("builder", [curvature.gauss_newton, curvature.fisher, curvature.empirical_fisher])
@pytest.mark.parametrize("name", NOT_FINITE)
def test_products_by_rows_are_right(name: str, builder: Any) -> None:
    """They are those of the dense matrix, which comes from backward passes."""
    model, x, y = prepared(name)
    found = builder(model, ENTROPY, (x, y))
    dense, v = found.to_dense(), torch.randn(found.space.size, 3)
    assert dense.isfinite().all() and dense.any()
    torch.testing.assert_close(found @ v[:, 0], dense @ v[:, 0])
    torch.testing.assert_close(found @ v, dense @ v)
    with curvature.kept(found):
        torch.testing.assert_close(found @ v, dense @ v)


@pytest.mark.parametrize("name", NOT_FINITE)
def test_a_hessian_that_is_not_finite_says_so(name: str) -> None:
    model, x, y = prepared(name)
    with pytest.raises(RuntimeError, match=r"a function of torch is wrong or not finite.*gauss_newton"):
        curvature.hessian(model, ENTROPY, (x, y)).to_dense()


def test_a_hessian_that_torch_does_not_have_says_so() -> None:
    model = Raw(lambda m, x: m.h((-torch.cdist(x, m.c)).exp()), c=nn.Parameter(torch.randn(4, 4)), h=nn.Linear(4, 3))
    with pytest.raises(RuntimeError, match=r"torch has no Hessian of the loss.*cdist.*gauss_newton"):
        curvature.hessian(model, ENTROPY, (torch.randn(5, 4), torch.randint(3, (5,)))).to_dense()
