"""The pieces of the directions that rules share."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from optimizers import EKFAC, KFAC, NaturalGradient
from optimizers.steps.descent import without_damping
from support.cases.case import seeded
from support.training import backward, task

pytestmark = pytest.mark.fast


def test_energy_is_without_damping():
    """u^T (M + damping) u less damping u^T u; and more than zero."""
    slope, square = torch.tensor(3.0), torch.tensor(4.0)
    assert without_damping(slope, torch.tensor(0.5), square) == 1
    assert 0 < without_damping(slope, torch.tensor(1.0), square) < 1e-5


@pytest.mark.parametrize("optimizer", [KFAC, EKFAC])
def test_directions_are_those_of_debiased_means(optimizer: type[KFAC]):
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


@pytest.mark.parametrize("layerwise", [False, True])
def test_energies_of_natural_gradients_are_without_damping(layerwise: bool):
    """The predicted change of the outputs is the root of u^T G u for u = (G + damping)^-1 g, or the sum over layers."""
    with seeded(0):
        model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double(), torch.randn(6, 3).double()
    loss, y = nn.CrossEntropyLoss(), torch.tensor([0, 1, 2, 0, 1, 2])
    opt = NaturalGradient(model, loss=loss, damping=0.1, layerwise=layerwise)
    parameters = dict(model.named_parameters())
    G, rows = torch.zeros(31, 31).double(), torch.func.jacrev(lambda p: torch.func.functional_call(model, p, x))
    J = torch.cat([part.flatten(2) for part in rows(parameters).values()], 2)
    for jacobian, output in zip(J, model(x), strict=True):
        p = output.softmax(0)
        G += jacobian.T @ (p.diag() - p.outer(p)) @ jacobian / len(x)
    backward(model, opt, loss, x, y)
    g = torch.cat([p.grad.flatten() for p in parameters.values()])
    opt.step()
    energy = 0.0
    for layer in [slice(0, 16), slice(16, 31)] if layerwise else [slice(0, 31)]:
        block = G[layer, layer]
        u = torch.linalg.solve(block + 0.1 * torch.eye(len(block)).double(), g[layer])
        energy += u @ block @ u
    torch.testing.assert_close(opt.rule.state.change, energy.sqrt())
