"""Weight decay has the strength of recipes for AdamW at its usual rate, whatever makes the step."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import seeded
from support.training import task, train

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


@pytest.mark.training_run
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("decay", [0.1, 1.0])
def test_weights_of_a_run_shrink_about_as_much_as_with_adamw(maker: str, decay: float) -> None:
    """Their norm against that of the run without decay, after ten steps: later runs part by chance.

    Renewals come at every step: otherwise decay also decides when averages are renewed, and the runs part at once.
    """
    shrunk = []
    every = {} if maker == "NaturalGradient" else {"factor_every": 1, "decompose_every": 1}
    for make in (functools.partial(MAKERS[maker], **every), adamw):
        norms = []
        for own in (0.0, decay):
            model, loss, x, y = task("mlp")
            train(model, make(model, weight_decay=own), loss, x, y, 10)
            norms.append(float(flat(model).norm()))
        shrunk.append(math.log(norms[0] / norms[1]))
    assert 0.6 < shrunk[0] / shrunk[1] < 1.5, shrunk


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


# -- the default of KFAC and EKFAC: a share of how far the layer moves


def two_layers() -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)).double()
        return model, torch.randn(6, 3).double(), torch.randint(2, (6,))


def decayed(maker: Any, lrs: tuple[float, float] = (1.0, 1.0), **options: Any) -> tuple[dict[str, Tensor], ...]:
    """Parameters before a step, after it, and the step itself, the last layer having an lr of its own."""
    model, x, y = two_layers()
    opt = maker(model, lr=lrs[0], groups=[{"params": model[3].parameters(), "lr": lrs[1]}], **options)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    nn.functional.cross_entropy(model(x), y).backward()
    opt.step()
    steps = {name: opt.state[p]["displacement"].clone() for name, p in model.named_parameters()}
    return before, {name: p.detach().clone() for name, p in model.named_parameters()}, steps


@pytest.mark.parametrize("lrs", [(1.0, 1.0), (0.5, 0.1), (0.0, 1.0)])
@pytest.mark.parametrize("maker", ["KFAC", "EKFAC"])
def test_by_default_matrices_shrink_by_a_fifth_of_how_far_their_layer_moves(
    maker: str, lrs: tuple[float, float]
) -> None:
    """Relative to its norm, tensors shorter than one counting as one; biases and the scales of norms do not shrink."""
    before, after, steps = decayed(MAKERS[maker], lrs)
    for layer in ("0", "1", "3"):
        names = [f"{layer}.weight", f"{layer}.bias"]
        moved = math.sqrt(sum(float(steps[name].square().sum()) for name in names))
        whole = math.sqrt(sum(max(float(before[name].norm()), 1.0) ** 2 for name in names))
        shares = [0.2 * moved / whole if before[name].ndim > 1 else 0.0 for name in names]
        assert (shares[0] > 0) == (layer != "1" and lrs[layer == "3"] > 0)
        for name, share in zip(names, shares, strict=True):
            torch.testing.assert_close(after[name], (1 - share) * before[name] + steps[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("options", [{"weight_decay": 0}, {"weight_decay": 0.0}])
@pytest.mark.parametrize("maker", ["KFAC", "EKFAC"])
def test_zero_turns_the_default_off(maker: str, options: dict[str, Any]) -> None:
    before, after, steps = decayed(MAKERS[maker], **options)
    for name, p in after.items():
        torch.testing.assert_close(p, before[name] + steps[name], rtol=1e-12, atol=1e-14)


def test_natural_gradients_have_no_decay_by_default() -> None:
    before, after, steps = decayed(NaturalGradient)
    for name, p in after.items():
        torch.testing.assert_close(p, before[name] + steps[name], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["adaptive", "residuals"])
def test_steps_that_a_closure_judges_have_no_decay_by_default(name: str) -> None:
    """Those of `adaptive` itself: before it hands over to the plain steps."""
    ends = []
    for options in ({}, {"weight_decay": 0.0}):
        with seeded(0):
            model, x, y = nn.Linear(3, 1).double(), torch.randn(12, 3).double(), torch.randn(12).double()
        opt = CLOSURES[name](model, **options)

        def closure() -> Tensor:
            r = model(x)[:, 0] - y  # noqa: B023
            return r if name == "residuals" else r.square().mean()

        for _ in range(2):
            opt.step(closure)
        ends.append(flat(model))
    assert torch.equal(*ends)
