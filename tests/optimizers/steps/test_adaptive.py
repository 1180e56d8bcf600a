"""KFAC that sets step size, momentum and damping itself, from a closure."""

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
from optimizers.steps.adaptive import FIRST_RATIO
from optimizers.steps.closures import Replay
from optimizers.steps.quadratic_model import (
    GROW,
    LEAST_DAMPING,
    MOST_DAMPING,
    Quadratic,
    Trial,
)
from support.cases.case import seeded
from support.residual_problem import problem
from support.training import TASKS, assert_same, closure_of, copied, digits, task, train_by_closure

# -- the quadratic model


@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt", "lstm", "vit"])
def test_curvature_of_directions_is_that_of_the_gauss_newton_matrix(name: str):
    """Against products with J and with the Hessian of the loss at the output, by torch.func, in double precision."""
    model, loss, x, y = task(name, n=8)
    model = model.double().eval()
    x = x.double() if x.is_floating_point() else x
    named = dict(model.named_parameters())
    with seeded(5):
        directions = [{k: torch.randn_like(p) for k, p in named.items()} for _ in range(2)]
    half = list(named)[::2]
    directions.append({k: torch.ones_like(named[k]) for k in half})
    replay = Replay(model, closure_of(model, torch.optim.SGD(model.parameters()), loss, x, y))
    replay.first()
    found = replay.curvatures(directions, 1)

    output = model(x).detach()
    eps = 1e-6  # differences: an oracle that shares nothing with the code
    run = lambda shift, d: torch.func.functional_call(
        model, {k: p + shift * d[k] if k in d else p for k, p in named.items()}, (x,)
    )
    moved = [((run(eps, d) - run(-eps, d)) / (2 * eps)).detach() for d in directions]
    slope = torch.func.grad(lambda out: loss(out, y))
    bent = [(slope(output + eps * m) - slope(output - eps * m)) / (2 * eps) for m in moved]
    expected = torch.tensor([[(a * b).sum().item() for b in moved] for a in bent], dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6 * expected.abs().max().item())


def taken(damping: float, ratio: float) -> Trial:
    return Trial(damping, damping, ratio, rollbacks=0, is_accepted=True, step=None)


# -- training


@pytest.mark.training_run
@pytest.mark.parametrize("name, optimizer", [*((name, KFAC) for name in TASKS), ("cnn", EKFAC), ("transformer", EKFAC)])
def test_lowers_the_loss_at_every_step(name: str, optimizer: type[KFAC], device):
    model, loss, x, y = task(name, device)
    opt = optimizer(model, adaptive=True)
    with seeded(1):
        values = train_by_closure(model, opt, loss, x, y, 12)
    assert all(map(math.isfinite, values)) and values[-1] < 0.8 * values[0], values
    if name != "transformer":  # its dropout is another at every step
        assert all(b <= a for a, b in zip(values, values[1:], strict=False)), values
    assert all(entry["accepted"] for entry in opt.history)
    # with less, the first step of a GPT moved layers by thirteen times their norm, and training never recovered
    assert opt.history[0]["ratio"] >= FIRST_RATIO


@pytest.mark.parametrize("lr", [1.0, 0.5])
def test_a_quadratic_loss_falls_as_predicted(lr: float):
    """Also where only a part of the model's own step is taken. Samples come in pairs, of which one stands for both."""
    with seeded(0):
        model, x = nn.Linear(5, 1).double(), torch.randn(20, 5).double().repeat_interleave(2, 0)
    opt = KFAC(model, lr=lr, adaptive=True)
    for _ in range(2):
        train_by_closure(model, opt, F.mse_loss, x, x.sum(1, keepdim=True), 1)
        assert opt.history[-1]["ratio"] == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_unit_matters(reduction: str):
    """The loss times a number, or its sum: the same steps."""
    ends = []
    for scale in (1.0, 1e-3):
        model, _, x, y = task("mlp")
        opt = KFAC(model, adaptive=True)
        train_by_closure(model, opt, lambda out, y, s=scale: s * F.cross_entropy(out, y, reduction=reduction), x, y, 6)
        ends.append(nn.utils.parameters_to_vector(model.parameters()))
    assert (ends[0] - ends[1]).norm() < 2e-2 * ends[0].norm()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_batch_that_is_not_finite_changes_nothing(bad: float):
    model, loss, x, y = task("mlp")
    opt = KFAC(model, adaptive=True)
    train_by_closure(model, opt, loss, x, y, 3)
    before, factors = copied(model), opt.store.state_dict()
    opt.step(closure_of(model, opt, loss, x * bad, y))
    assert_same(copied(model), before)
    after = opt.store.state_dict()
    assert all(torch.equal(after[k]["row_side"], factors[k]["row_side"]) for k in factors) and opt.skipped == 1
    assert math.isfinite(train_by_closure(model, opt, loss, x, y, 2)[-1])


def test_a_step_into_nowhere_is_undone_at_the_next_batch():
    """Finite on its own batch, not on the next: the parameters return to where they were, and the step goes on."""
    model, loss, x, y = task("mlp")
    opt = KFAC(model, adaptive=True)
    train_by_closure(model, opt, loss, x, y, 1)
    before = copied(model)
    train_by_closure(model, opt, loss, x, y, 1)
    there = copied(model)
    wall = lambda out, y: loss(out, y) * (math.inf if torch.equal(model[1].weight, there["1.weight"]) else 1.0)
    opt.step(closure_of(model, opt, wall, x, y))
    assert opt.stats()["rollbacks"] >= 1
    assert (model[1].weight - before["1.weight"]).norm() > 0 and math.isfinite(loss(model(x), y).item())


def test_learning_rates_multiply_the_step():
    ends = []
    for lr in (1.0, 0.5, 0.0):
        model, loss, x, y = task("mlp")
        start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        opt = KFAC(model, lr, adaptive=True)
        opt.rule.first.damping = 10.0  # so that the first try is taken
        train_by_closure(model, opt, loss, x, y, 1)
        ends.append(nn.utils.parameters_to_vector(model.parameters()) - start)
    assert 0 < ends[1].norm() < ends[0].norm() and ends[2].norm() == 0


def test_a_schedule_that_starts_at_zero():
    """Steps that do not move learn nothing: the damping is found by the first that does."""
    model, loss, x, y = task("mlp")
    opt = KFAC(model, 0.0, adaptive=True)
    train_by_closure(model, opt, loss, x, y, 3)
    assert opt.stats()["step_size"] == 0 and math.isnan(opt.stats()["damping"]) and opt.stats()["rollbacks"] == 0
    opt.param_groups[0]["lr"] = 1.0
    losses = train_by_closure(model, opt, loss, x, y, 2)
    assert losses[1] < losses[0] and opt.stats()["damping"] > 0


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


def readme_example(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor, Tensor]:
    images, labels = digits()
    with seeded(0):
        model = nn.Sequential(nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 10))
    return model.to(dtype), images[:64].flatten(1).to(dtype), labels[:64]


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
    """Those after them go on where the last one left off, or three steps behind: factors are renewed more rarely."""
    ends = []
    for pause in (0, 8):
        model, x, y = readme_example()
        opt = OPTIMIZERS[optimizer](model)
        train_by_closure(model, opt, F.cross_entropy, x, y, 4)
        damping = opt.rule.first.damping
        train_by_closure(model, opt, lambda out, y: factor * F.cross_entropy(out, y), x, y, pause)
        assert damping / 4 < opt.rule.first.damping < 4 * damping
        ends.append(train_by_closure(model, opt, F.cross_entropy, x, y, 8))
    assert ends[1][-1] < ends[0][-4]


@pytest.mark.training_run
@pytest.mark.parametrize("optimizer", ONE)
def test_linear_losses_fall(optimizer: str):
    """Without curvature every step may be longer than the last; nothing is raised when numbers end."""
    model, x, y = readme_example()
    losses = train_by_closure(model, OPTIMIZERS[optimizer](model), lambda out, y: out.mean(), x, y, 40)
    assert losses[5] < losses[0] - 1 and all(map(math.isfinite, losses))


# -- dampings


def test_dampings_have_bounds():
    damping = 1.0
    for _ in range(1000):
        damping = taken(damping, 1.0).next_damping(largest=5.0)
    assert damping == pytest.approx(5 * LEAST_DAMPING)
    assert taken(1e-40, 1.0).next_damping(largest=5.0) == 1e-40  # of another unit, before
    failed = Trial(first=1.0, damping=1e7, ratio=-1.0, rollbacks=12, is_accepted=False, step=None)
    assert failed.next_damping(largest=1e6) == GROW
    assert failed.next_damping(largest=2 / MOST_DAMPING) == pytest.approx(2)
    assert failed.next_damping(largest=0.0) == 1.0
    unmoved = Trial(first=1.0, damping=64.0, ratio=0.0, rollbacks=4, is_accepted=False, step=None)
    assert unmoved.next_damping(largest=1e6) == 1.0


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
    damping, where = opt.residual_rule.damping, copied(model)
    jump = lambda: float(any(not torch.equal(t, where[k]) for k, t in model.state_dict().items()))
    for _ in range(3):
        opt.step(lambda: closure() + jump())
    assert_same(copied(model), where)
    assert opt.residual_rule.damping <= GROW**3 * damping
    values = [opt.step(closure).item() for _ in range(40)]
    assert values[-1] < 0.5 * values[0]


def test_residuals_that_do_not_depend_on_the_model_at_first():
    model, closure = problem()
    opt = NaturalGradient(model, adaptive=True)
    opt.step(lambda: 0 * closure() + 1)
    values = [opt.step(closure).item() for _ in range(5)]
    assert values[-1] < 0.1 * values[0] and opt.residual_rule.damping > 0
