"""Logits with the classes on the last axis: refused with the loss to pass, which gives the rows of a loop."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from support.cases.case import seeded
from support.oracles import brute_force

pytestmark = pytest.mark.fast
CALLS = {
    "per_sample_gradients": lambda m, loss, x, y: curvature.per_sample_gradients(m, loss, x, y),
    "per_sample_norms": lambda m, loss, x, y: curvature.per_sample_norms(m, loss, x, y),
    "kfac": lambda m, loss, x, y: curvature.kfac(m, loss, (x, y)),
    "fisher_diagonal": lambda m, loss, x, y: curvature.fisher_diagonal(m, loss, (x, y)),
    "gauss_newton": lambda m, loss, x, y: curvature.gauss_newton(m, loss, (x, y)).trace(),
    "hessian": lambda m, loss, x, y: curvature.hessian(m, loss, (x, y)).trace(),
}


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)).double()
        x, y = torch.randint(7, (3, 5)), torch.randint(7, (3, 5))
    y[0, 2] = -100
    return model, x, y


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), F.cross_entropy], ids=["module", "function"])
@pytest.mark.parametrize("call", CALLS)
def test_classes_on_the_last_axis_are_refused_with_the_loss_to_pass(call: str, loss: Any) -> None:
    model, x, y = problem()
    with pytest.raises(ValueError, match=r"output \(3, 5, 7\) has its classes on the last axis.*movedim\(-1, 1\)"):
        CALLS[call](model, loss, x, y)


def test_the_loss_that_the_message_names_gives_the_rows_of_a_loop() -> None:
    model, x, y = problem()
    loss = lambda output, y: F.cross_entropy(output.movedim(-1, 1), y, reduction="sum")
    rows, expected = (of(model, loss, x, y) for of in (CALLS["per_sample_gradients"], brute_force.per_sample_gradients))
    for name, row in rows.items():
        torch.testing.assert_close(row, expected[name])


def test_classes_on_axis_one_are_taken_as_they_were() -> None:
    model, x, y = problem()
    first = nn.Sequential(model, nn.Flatten(1), nn.Unflatten(1, (5, 7)))
    curvature.kfac(first, nn.CrossEntropyLoss(), (x, torch.randint(5, (3, 7))))  # of five classes at seven places
