"""Checks of plans in half precision, where a hundred roundings are as large as a gradient."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvature
from support.cases.case import Raw

pytestmark = pytest.mark.fast


class Hidden(torch.autograd.Function):
    """A product with a weight that no mode sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (g,), (x, w) = gradients, ctx.saved_tensors
        return g @ w.T, x.T @ g


def sorted_samples() -> nn.Module:
    """Samples change places on the way, as where they go to experts."""

    def run(m: Any, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return m.plain(x) + m.head(m.inner(x[order]).tanh())[order.argsort()]

    return Raw(run, plain=nn.Linear(4, 3), inner=nn.Linear(4, 4), head=nn.Linear(4, 3))


def two_change_places() -> nn.Module:
    """All samples but the last two stay where they are; every parameter sees these exchanged."""

    def run(m: Any, x: Tensor) -> Tensor:
        order = torch.arange(len(x))
        order[-2:] = order[-2:].flip(0)
        return m.head(m.inner(x[order]).tanh())[order]

    return Raw(run, inner=nn.Linear(4, 4), head=nn.Linear(4, 3))


def hidden_weight(scale: float) -> nn.Module:
    """Its gradient is this share of the others, about."""
    run = lambda m, x: m.plain(x) + scale * Hidden.apply(x, m.w)
    return Raw(run, plain=nn.Linear(4, 3), w=nn.Parameter(torch.randn(4, 3)))


def is_right(make: Any, precision: Any, seed: int, count: int = 5) -> bool:
    """Whether the rows of all parameters are those of double precision, but for rounding."""
    torch.manual_seed(seed)
    is_autocast, loss = precision == "autocast", nn.CrossEntropyLoss()
    model = make().to(torch.float32 if is_autocast else precision)
    x, y = torch.randn(count, 4).to(next(model.parameters()).dtype), torch.randint(3, (count,))
    exact = copy.deepcopy(model).double()
    with torch.autocast("cpu", dtype=torch.bfloat16) if is_autocast else nullcontext():
        found = curvature.per_sample_gradients(model, loss, x, y)
    for name, p in exact.named_parameters():
        rows = [torch.autograd.grad(loss(exact(x[n : n + 1].double()), y[n : n + 1]), p)[0] for n in range(count)]
        expected = torch.stack(rows)
        if (found[name].double() - expected).norm() > 0.05 * expected.norm():
            return False
    return True


@pytest.mark.parametrize(
    ("make", "precision"),
    [
        (sorted_samples, torch.bfloat16),
        (sorted_samples, torch.float16),
        (sorted_samples, "autocast"),
        (partial(hidden_weight, 0.1), torch.bfloat16),  # autocast does not see it
        (partial(hidden_weight, 0.03), torch.float16),
        (partial(hidden_weight, 0.005), torch.bfloat16),
        (partial(hidden_weight, 1e-6), torch.float32),
    ],
)
def test_wrong_terms_are_not_taken_for_rounding(make: Any, precision: Any) -> None:
    assert all(is_right(make, precision, seed) for seed in range(6))


@pytest.mark.parametrize("count", [2, 9, 40, 150])
@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16, "autocast"])
def test_two_samples_that_change_places_among_many(precision: Any, count: int) -> None:
    """Theirs is a small part of what all samples send back, and their weights may be alike."""
    assert all(is_right(two_change_places, precision, seed, count) for seed in range(2))
