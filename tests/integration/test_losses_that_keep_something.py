"""Losses of which two calls differ, since they keep something or draw random numbers, are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from support.cases.case import Raw
from support.comparisons import right_rows
from support.oracles import brute_force as oracle

pytestmark = [pytest.mark.fast, pytest.mark.usefixtures("double")]
Loss = Callable[[Tensor, Tensor], Tensor]
HISTORY: list[Any] = []
VARIES = "two calls with the same arguments differ: it draws random numbers, or keeps something"


def appends_to_a_list() -> Loss:
    history: list[Tensor] = []

    def loss(o: Tensor, y: Tensor) -> Tensor:
        history.append(o.detach().mean(0))
        return F.cross_entropy(o, y) * (1 + 1e-8 * len(history))

    return loss


class Trainer:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, o: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return F.cross_entropy(o, y) / self.calls


class Centred(nn.Module):
    """With the moving mean of all outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, o: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(2 * (o - self.centre), y)
        self.centre = 0.9 * self.centre + 0.1 * o.detach().mean(0)
        return loss


KEEPING: list[Callable[[], Loss]] = [appends_to_a_list, Trainer, Centred]
OF_CHANCE: list[Callable[[], Loss]] = [
    lambda: lambda o, y: F.cross_entropy(o + 0.1 * torch.randn_like(o), y),
    lambda: lambda o, y: (F.cross_entropy(o, y, reduction="none") * torch.rand(len(o))).mean(),
    lambda: lambda o, y: F.cross_entropy(o + torch.randn(()), y).sqrt() * torch.rand(()),  # and samples meet
]
CALLS: dict[str, Any] = {
    "per_sample_gradients": curvature.per_sample_gradients,
    "gauss_newton @": lambda *a: curvature.gauss_newton(*a) @ torch.ones(15),
    "gauss_newton": lambda *a: curvature.gauss_newton(*a).to_dense(),
    "hessian": lambda *a: curvature.hessian(*a) @ torch.ones(15),
    "kfac": curvature.kfac,
    "empirical_fisher": lambda *a: curvature.empirical_fisher(*a).to_dense(),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("make", [*KEEPING, *OF_CHANCE])
def test_losses_that_change_from_call_to_call_are_refused(make: Callable[[], Loss], name: str) -> None:
    """Also where the matrix of the whole batch needs nothing of samples."""
    model, loss = nn.Linear(4, 3), make()
    for _ in range(2):
        with pytest.raises(ValueError, match=VARIES):
            CALLS[name](model, loss, torch.randn(5, 4), torch.randint(3, (5,)))


def test_a_matrix_of_one_sample_and_a_loss_of_chance() -> None:
    model, x, y = nn.Linear(4, 3), torch.randn(1, 4), torch.randint(3, (1,))
    with pytest.raises(ValueError, match=VARIES):
        curvature.gauss_newton(model, OF_CHANCE[0](), (x, y)) @ torch.ones(15)


def test_a_loss_of_a_tuple_that_draws_random_numbers_is_refused() -> None:
    model = Raw(lambda m, x: (m.a(x), m.b(x)), a=nn.Linear(4, 3), b=nn.Linear(4, 3))
    loss = lambda o, y: F.cross_entropy(o[0] + o[1] * torch.rand(()), y)
    with pytest.raises(ValueError, match=VARIES):
        curvature.per_sample_gradients(model, loss, torch.randn(5, 4), torch.randint(3, (5,)))


TABLE = torch.randn(1000, 3, dtype=torch.float64)


def reads_a_table(o: Tensor, y: Tensor) -> Tensor:
    HISTORY.append(len(o))  # a log, in which our calls are, too
    return (o - TABLE[y]).square().mean()


def test_functions_that_read_something_or_log_it() -> None:
    model, x, y = nn.Linear(4, 3), torch.randn(5, 4), torch.randint(3, (5,))
    expected = oracle.per_sample_gradients(model, reads_a_table, x, y)
    torch.testing.assert_close(curvature.per_sample_gradients(model, reads_a_table, x, y), expected)
    weight = model.weight
    loss = lambda o, y: F.cross_entropy(o, y) + 0.1 * weight.square().sum() + 0.1 * model.bias.square().sum()
    right_rows(model, loss, x, y)
