"""Adaptive steps where nothing is left to do, or nothing can be done: losses and gradients of zero, flat losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvature import empirical, exact
from optimizers import EKFAC, KFAC, NaturalGradient
from optimizers.steps.quadratic_model import (
    GROW,
    LEAST_DAMPING,
    MOST_DAMPING,
    Quadratic,
    Trial,
    largest_curvature,
    next_damping,
)
from support.cases.case import seeded
from support.residual_problem import problem
from support.training import assert_same, closure_of, copied, digits, task, train_by_closure

CROSS_ENTROPY = nn.CrossEntropyLoss()
OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "KFAC": lambda model: KFAC(model, adaptive=True),
    "KFAC, exact": lambda model: KFAC(model, adaptive=True, loss=CROSS_ENTROPY, inject=exact()),
    "EKFAC": lambda model: EKFAC(model, adaptive=True),
    "NaturalGradient": lambda model: NaturalGradient(model, adaptive=True),
    "NaturalGradient, exact": lambda model: NaturalGradient(model, adaptive=True, loss=CROSS_ENTROPY),
    "NaturalGradient, empirical": lambda model: NaturalGradient(model, adaptive=True, inject=empirical()),
}

ONE, OTHER = list(OPTIMIZERS)[::2], list(OPTIMIZERS)[1::2]  # take turns: each has KFAC and NaturalGradient


def readme_example(
    dtype: torch.dtype = torch.float32, n: int = 64, width: int = 24
) -> tuple[nn.Module, Tensor, Tensor]:
    images, labels = digits()
    with seeded(0):
        model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    return model.to(dtype), images[:n].flatten(1).to(dtype), labels[:n]


@pytest.mark.training_run
@pytest.mark.parametrize(
    "optimizer, dtype, steps",
    [("KFAC", torch.float32, 80), ("EKFAC", torch.float64, 150), ("NaturalGradient", torch.float32, 100)],
)
def test_long_runs_into_zero_loss(optimizer: str, dtype: torch.dtype, steps: int):
    """README's example on a full batch: the loss falls to its rounding, stays there, and the damping stays sane."""
    model, x, y = readme_example(dtype)
    opt = OPTIMIZERS[optimizer](model)
    losses = train_by_closure(model, opt, F.cross_entropy, x, y, steps)
    assert all(b <= a for a, b in zip(losses, losses[1:], strict=False))
    assert losses[-1] < 10 * torch.finfo(dtype).eps
    dampings = [entry["damping"] for entry in opt.history if entry["accepted"]]
    assert opt.rule.first.damping <= max(dampings[1:]) and opt.rule.first.damping > 0


@pytest.mark.training_run
@pytest.mark.parametrize("factor, optimizer", [*((1e-20, name) for name in OTHER), *((0.0, name) for name in ONE)])
def test_batches_of_zero_loss_do_not_matter(factor: float, optimizer: str):
    """Those after them go on where the last one left off, at most two steps behind: factors are renewed more rarely."""
    ends = []
    for pause in (0, 8):
        model, x, y = readme_example()
        opt = OPTIMIZERS[optimizer](model)
        train_by_closure(model, opt, F.cross_entropy, x, y, 4)
        damping = opt.rule.first.damping
        train_by_closure(model, opt, lambda out, y: factor * F.cross_entropy(out, y), x, y, pause)
        assert damping / 4 < opt.rule.first.damping < 4 * damping
        ends.append(train_by_closure(model, opt, F.cross_entropy, x, y, 8))
    assert ends[1][-1] < ends[0][-3]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", [0.0, 1.5])
def test_gradients_of_zero_change_nothing(level: float, optimizer: str):
    model, x, y = readme_example()
    opt, before = OPTIMIZERS[optimizer](model), copied(model)
    train_by_closure(model, opt, lambda out, y: 0 * F.cross_entropy(out, y) + level, x, y, 5)
    assert_same(copied(model), before)
    stats = opt.stats()
    assert stats["step_size"] == 0 and stats["rollbacks"] == stats["failures"] == stats["skipped"] == 0


@pytest.mark.training_run
@pytest.mark.parametrize("optimizer", ONE)
def test_losses_that_are_not_finite_at_the_start(optimizer: str):
    model, x, y = readme_example()
    opt, before = OPTIMIZERS[optimizer](model), copied(model)
    train_by_closure(model, opt, lambda out, y: F.cross_entropy(out, y) * math.nan, x, y, 3)
    assert_same(copied(model), before)
    assert opt.skipped == 3
    losses = train_by_closure(model, opt, F.cross_entropy, x, y, 12)
    assert losses[-1] < 0.2 * losses[0]


@pytest.mark.training_run
@pytest.mark.parametrize("optimizer", OTHER)
def test_batches_with_a_constant_output(optimizer: str):
    """Inputs of zero, and a layer that no input wakes: only the last bias has a gradient."""
    for asleep in (False, True):
        model, x, y = readme_example()
        y = torch.cat([torch.arange(10), y[10:]])  # the best bias of a class that is missing would be infinite
        if asleep:
            nn.init.constant_(model[0].bias, -100.0)
        opt = OPTIMIZERS[optimizer](model)
        losses = train_by_closure(model, opt, F.cross_entropy, x if asleep else 0 * x, y, 10)
        frequencies = y.bincount() / len(y)
        entropy = -(frequencies * frequencies.log()).sum().item()
        assert losses[-1] == pytest.approx(entropy, rel=1e-3)
        assert all(b <= a for a, b in zip(losses, losses[1:], strict=False))


@pytest.mark.training_run
@pytest.mark.parametrize("optimizer", ONE)
def test_linear_losses_fall(optimizer: str):
    """Without curvature every step may be longer than the last; nothing is raised when numbers end."""
    model, x, y = readme_example()
    losses = train_by_closure(model, OPTIMIZERS[optimizer](model), lambda out, y: out.mean(), x, y, 40)
    assert losses[5] < losses[0] - 1 and all(map(math.isfinite, losses))


@pytest.mark.training_run
@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_no_unit_is_too_small_or_too_large(scale: float):
    model, x, y = readme_example(torch.float64)
    losses = train_by_closure(
        model, KFAC(model, adaptive=True), lambda out, y: scale * F.cross_entropy(out, y), x, y, 12
    )
    assert losses[-1] < 0.2 * losses[0]


# -- dampings


def test_dampings_have_bounds():
    damping = 1.0
    for _ in range(1000):
        damping = next_damping(damping, 1.0, largest=5.0)
    assert damping == pytest.approx(5 * LEAST_DAMPING)
    assert next_damping(1e-40, 1.0, largest=5.0) == 1e-40  # of another unit, before
    failed = Trial(first=1.0, damping=1e7, ratio=-1.0, rollbacks=12, is_accepted=False, step=None)
    assert failed.damping_after_failure(largest=1e6) == GROW
    assert failed.damping_after_failure(largest=2 / MOST_DAMPING) == pytest.approx(2)
    assert failed.damping_after_failure(largest=0.0) == 1.0
    unmoved = Trial(first=1.0, damping=64.0, ratio=0.0, rollbacks=4, is_accepted=False, step=None)
    assert unmoved.damping_after_failure(largest=1e6) == 1.0


def test_the_largest_curvature_is_that_of_directions_of_length_one():
    of = lambda *numbers: torch.tensor(numbers, dtype=torch.float64).diag()
    assert largest_curvature(of(8.0, 3.0, 0.0), of(4.0, 1.0, 0.0)) == 3.0
    assert largest_curvature(of(-1.0), of(1.0)) == 0.0


def test_the_first_damping():
    one = torch.ones(1, dtype=torch.float64)
    of = lambda slope, bend, norm: Quadratic(slope * one, bend * one[:, None], norm * one[:, None]).first_damping()
    assert of(-1.0, 6.0, 2.0) == pytest.approx(3e-3)
    assert of(-4.0, 0.0, 2.0) == pytest.approx(2e-3)  # no curvature
    assert of(0.0, 0.0, 2.0) == of(-1.0, 1.0, 0.0) == -1


# -- residuals


@pytest.mark.parametrize("optimizer", [KFAC, NaturalGradient])
def test_residuals_that_cannot_fall_do_not_spoil_later_steps(optimizer: type[KFAC]):
    model, closure = problem()
    opt = optimizer(model, adaptive=True)
    for _ in range(5):
        opt.step(closure)
    damping, where = opt.residual_rule.solver.damping, copied(model)
    jump = lambda: float(any(not torch.equal(t, where[k]) for k, t in model.state_dict().items()))
    for _ in range(3):
        opt.step(lambda: closure() + jump())
    assert_same(copied(model), where)
    assert opt.residual_rule.solver.damping <= GROW**3 * damping
    values = [opt.step(closure).item() for _ in range(40)]
    assert values[-1] < 0.5 * values[0]


def test_residuals_that_do_not_depend_on_the_model_at_first():
    model, closure = problem()
    opt = NaturalGradient(model, adaptive=True)
    opt.step(lambda: 0 * closure() + 1)
    values = [opt.step(closure).item() for _ in range(5)]
    assert values[-1] < 0.1 * values[0] and opt.residual_rule.solver.damping > 0


# -- tasks with buffers and chance


@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_zero_losses_with_batch_norm_and_dropout(name: str):
    model, loss, x, y = task(name)
    opt = KFAC(model, adaptive=True)
    train_by_closure(model, opt, loss, x, y, 3)
    for _ in range(3):
        opt.step(closure_of(model, opt, lambda out, y: 0 * loss(out, y), x, y))
    assert opt.stats()["failures"] == 0
