"""The pieces of the directions that rules share."""

from __future__ import annotations

import pytest
import torch

from optimizers import EKFAC, KFAC
from optimizers.steps.descent import without_damping
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
