"""KFAC for closures of residuals, against loops of batch size one and dense algebra."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable

import matplotlib.pyplot as plt
import pytest
import torch
from torch import Tensor, nn

from curvature import plots
from optimizers import EKFAC, KFAC, NaturalGradient
from optimizers.steps.quadratic_model import MOST_TRIES
from optimizers.steps.residuals import DIRECTIONS, REMEMBERED
from support.cases.case import seeded
from support.combinations import in_turn
from support.habits import copied
from support.habits import moved as moved_of
from support.oracles.residuals import DenseSteps, damped_sum
from support.residual_problem import by_hand, nested, problem, spread

pytestmark = pytest.mark.fast
each_optimizer = pytest.mark.parametrize("optimizer", [KFAC, NaturalGradient])
train = lambda opt, closure, steps: [opt.step(closure).item() for _ in range(steps)]


def arranged(model: nn.Module) -> Tensor:
    """Parameters as (o, i + 1) layer by layer, flat."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    return torch.cat([torch.cat([m.weight, m.bias[:, None]], 1).flatten() for m in layers]).detach().clone()


# -- steps


@pytest.mark.parametrize("seed", range(2))
def test_steps_are_those_of_dense_algebra(seed: int):
    """The second has a displacement among its directions."""
    model, closure = problem(seed)
    damping = 0.01
    opt, reference = KFAC(model, damping=damping), DenseSteps(DIRECTIONS, REMEMBERED, damping)
    for _ in range(2):
        r, jacobian, products = by_hand(model)
        expected = reference.step(r, jacobian, [damped_sum(pairs, damping) for pairs in products])
        before = arranged(model)
        loss = opt.step(closure)
        torch.testing.assert_close(loss, r.square().sum() / 2)
        assert opt.history[-1]["accepted"] and not opt.stats()["rollbacks"]
        torch.testing.assert_close(arranged(model) - before, expected, rtol=1e-4, atol=1e-6 * float(expected.norm()))


@in_turn(way=[spread, nested], adaptive=[False, True])
def test_the_loss_falls_at_every_step(way: Callable[..., tuple[Tensor, Tensor]], adaptive: bool):
    model, closure = problem(0, way)
    opt = KFAC(model, adaptive=adaptive)
    losses = train(opt, closure, 30)
    assert all(later < sooner for sooner, later in itertools.pairwise(losses)) and losses[-1] < 1e-4 * losses[0]
    dampings = [entry["damping"] for entry in opt.history]
    assert min(dampings) < dampings[0] / 10
    assert all(math.isfinite(entry["ratio"]) for entry in opt.history)
    assert "damping" in opt.summary() and opt.stats()["steps"] == 30
    assert len(plots.training(opt.history)) > 0
    plt.close("all")
    assert opt.report().count("2 products") == 3 and all(f"{k}.weight, {k}.bias" in opt.report() for k in (0, 2, 4))


def test_three_pieces():
    model, closure = problem()
    opt = KFAC(model)
    pieces = lambda: (spread(model, model.inside)[1][:, 0] - 1, model(model.edge)[:, 0], model(model.inside)[:, 0])
    losses = train(opt, lambda: torch.cat(pieces()), 10)
    assert "3 products (2 merged), B" in opt.report()
    assert all(later < sooner for sooner, later in itertools.pairwise(losses))


# -- what goes wrong


def test_rates_shorten_the_step_or_leave_layers_alone():
    model, closure = problem()
    state, whole = copy.deepcopy(model.state_dict()), arranged(model)
    KFAC(model, damping=0.1).step(closure)
    moved = arranged(model) - whole
    model.load_state_dict(state)
    KFAC(model, lr=0.5, damping=0.1).step(closure)
    torch.testing.assert_close(arranged(model) - whole, moved / 2)
    opt = KFAC(model, lr=0.0)
    before = arranged(model)
    opt.step(closure)
    assert torch.equal(arranged(model), before) and opt.steps == 1
    opt = KFAC(model)
    opt.param_groups[0]["params"], rest = opt.param_groups[0]["params"][:2], opt.param_groups[0]["params"][2:]
    opt.add_param_group({"params": rest, "lr": 0.0})
    held = copied(model)
    opt.step(closure)
    assert moved_of(model, held) == {"0.weight", "0.bias"}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@each_optimizer
def test_residuals_that_are_not_finite_change_nothing(optimizer: type[KFAC], bad: float):
    model, closure = problem()
    opt, start = optimizer(model), arranged(model)
    opt.step(lambda: closure() * bad)
    assert (opt.skipped, opt.steps) == (1, 0) and torch.equal(arranged(model), start)
    opt.step(closure)
    before, damping = arranged(model), opt.residual_rule.damping
    assert not math.isfinite(opt.step(lambda: closure() * bad).item())
    assert (opt.skipped, opt.steps) == (2, 1) and torch.equal(arranged(model), before)
    assert opt.residual_rule.damping == damping
    opt.step(closure)
    assert opt.history[-1]["accepted"] and not torch.equal(arranged(model), before)
    assert len(plots.training(opt.history)) > 0
    plt.close("all")


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_a_closure_that_raises_leaves_the_parameters(fails_at: int):
    model, closure = problem()
    before, calls = arranged(model), []

    def failing() -> Tensor:
        calls.append(1)
        if len(calls) == fails_at:
            raise KeyError("mine")
        return closure()

    opt = KFAC(model)
    with pytest.raises(KeyError):
        opt.step(failing)
    assert torch.equal(arranged(model), before) and not opt.steps
    assert opt.step(closure).isfinite()


@pytest.mark.parametrize("adaptive", [False, True])
@each_optimizer
def test_a_loss_that_cannot_fall_is_given_up(optimizer: type[KFAC], adaptive: bool):
    """The residual jumps up wherever the parameters move."""
    model, closure = problem()
    before = arranged(model)
    opt = optimizer(model, adaptive=adaptive, momentum=0.9)
    opt.step(lambda: closure() + 1e3 * float((arranged(model) - before).norm() > 0))
    assert torch.equal(arranged(model), before) and not opt.stats()["accepted"]
    searches = optimizer is NaturalGradient and not adaptive
    assert opt.stats()["failures"] == 1 and opt.stats()["rollbacks"] == (0 if searches else MOST_TRIES)


@each_optimizer
def test_buffers_and_random_numbers_are_those_of_one_call(optimizer: type[KFAC]):
    model, closure = problem()
    model.register_buffer("count", torch.zeros(()))
    model.register_buffer("seen", torch.zeros(5).double())
    drawn = []

    def counting() -> Tensor:
        model.count += 1
        model.seen.copy_(model[2].bias.detach())
        drawn.append(torch.rand(40).double())
        return closure() + 1e-3 * drawn[-1]

    opt = optimizer(model)
    for step in range(2):
        with seeded(step):
            expected = torch.rand(40).double(), torch.rand(3)
        before = model[2].bias.detach().clone()
        with seeded(step):
            opt.step(counting)
            assert torch.equal(torch.rand(3), expected[1])
        assert all(torch.equal(x, expected[0]) for x in drawn) and len(drawn) > 1
        drawn.clear()
        assert model.count == step + 1 and torch.equal(model.seen, before)


def test_what_is_no_residual_is_refused():
    model, closure = problem()
    with pytest.raises(ValueError, match="NaturalGradient"):
        EKFAC(model).step(closure)
    opt = KFAC(model)
    opt.step(closure)
    with pytest.raises(TypeError, match="every step"):
        opt.step()
    with pytest.raises(ValueError, match=r"\(M,\)"):
        opt.step(lambda: closure().sum())


# -- checkpoints


@each_optimizer
def test_parameters_may_be_frozen_and_thawed(optimizer: type[KFAC]):
    """Displacements are remembered of what is trained; a state may be loaded when less of the model is."""
    model, closure = problem()
    opt = optimizer(model, momentum=0.5)
    losses = train(opt, closure, 2)
    model[0].weight.requires_grad_(False)
    state, frozen = copy.deepcopy(opt.state_dict()), model[0].weight.clone()
    losses += train(opt, closure, 1)
    assert torch.equal(model[0].weight, frozen)
    opt.load_state_dict(state)
    losses += train(opt, closure, 1)
    model[0].weight.requires_grad_(True)
    losses += train(opt, closure, 2)
    assert not torch.equal(model[0].weight, frozen)
    assert all(b <= a for a, b in itertools.pairwise(losses))
