"""Directions of descent, against dense matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optimizers import EKFAC, KFAC, NaturalGradient
from optimizers.steps.directions import Direction
from optimizers.steps.layer_vector import LayerVector
from optimizers.steps.rule import layout_of_step
from support.cases.case import seeded
from support.oracles.brute_force import Matrices
from support.training import backward, task

pytestmark = pytest.mark.fast
LOSS = nn.CrossEntropyLoss()
DAMPING = 0.1


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double(), torch.randn(6, 3).double()
    return model, x, torch.tensor([0, 1, 2, 0, 1, 2])


def direction(opt: Any, recall: float = 1.0) -> Direction:
    """For the gradients that parameters have now, in the middle of a step."""
    context = opt._context(None)
    gradients = context.gradients()
    g = LayerVector.of(layout_of_step(context, gradients), gradients)
    return opt.rule.direction(context, g, recall)


@pytest.mark.parametrize("optimizer", [KFAC, EKFAC])
def test_directions_are_those_of_debiased_means(optimizer: type[KFAC]) -> None:
    """The weights of gradients fall by the momentum of their group, and add up to one."""
    model, loss, x, y = task("mlp")
    momenta = {"3": 0.5, "1": 0.8}  # not in the order of the layers
    groups = [{"params": list(model.get_submodule(name).parameters()), "momentum": m} for name, m in momenta.items()]
    opt, seen = optimizer(model, groups=groups), []
    for _ in range(3):
        backward(model, opt, loss, x, y)
        seen.append({name: p.grad.clone() for name, p in model.named_parameters()})
        opt.step()
    for name, p in model.named_parameters():
        m = momenta[name.split(".")[0]]
        mean = (m**2 * seen[0][name] + m * seen[1][name] + seen[2][name]) / (m**2 + m + 1)
        torch.testing.assert_close(opt.state[p]["momentum_buffer"], mean)


@pytest.mark.parametrize(("recall", "horizon"), [(1.0, 10.05), (0.5, 5.025), (0.01, 1.0)])
def test_a_mean_without_a_given_momentum_remembers_a_share_of_the_usual_steps(recall: float, horizon: float) -> None:
    """At the second step: 10.05 of them, and at least the present one."""
    model, loss, x, y = task("mlp")
    opt = KFAC(model)
    backward(model, opt, loss, x, y)
    opt.step()
    first = {name: opt.state[p]["momentum_buffer"].clone() for name, p in model.named_parameters()}
    backward(model, opt, loss, x, y)
    direction(opt, recall=recall).keep()
    fresh, known = 1 / horizon, 1 / 10
    share = fresh / (known + fresh * (1 - known))
    for name, p in model.named_parameters():
        expected = first[name] + share * (p.grad - first[name])
        torch.testing.assert_close(opt.state[p]["momentum_buffer"], expected)


@pytest.mark.parametrize("make", [KFAC, NaturalGradient])
def test_a_direction_that_is_not_kept_changes_nothing(make: Any) -> None:
    """A step that turns out bad leaves means, weights and last directions as they were."""
    model, x, y = problem()
    opt = make(model, momentum=0.5)
    for _ in range(2):
        backward(model, opt, LOSS, x, y)
        opt.step()
    backward(model, opt, LOSS, x * 3, y)
    copy = lambda: {
        (name, k): v.clone() if isinstance(v, Tensor) else v
        for name, p in model.named_parameters()
        for k, v in opt.state[p].items()
    }
    before = copy()
    one, other = direction(opt), direction(opt)
    assert all(map(torch.equal, one.u.vectors, other.u.vectors))
    for key, value in copy().items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(before[key])), key
    one.keep()
    assert any(not torch.equal(torch.as_tensor(v), torch.as_tensor(before[key])) for key, v in copy().items())


@pytest.mark.parametrize("layerwise", [False, True])
def test_energies_of_natural_gradients_are_without_damping(layerwise: bool) -> None:
    """The predicted change of the outputs is the root of u^T G u for u = (G + damping)^-1 g, or the sum over layers."""
    model, x, y = problem()
    opt, G = (
        NaturalGradient(model, loss=LOSS, damping=DAMPING, layerwise=layerwise),
        Matrices(model, LOSS, (x, y)).gauss_newton,
    )
    backward(model, opt, LOSS, x, y)
    g = torch.cat([p.grad.flatten() for p in model.parameters()])
    opt.step()
    energy = 0.0
    for layer in [slice(0, 16), slice(16, 31)] if layerwise else [slice(0, 31)]:
        block = G[layer, layer]
        u = torch.linalg.solve(block + DAMPING * torch.eye(len(block)).double(), g[layer])
        energy += float(u @ block @ u)
    assert opt.rule.state.change == pytest.approx(energy**0.5)
