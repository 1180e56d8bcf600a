"""Step rules on their own, directions of descent against dense matrices, and rules of one's own in an optimizer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimizers import EKFAC, KFAC, NaturalGradient, Outcome, StepContext, StepRule
from optimizers.steps.directions import Direction, horizon
from optimizers.steps.layer_vector import LayerVector
from optimizers.steps.quadratic_model import GROW, MOST_TRIES, Trial, first_accepted
from optimizers.steps.rule import Evaluation, layout_of_step
from support.cases.case import seeded
from support.oracles.brute_force import Matrices
from support.training import backward, closure_of, task

pytestmark = pytest.mark.fast


# -- the ladder of dampings


@pytest.mark.parametrize(
    ("ratios", "least", "tries", "is_accepted"),
    [
        ([-1.0] * MOST_TRIES, 0.0, MOST_TRIES, False),
        ([-1.0, 0.0], 0.0, 2, False),  # a loss that does not change at all
        ([0.25] * MOST_TRIES, 0.5, MOST_TRIES, True),  # the last try needs no more than a lower loss
        ([-0.25] * MOST_TRIES, 0.5, MOST_TRIES, False),
    ],
)
def test_where_a_ladder_ends(ratios: list[float], least: float, tries: int, is_accepted: bool) -> None:
    left = iter(ratios)
    trial = first_accepted(lambda damping: (next(left), None), 1.0, least)
    assert not list(left)
    assert trial == Trial(1.0, GROW ** (tries - 1), ratios[-1], tries - is_accepted, is_accepted, None)


# -- rules of one's own


class Steady(StepRule):
    """A fixed multiple of the preconditioned gradients' running sum."""

    def __init__(self) -> None:
        self.count = 0
        self.sums: dict[str, Tensor] = {}

    def step(self, context: StepContext, evaluation: Evaluation) -> Outcome:
        gradients = context.gradients()
        renewal = context.renew(gradients)
        solved = context.solve(gradients)
        self.count += 1
        self.sums = {name: u + 0.5 * self.sums[name] if self.sums else u for name, u in solved.items()}
        displacement = {name: -0.1 * u for name, u in self.sums.items()}
        return Outcome(evaluation.value, displacement, entry={"accepted": True, "count": self.count}, renewal=renewal)


def network() -> nn.Sequential:
    with seeded(1):
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


with seeded(0):
    X, Y = torch.randn(8, 3), torch.randint(2, (8,))
loss_of = lambda model: closure_of(model, model, F.cross_entropy, X, Y)


@pytest.mark.parametrize("optimizer", [KFAC, EKFAC, NaturalGradient], ids=lambda o: o.__name__)
def test_its_displacement_is_added(optimizer: type[KFAC]) -> None:
    model, rule = network(), Steady()
    opt = optimizer(model, step_rule=rule)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    first = loss_of(model)()
    opt.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), before[name] - 0.1 * rule.sums[name])
    assert opt.step(loss_of(model)) < first
    assert [(entry["step"], entry["count"]) for entry in opt.history] == [(0, 1), (1, 2)]
    assert opt.steps == 2


def test_its_state_survives_checkpoints_and_copies() -> None:
    model = network()
    opt = KFAC(model, step_rule=Steady())
    for _ in range(3):
        opt.step(loss_of(model))
    copied, twin = copy.deepcopy((opt, model))
    other = copy.deepcopy(model)
    loaded = KFAC(other, step_rule=Steady())
    loaded.load_state_dict(copy.deepcopy(opt.state_dict()))
    for one, own in ((opt, model), (copied, twin), (loaded, other)):
        one.step(loss_of(own))
        assert one.history[-1]["count"] == 4
        torch.testing.assert_close(own.state_dict(), model.state_dict(), rtol=0, atol=0)


class Halving(StepRule):
    """Halves a step until the loss falls, as docs/guides/step_rules.md says how."""

    needs_closure = True

    def evaluate(self, context: StepContext) -> Evaluation:
        return self.replayed(context)

    def step(self, context: StepContext, evaluation: Evaluation) -> Outcome:
        loss, replay, monitor = evaluation.value, evaluation.replay, context.preconditioner.monitor
        assert replay is not None and context.closure is not None
        renewal, steps = context.renew(context.gradients()), context.solve(context.gradients())
        before = {name: context.trained[name].clone() for name in steps}

        def move() -> dict[str, Any]:
            for size in [8 * 0.5**k for k in range(20)]:
                for name, u in steps.items():
                    context.trained[name].copy_(before[name] - size * u)
                if replay.loss() < loss:
                    return {"step_size": size}
            return {"accepted": False}

        with monitor.timed("trials"):
            return Outcome(loss, entry=monitor.attempt(move), renewal=renewal)


def test_a_rule_may_call_the_closure_again() -> None:
    model = network()
    opt = KFAC(model, step_rule=Halving())
    losses = [float(opt.step(loss_of(model))) for _ in range(5)]
    assert sorted(losses, reverse=True) == losses and len(set(losses)) == 5
    assert all(entry.get("accepted", True) for entry in opt.history) and opt.stats()["seconds_in"]["trials"]
    with pytest.raises(TypeError, match=r"KFAC\.step: pass a closure"):
        opt.step()


def test_wrong_rules_are_refused() -> None:
    with pytest.raises(TypeError, match="step_rule"):
        KFAC(network(), step_rule=Steady)  # type: ignore[arg-type]  # the class
    with pytest.raises(ValueError, match="step_rule"):
        KFAC(network(), step_rule=Steady(), adaptive=True)
    with pytest.raises(ValueError, match="step_rule"):
        NaturalGradient(network(), step_rule=Steady(), line_search=True)


# -- residuals


ENTROPY = nn.CrossEntropyLoss()
DAMPING = 0.1


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double(), torch.randn(6, 3).double()
    return model, x, torch.tensor([0, 1, 2, 0, 1, 2])


def gradient_norm(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()


def direction(opt: Any) -> Direction:
    """For the gradients that parameters have now, in the middle of a step."""
    context = opt._context(None)
    gradients = context.gradients()
    g = LayerVector.of(layout_of_step(context, gradients), gradients)
    return opt.rule.direction(context, g, 1.0)


@pytest.mark.parametrize("optimizer", [KFAC, EKFAC])
def test_directions_are_those_of_debiased_means(optimizer: type[KFAC]) -> None:
    """The weights of gradients fall by the momentum of their group, and add up to one.

    Gradients are in units of their usual norm, which is that of the first at the next two steps, or a running mean.
    """
    model, loss, x, y = task("mlp")
    momenta = {"3": 0.5, "1": 0.8}  # not in the order of the layers
    groups = [{"params": list(model.get_submodule(name).parameters()), "momentum": m} for name, m in momenta.items()]
    opt, seen = optimizer(model, groups=groups), []
    for _ in range(3):
        backward(model, opt, loss, x, y)
        norm = opt.rule.state.norm if seen else float(gradient_norm(model))
        seen.append({name: p.grad / norm for name, p in model.named_parameters()})
        opt.step()
    for name, p in model.named_parameters():
        m = momenta[name.split(".")[0]]
        mean = (m**2 * seen[0][name] + m * seen[1][name] + seen[2][name]) / (m**2 + m + 1)
        torch.testing.assert_close(opt.state[p]["momentum_buffer"], mean)


def test_a_mean_without_a_given_momentum_remembers_more_and_more_steps() -> None:
    """At the second step 10.05 of them, in the end 30."""
    assert [horizon(step) for step in (0, 1, 400, 10**6)] == pytest.approx([10, 10.05, 30, 30])
    model, loss, x, y = task("mlp")
    opt = KFAC(model)
    backward(model, opt, loss, x, y)
    opt.step()
    first = {name: opt.state[p]["momentum_buffer"].clone() for name, p in model.named_parameters()}
    backward(model, opt, loss, x, y)
    direction(opt).keep()
    fresh, known = 1 / 10.05, 1 / 10
    share = fresh / (known + fresh * (1 - known))
    for name, p in model.named_parameters():
        expected = first[name] + share * (p.grad - first[name])
        torch.testing.assert_close(opt.state[p]["momentum_buffer"], expected)


@pytest.mark.parametrize("layerwise", [False, True])
def test_energies_of_natural_gradients_are_without_damping(layerwise: bool) -> None:
    """The predicted change of the outputs is the root of u^T G u for u = (G + damping)^-1 g, or the sum over layers.

    The gradient g is in units of its norm.
    """
    model, x, y = problem()
    opt = NaturalGradient(model, loss=ENTROPY, damping=DAMPING, layerwise=layerwise)
    G = Matrices(model, ENTROPY, (x, y)).gauss_newton
    backward(model, opt, ENTROPY, x, y)
    g = torch.cat([p.grad.flatten() for p in model.parameters()]) / gradient_norm(model)
    opt.step()
    energy = 0.0
    for layer in [slice(0, 16), slice(16, 31)] if layerwise else [slice(0, 31)]:
        block = G[layer, layer]
        u = torch.linalg.solve(block + DAMPING * torch.eye(len(block)).double(), g[layer])
        energy += float(u @ block @ u)
    assert opt.rule.state.change == pytest.approx(energy**0.5)
