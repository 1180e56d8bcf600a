"""What optimizers refuse before anything is changed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from optimizers import EKFAC, KFAC, NaturalGradient

pytestmark = pytest.mark.fast

OPTIMIZERS = [KFAC, EKFAC, NaturalGradient]
network = lambda width=5: nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))


def train(model: nn.Module, opt: KFAC) -> None:
    opt.zero_grad()
    model(torch.ones(6, 4)).square().mean().backward()
    opt.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_parameters_of_others(kind: type[KFAC]):
    model = network()
    opt = kind(model)
    for params in (nn.Linear(2, 2).parameters(), nn.Parameter(torch.zeros(3)), [("p", nn.Parameter(torch.zeros(3)))]):
        with pytest.raises(ValueError, match="is none of the model's"):
            opt.add_param_group({"params": params})
    assert len(opt.param_groups) == 1
    model.append(nn.Linear(3, 2))
    opt.add_param_group({"params": model[3].parameters(), "lr": 0.5})
    before = model[3].weight.detach().clone()
    train(model, opt)
    assert not torch.equal(model[3].weight, before)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_states_of_another_model(kind: type[KFAC]):
    model = network()
    opt = kind(model)
    train(model, opt)
    deeper = nn.Sequential(*network(), nn.Linear(3, 2))
    for other, text in (
        (network(7), r"0\.weight has shape \[5, 4\] there and \[7, 4\] here"),
        (deeper, r"3\.weight .*nowhere"),
    ):
        twin = kind(other)
        before = copy.deepcopy(twin.state_dict())
        with pytest.raises(ValueError, match=text):
            twin.load_state_dict(opt.state_dict())
        assert str(twin.state_dict()) == str(before)
