"""KFAC for closures of residuals, against loops of batch size one and dense algebra."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch
from torch import Tensor, nn

from curvature import empirical, plots
from curvature.recording import warn_once
from optimizers import EKFAC, KFAC, NaturalGradient
from optimizers.steps.quadratic_model import MOST_TRIES
from optimizers.steps.residuals import DIRECTIONS, REMEMBERED
from support.cases.case import seeded
from support.combinations import in_turn
from support.habits import copied
from support.habits import moved as moved_of
from support.oracles import derivatives as oracle_derivatives
from support.oracles.residuals import DenseSteps, damped_sum
from support.residual_problem import by_hand, closure_of, nested, problem, spread

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


def test_without_momentum_displacements_are_no_directions():
    model, closure = problem()
    opt = KFAC(model, momentum=0.0)
    train(opt, closure, 2)
    assert opt.residual_rule is not None and opt.residual_rule.moves == []


# -- what goes wrong


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


@each_optimizer
def test_derivatives_that_are_not_finite_change_nothing(optimizer: type[KFAC]):
    """Of a root at zero, say, whose residual is finite."""
    model, closure = problem()
    opt = optimizer(model)
    opt.step(closure)
    before = arranged(model)
    loss = opt.step(lambda: torch.cat([closure(), (0 * model(model.edge[:2])[:, 0]).sqrt()]))
    assert math.isfinite(loss.item()) and opt.skipped == 1 and opt.steps == 1 and torch.equal(arranged(model), before)
    opt.step(closure)
    assert opt.history[-1]["accepted"]


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


def test_residuals_of_zero_change_nothing():
    model, closure = problem()
    opt = KFAC(model)
    opt.step(closure)
    before, damping = arranged(model), opt.residual_rule.damping
    assert opt.step(lambda: 0 * closure()) == 0
    assert torch.equal(arranged(model), before) and opt.residual_rule.damping == damping


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


def test_layer_norm_is_written_out_at_the_first_step_too():
    """As a model that has it written out itself; torch's kernel has wrong third derivatives."""
    with seeded(0):
        model = nn.Sequential(nn.Linear(2, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 1)).double()
        x = torch.rand(12, 2).double()
    other = copy.deepcopy(model)
    losses = train(KFAC(model), lambda: nested(model, x)[1][:, 0] - 1, 3)
    with oracle_derivatives.written_out():
        expected = train(KFAC(other), lambda: nested(other, x)[1][:, 0] - 1, 3)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))
    torch.testing.assert_close(arranged(model), arranged(other))


@pytest.mark.parametrize(
    "arguments", [{"loss": nn.MSELoss()}, {"inject": empirical()}, {"sharing": "reduce"}], ids=lambda x: next(iter(x))
)
def test_arguments_without_a_meaning_are_refused(arguments: dict[str, Any]):
    model, closure = problem()
    before = arranged(model)
    with pytest.raises(ValueError, match=next(iter(arguments))):
        KFAC(model, **arguments).step(closure)
    assert torch.equal(arranged(model), before)


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
def test_a_copy_goes_the_same_way(optimizer: type[KFAC]):
    model, closure = problem()
    opt = optimizer(model)
    train(opt, closure, 3)
    copied, twin = copy.deepcopy((model, opt))
    copied.inside, copied.edge = model.inside, model.edge
    assert train(twin, closure_of(copied), 2) == train(opt, closure, 2)
    assert torch.equal(arranged(copied), arranged(model))


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


@each_optimizer
def test_single_precision_is_warned_of_once(optimizer: type[KFAC], caplog: pytest.LogCaptureFixture):
    for dtype, times in ((torch.float64, 0), (torch.float32, 1)):
        warn_once.cache_clear()
        caplog.clear()
        model, x = nn.Linear(3, 1).to(dtype), torch.randn(12, 3, dtype=dtype)
        train(optimizer(model), lambda: model(x)[:, 0] - 1, 3)  # noqa: B023
        assert caplog.text.count("double precision, model.double()") == times
