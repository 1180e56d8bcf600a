"""KFAC that sets step size, momentum and damping itself, from a closure."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from optimizers import EKFAC, KFAC
from optimizers.steps.closures import Replay
from optimizers.steps.quadratic_model import Quadratic, next_damping
from support.cases.case import Raw, seeded
from support.training import TASKS, Loss, assert_same, closure_of, copied, task, train_by_closure

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


def curvature_along(
    model: nn.Module, loss: Loss, x: Tensor, y: Tensor, direction: dict[str, Tensor], stride: int
) -> float:
    replay = Replay(model, closure_of(model, torch.optim.SGD(model.parameters()), loss, x, y))
    replay.first()
    return replay.curvatures([direction], stride).item()


def test_every_second_sample_is_taken():
    model, loss, x, y = task("mlp", n=8)
    direction = {k: torch.sin(torch.arange(p.numel()).float()).view_as(p) for k, p in model.named_parameters()}
    batches = ((x, y, 2), (x[::2], y[::2], 1), (x, y, 1))
    found = [curvature_along(model, loss, x, y, direction, stride) for x, y, stride in batches]
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0] != pytest.approx(found[2], rel=1e-2)


def test_penalties_in_the_closure_count():
    """A penalty on the parameters has its own curvature: the Hessian of 1/2 c ||p||^2 is c."""
    model, loss, x, y = task("mlp", n=8)
    direction = {k: torch.ones_like(p) for k, p in model.named_parameters()}
    size = sum(p.numel() for p in model.parameters())
    found = []
    for c in (0.0, 3.0):
        total = lambda out, y, c=c: loss(out, y) + c / 2 * sum(p.square().sum() for p in model.parameters())
        found.append(curvature_along(model, total, x, y, direction, 1))
    assert found[1] - found[0] == pytest.approx(3.0 * size, rel=1e-4)


def test_minimum_of_the_quadratic_model():
    with seeded(0):
        root = torch.randn(3, 3, dtype=torch.float64)
        slopes = torch.randn(3, dtype=torch.float64)
    model = Quadratic(slopes, root @ root.T, torch.eye(3, dtype=torch.float64))
    for damping in (0.0, 0.5):
        alpha = model.minimum(damping)
        torch.testing.assert_close((root @ root.T + damping * torch.eye(3)) @ alpha, -slopes)
        assert model.value(alpha, damping) == pytest.approx(0.5 * float(slopes @ alpha))
    twice = Quadratic(slopes[:1].repeat(2), torch.ones(2, 2).double(), torch.ones(2, 2).double())
    assert float(twice.minimum(0.0).sum()) == pytest.approx(-float(slopes[0]))  # the same direction, given twice
    zero = Quadratic(torch.zeros(2).double(), torch.zeros(2, 2).double(), torch.zeros(2, 2).double())
    assert torch.equal(zero.minimum(0.0), torch.zeros(2).double())


def test_damping_follows_the_reduction_ratio():
    assert next_damping(1.0, 0.9, 1.0) < 1 == next_damping(1.0, 0.5, 1.0) < next_damping(1.0, 0.1, 1.0)


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


@pytest.mark.training_run
def test_solves_a_linear_regression_in_a_few_steps():
    """Gauss-Newton is the Hessian, and one layer has one direction."""
    with seeded(0):
        model, x, weight = nn.Linear(5, 1).double(), torch.randn(50, 5).double(), torch.randn(5, 1).double()
    opt = KFAC(model, adaptive=True, inject=curvature.isotropic(8))
    values = train_by_closure(model, opt, lambda out, y: F.mse_loss(out, y), x, x @ weight + 1, 20)
    assert values[-1] < 1e-8 * values[0]


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


@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_replays_leave_no_trace(name: str):
    """Random numbers, buffers and gradients after a step are those of one call of the closure."""
    model, loss, x, y = task(name)
    other = copy.deepcopy(model)
    opt = KFAC(model, adaptive=True)
    with seeded(3):
        opt.step(closure_of(model, opt, loss, x, y))
        state = torch.get_rng_state()
    with seeded(3):
        closure_of(other, torch.optim.SGD(other.parameters()), loss, x, y)()
        assert torch.equal(torch.get_rng_state(), state)
    for (k, buffer), expected in zip(model.named_buffers(), other.buffers(), strict=True):
        assert torch.equal(buffer, expected), k
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-7)


def test_a_step_that_makes_the_loss_worse_is_rolled_back():
    """A loss that rises wherever the parameters go: nothing is changed, and it is counted."""
    model, _, x, y = task("mlp")
    start = copied(model)
    anchors = {k: p.detach().clone() for k, p in model.named_parameters()}

    def loss(out: Tensor, y: Tensor) -> Tensor:
        moved = sum((p - anchors[k]).abs().sum() for k, p in model.named_parameters())
        return F.cross_entropy(out, y) + 1e6 * moved

    opt = KFAC(model, adaptive=True)
    opt.step(closure_of(model, opt, loss, x, y))
    assert_same(copied(model), start)
    stats = opt.stats()
    assert stats["rollbacks"] > 0 and stats["failures"] == 1 and not stats["accepted"]


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


@pytest.mark.training_run
def test_several_outputs_and_calls():
    """A model that returns a dict, called twice in the closure."""
    model = Raw(lambda m, x: {"a": m.one(x).tanh(), "b": m.two(x)}, one=nn.Linear(4, 3), two=nn.Linear(4, 2))
    with seeded(0):
        x, z = torch.randn(16, 4), torch.randn(16, 4)
    opt = KFAC(model, adaptive=True)

    def closure() -> Tensor:
        opt.zero_grad()
        one, two = model(x), model(z)
        loss = (one["a"] - 0.5).square().mean() + (two["b"] - x[:, :2]).square().mean() + two["a"].square().mean()
        loss.backward()
        return loss

    values = [opt.step(closure).item() for _ in range(8)]
    assert values[-1] < 0.8 * values[0] and all(b <= a for a, b in zip(values, values[1:], strict=False))
