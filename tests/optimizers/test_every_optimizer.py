"""Every optimizer, solver and way to step on small problems of which the solution is known."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from curvature import exact
from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import Raw, seeded
from support.habits import flat
from support.training import task, train, train_by_closure

pytestmark = pytest.mark.fast

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "KFAC": KFAC,
    "EKFAC": EKFAC,
    **{f"NaturalGradient-{s}": functools.partial(NaturalGradient, solver=s) for s in ("woodbury", "cg")},
    "NaturalGradient-layerwise": functools.partial(NaturalGradient, layerwise=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_points_to_the_minimum_of_a_linear_regression(optimizer: str, device: str) -> None:
    """There is one layer, and each sample reads it once: the curvature is exact."""
    with seeded(0):
        model, x, y = nn.Linear(3, 2, bias=False).double(), torch.randn(8, 3).double(), torch.randn(8, 2).double()
    minimum = torch.linalg.lstsq(x, y).solution.T.flatten().to(device)
    model, x, y = model.to(device), x.to(device), y.to(device)
    before = flat(model)
    opt = OPTIMIZERS[optimizer](model, damping=1e-10, weight_decay=0.0, loss=nn.MSELoss(), inject=exact())
    train(model, opt, nn.MSELoss(), x, y, 1)
    direction = nn.functional.cosine_similarity(flat(model) - before, minimum - before, dim=0)
    assert direction > 1 - 1e-6


@pytest.mark.training_run
@pytest.mark.parametrize("optimizer", [KFAC, EKFAC])
def test_curvature_of_raw_parameters_may_span_eight_decades(optimizer: Callable[..., Any], device: str) -> None:
    """The damping says from where on directions count as flat."""
    scales = torch.logspace(-2, 2, 9).to(device)
    with seeded(0):
        model, x = Raw(lambda m, x: m.p * scales * x, p=nn.Parameter(torch.ones(9))), torch.randn(64, 9)
    model, x = model.to(device), x.to(device)
    train(model, optimizer(model, damping=1e-6), nn.MSELoss(), x, torch.zeros_like(x), 150)
    assert float(model.p.detach().abs().max()) < 1e-3


@pytest.mark.training_run
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_loss_falls(optimizer: str, device: str) -> None:
    model, loss, x, y = task("mlp", device)
    values = train(model, OPTIMIZERS[optimizer](model, loss=nn.CrossEntropyLoss()), loss, x, y, 15)
    assert max(values[-3:]) < 0.9 * values[0]


@pytest.mark.training_run
@pytest.mark.parametrize("optimizer", ["KFAC", "EKFAC", "NaturalGradient-woodbury", "NaturalGradient-layerwise"])
def test_the_loss_falls_with_steps_that_set_themselves(optimizer: str, device: str) -> None:
    model, loss, x, y = task("mlp", device)
    opt = OPTIMIZERS[optimizer](model, loss=nn.CrossEntropyLoss(), adaptive=True)
    values = train_by_closure(model, opt, loss, x, y, 8)
    assert values == sorted(values, reverse=True) and values[-1] < 0.5 * values[0]


@pytest.mark.parametrize("optimizer", ["KFAC", "NaturalGradient-woodbury"])
def test_residuals_of_a_linear_model_are_the_least_after_one_step(optimizer: str, device: str) -> None:
    with seeded(0):
        model, x = nn.Linear(3, 1).double(), torch.randn(12, 3).double()
    minimum = torch.linalg.lstsq(torch.cat([x, torch.ones(12, 1).double()], 1), x.prod(1)[:, None]).solution
    model, x = model.to(device), x.to(device)
    opt = OPTIMIZERS[optimizer](model, damping=1e-12)
    opt.step(lambda: model(x)[:, 0] - x.prod(1))
    torch.testing.assert_close(torch.cat([model.weight[0], model.bias]), minimum[:, 0].to(device))
    assert opt.history[0].get("coarser", 0) == 0  # all that was promised is there
