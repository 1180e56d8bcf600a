"""Mistakes that would train nothing, or in another way than was meant, are told or raise."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler, optimizer

from curvature.recording import warn_once
from optimizers import EKFAC, KFAC, NaturalGradient, StepRule
from support.habits import copied, moved

X, Y = torch.rand(20, 4, generator=torch.Generator().manual_seed(0)), torch.ones(20, 1)
REPEATED = {
    "KFAC": lambda model: KFAC(model, adaptive=True),
    "EKFAC": lambda model: EKFAC(model, adaptive=True),
    "NaturalGradient": lambda model: NaturalGradient(model, adaptive=True),
    "line search": lambda model: NaturalGradient(model, line_search=True),
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def train(model: nn.Module, opt: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        opt.zero_grad()
        F.mse_loss(model(X), Y).backward()
        opt.step()


@pytest.mark.parametrize("returned", [{"displacement": {}}, None, (1, 2)])
def test_a_rule_that_returns_no_outcome_is_told_what_to_return(returned: Any) -> None:
    class Other(StepRule):
        def step(self, context: Any, evaluation: Any) -> Any:
            return returned

    model = network()
    with pytest.raises(TypeError, match=rf"step_rule: Other.step returned a {type(returned).__name__}; .*Outcome"):
        train(model, KFAC(model, step_rule=Other()), 1)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    warn_once.cache_clear()
    caplog.set_level(logging.WARNING)
    return caplog


@pytest.mark.parametrize("make", [KFAC, EKFAC, NaturalGradient])
def test_a_rate_of_another_optimizer_is_told(make: Any, said: pytest.LogCaptureFixture) -> None:
    for lr in (1.0, 0.1, 0.0):
        make(network(), lr=lr)
    assert "lr=" not in said.text
    make(network(), lr=1e-3)
    assert f"{make.__name__}: lr=0.001 multiplies the step" in said.text


@pytest.mark.parametrize("mistake", ["another copy", "no backward"])
@pytest.mark.parametrize("make", [KFAC, EKFAC, NaturalGradient])
def test_three_empty_steps_are_told(make: Any, mistake: str, said: pytest.LogCaptureFixture) -> None:
    model = network()
    opt, other = make(model), copy.deepcopy(model)
    for k in range(5):
        assert ("three steps in a row" in said.text) == (k >= 3)
        opt.zero_grad()
        loss = F.mse_loss((other if mistake == "another copy" else model)(X), Y)
        if mistake == "another copy":
            loss.backward()
        opt.step()
    assert said.text.count("three steps in a row") == 1


@pytest.mark.parametrize("make", [KFAC, EKFAC, NaturalGradient])
@pytest.mark.parametrize("scale", [None, 2.0**6])
def test_bad_batches_in_a_row_are_told_once(make: Any, scale: float | None, said: pytest.LogCaptureFixture) -> None:
    """At the third of each run of them, by the name of the first bad parameter; two are no run."""
    model = network()
    opt, told = make(model), 0
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None, growth_interval=10**6)
    for bad in "ooo..o.........o...o":
        opt.zero_grad()
        scaler.scale(F.mse_loss(model(X), Y)).backward()
        if bad == ".":
            model[0].bias.grad[1:] = float("nan")
        scaler.step(opt)
        scaler.update()
    for record in said.records:
        told += "3 batches in a row were left out" in record.message and "that of 0.bias)" in record.message
    assert told == 2 == said.text.count("batches in a row")


@pytest.mark.parametrize("make", [KFAC, EKFAC, NaturalGradient])
def test_nothing_is_registered_for_other_optimizers(make: Any) -> None:
    hooks = optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks
    before = [len(each) for each in hooks]
    model = network()
    train(model, make(model), 2)
    assert [len(each) for each in hooks] == before


# -- closures that are called again for other parameters, but do not compute with them


def cached(model: nn.Module, is_called: bool = False) -> Callable[[], Tensor]:
    predicted = model(X)
    return lambda: F.mse_loss(predicted + 0 * model(X).detach() if is_called else predicted, Y)


def cached_loss(model: nn.Module) -> Callable[[], Tensor]:
    value = F.mse_loss(model(X), Y)
    return lambda: value


CLOSURES = {
    "cached predictions": cached, "cached predictions, and a call": functools.partial(cached, is_called=True),
    "cached loss": cached_loss,
}  # fmt: skip


@pytest.mark.parametrize("is_detached", [False, True])
@pytest.mark.parametrize("case", CLOSURES)
@pytest.mark.parametrize("name", REPEATED)
def test_a_closure_of_a_loss_that_no_step_changes_raises(name: str, case: str, is_detached: bool) -> None:
    model = network()
    opt = REPEATED[name](model)
    loss = CLOSURES[case](model)

    def closure() -> Tensor:
        opt.zero_grad()
        value = loss()
        value.backward(retain_graph=True)
        return value.detach() if is_detached else value

    before = copied(model)
    with pytest.raises(RuntimeError, match="closure: it returned a loss .*before the closure was called"):
        opt.step(closure)
    assert not moved(model, before)


@pytest.mark.parametrize("is_called", [False, True])
@pytest.mark.parametrize("name", REPEATED)
def test_a_step_on_the_loss_of_another_model_is_none_and_logged(name: str, is_called: bool, said: Any) -> None:
    model = network()
    opt, other, before = REPEATED[name](model), copy.deepcopy(model), copied(model)

    def closure() -> Tensor:
        opt.zero_grad()
        if is_called:
            model(X)
        value = F.mse_loss(other(X), Y)
        value.backward()
        return value

    for _ in range(3):
        opt.step(closure)
    assert not moved(model, before) and opt.steps == 0
    assert [r.getMessage() for r in said.records if "depends on no parameter" in r.getMessage()] != []


@pytest.mark.parametrize("make", [KFAC, NaturalGradient, lambda m: NaturalGradient(m, adaptive=True)])
@pytest.mark.parametrize("case", ["outputs", "residuals", "copy"])
def test_residuals_from_outside_raise(make: Any, case: str) -> None:
    model = network().double()
    x, opt = X.double(), make(model)
    predicted, other = model(x), copy.deepcopy(model)
    residuals = (predicted - 1)[:, 0]
    closures = {"outputs": lambda: (predicted - 1)[:, 0], "residuals": lambda: residuals}
    closures["copy"] = lambda: (other(x) - 1)[:, 0]
    with pytest.raises(RuntimeError, match="closure: it returned residuals"):
        opt.step(closures[case])


@pytest.mark.parametrize("name", REPEATED)
@pytest.mark.parametrize("form", ["frozen trunk", "parameters alone", "cached features"])
def test_a_closure_that_reads_some_parameters_itself_steps(name: str, form: str) -> None:
    model = network()
    if form == "frozen trunk":
        model[0].requires_grad_(False)
    opt = REPEATED[name](model)
    known = model[0](X).detach()

    def closure() -> Tensor:
        opt.zero_grad()
        value = F.mse_loss(model(X), Y)
        if form == "parameters alone":
            value = value + sum(p.square().sum() for p in model.parameters())
        if form == "cached features":
            value = value + known.square().mean()
        value.backward()
        return value

    first = float(opt.step(closure))
    for _ in range(4):
        last = float(opt.step(closure))
    assert last < first


@pytest.mark.parametrize("name", REPEATED)
def test_a_step_without_its_closure_names_the_optimizer(name: str) -> None:
    model = network()
    opt = REPEATED[name](model)
    with pytest.raises(TypeError, match=rf"^{type(opt).__name__}\("):
        opt.step()


class Hand:
    def __init__(self, opt: torch.optim.Optimizer) -> None:
        self.opt, self.number = opt, 0
        self.step()

    def step(self) -> None:
        self.number += 1
        self.opt.param_groups[0]["lr"] = self.number / 100


SCHEDULES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "one cycle": (lambda opt: lr_scheduler.OneCycleLR(opt, 0.01, total_steps=20), True),
    "cyclic": (lambda opt: lr_scheduler.CyclicLR(opt, 0.01, 0.02, cycle_momentum=False), True),
    "one cycle up to 1": (lambda opt: lr_scheduler.OneCycleLR(opt, 1.0, total_steps=20, cycle_momentum=False), False),
    "warm-up": (lambda opt: lr_scheduler.LambdaLR(opt, lambda k: (k + 1) / 1000), False),
    "to zero": (lambda opt: lr_scheduler.LambdaLR(opt, lambda k: 1 - k / 4), False),
    "by hand": (lambda opt: Hand(opt), False),
    "annealed": (lambda opt: lr_scheduler.ExponentialLR(opt, 0.01), False),
}


@pytest.mark.parametrize("optimizer", [KFAC, EKFAC, NaturalGradient], ids=lambda o: o.__name__)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_largest_rate_far_below_one_is_told(optimizer: Any, name: str, said: pytest.LogCaptureFixture) -> None:
    make, is_told = SCHEDULES[name]
    model = nn.Linear(3, 2)
    opt = optimizer(model, momentum=0.5)  # schedules of one cycle set it, too
    schedule = make(opt)
    for _ in range(4):
        opt.zero_grad()
        model(torch.ones(4, 3)).square().mean().backward()
        opt.step()
        schedule.step()
    said = [record.getMessage() for record in said.records if "multiplies the step" in record.getMessage()]
    assert len(said) == is_told
    assert not is_told or "lr=0.01 " in said[0]
