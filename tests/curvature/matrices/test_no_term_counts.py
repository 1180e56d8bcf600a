"""A mean loss without a term that counts is 0/0: every matrix of it says so, products as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature

pytestmark = [pytest.mark.fast, pytest.mark.usefixtures("double")]
LOSSES: dict[str, Any] = {
    "a loss of torch": nn.CrossEntropyLoss(),
    "a function": lambda o, y: F.cross_entropy(o, y),
    "a masked mean": lambda o, y: (o.square().sum(1) * (y >= 0)).sum() / (y >= 0).sum().clamp(min=1),
}
BUILDERS = [curvature.gauss_newton, curvature.fisher]


def prepared() -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    return nn.Linear(4, 3), torch.randn(5, 4), torch.randint(3, (5,)), torch.full((5,), -100)


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_products_say_that_no_term_counts(name: str, is_split: bool, builder: Any) -> None:
    model, x, _, nothing = prepared()
    data = [(x[:2], nothing[:2]), (x[2:], nothing[2:])] if is_split else (x, nothing)
    found = builder(model, LOSSES[name], data)
    for call in (lambda: found @ torch.ones(15), lambda: found @ torch.ones(15, 2), found.to_dense, found.diagonal):
        with pytest.raises(ValueError, match="no term of it counts"):
            call()


@pytest.mark.parametrize("name", LOSSES)
def test_batches_in_which_no_term_counts_change_nothing(name: str) -> None:
    model, x, y, nothing = prepared()
    for data in ([(x, y), (x, nothing)], [(x, nothing), (x, y)]):
        for builder in (*BUILDERS, curvature.hessian):
            expected, found = builder(model, LOSSES[name], (x, y)), builder(model, LOSSES[name], data)
            torch.testing.assert_close(found @ torch.ones(15), expected @ torch.ones(15))
            torch.testing.assert_close(found.to_dense(), expected.to_dense())
