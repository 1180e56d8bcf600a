"""Weight decay has the strength of recipes for AdamW at its usual rate, whatever makes the step."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import seeded

pytestmark = pytest.mark.fast

MAKERS: dict[str, Callable[..., Any]] = {"KFAC": KFAC, "EKFAC": EKFAC, "NaturalGradient": NaturalGradient}
CLOSURES = {
    "adaptive": functools.partial(KFAC, adaptive=True),
    "search": functools.partial(NaturalGradient, line_search=True),
    "residuals": functools.partial(KFAC, damping=1.0),
    "exact residuals": functools.partial(NaturalGradient, damping=1.0),
}
adamw = lambda model, weight_decay: torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=weight_decay)
flat = lambda model: nn.utils.parameters_to_vector(model.parameters()).detach().clone()


@pytest.mark.parametrize("maker", MAKERS)
def test_parameters_without_gradient_shrink_as_with_adamw(maker: str) -> None:
    """The same factor at every step of the same schedule."""
    ends = []
    for make in (MAKERS[maker], adamw):
        with seeded(0):
            model, x = nn.Linear(3, 2).double(), torch.randn(6, 3).double()
        opt = make(model, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 40)
        for _ in range(30):
            opt.zero_grad()
            (0 * model(x).sum()).backward()
            opt.step()
            schedule.step()
        ends.append(flat(model))
    torch.testing.assert_close(*ends, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", CLOSURES)
def test_decay_is_beside_the_step(name: str) -> None:
    """Of one with a closure: what it makes of a model, with and without."""
    ends, rate, decay = [], 0.5, 20.0
    with seeded(0):
        x, y = torch.randn(12, 3).double(), torch.randn(12).double()
    for own in (0.0, decay):
        with seeded(1):
            model = nn.Linear(3, 1).double()
        start = flat(model)
        opt = CLOSURES[name](model, lr=rate, weight_decay=own)

        def closure() -> Tensor:
            r = model(x)[:, 0] - y  # noqa: B023
            return r if "residuals" in name else r.square().mean()

        opt.step(closure)
        ends.append(flat(model))
    share = 1e-3 * rate * decay
    before, after = ends[0] - share * start, (1 - share) * ends[0]  # of the parameters at the start, or at the end
    assert torch.allclose(ends[1], before, atol=1e-9) or torch.allclose(ends[1], after, atol=1e-9)


@pytest.mark.parametrize("maker", MAKERS)
def test_groups_at_construction_have_their_own_options(maker: str) -> None:
    """Weights decay, biases do not, and the last layer keeps still."""
    with seeded(0):
        model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double(), torch.randn(6, 3).double()
    groups = [{"params": [model[0].bias], "weight_decay": 0.0}, {"params": model[1].named_parameters(), "lr": 0.0}]
    opt = MAKERS[maker](model, weight_decay=0.1, groups=iter(groups))
    assert [len(group["params"]) for group in opt.param_groups] == [1, 1, 2]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for _ in range(10):
        opt.zero_grad()
        (0 * model(x).sum()).backward()
        opt.step()
    factors = {name: float(p.detach().sum() / before[name].sum()) for name, p in model.named_parameters()}
    assert factors == pytest.approx({"0.weight": (1 - 1e-4) ** 10, "0.bias": 1, "1.weight": 1, "1.bias": 1}, abs=1e-12)
    again = copy.deepcopy(opt)
    assert [group["weight_decay"] for group in again.param_groups] == [0.1, 0.0, 0.1]


@pytest.mark.parametrize("maker", MAKERS)
def test_one_group_of_all_and_wrong_groups(maker: str) -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    assert len(MAKERS[maker](model, groups=[{"params": model.parameters(), "lr": 0.5}]).param_groups) == 1
    with pytest.raises(ValueError, match="none of the model's"):
        MAKERS[maker](model, groups=[{"params": other.parameters()}])
    with pytest.raises(ValueError, match="more than one parameter group"):
        MAKERS[maker](model, groups=[{"params": [model.bias]}, {"params": [model.bias]}])
    with pytest.raises(TypeError, match='expected a dict with "params"'):
        MAKERS[maker](model, groups=[model.bias])
    with pytest.raises(ValueError, match="weight_decay: expected"):
        MAKERS[maker](model, groups=[{"params": [model.bias], "weight_decay": -1.0}])
