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
from torch._dynamo.testing import CompileCounter
from torch.optim import lr_scheduler

from curvature.recording import warn_once
from optimizers import EKFAC, KFAC, NaturalGradient, Outcome, StepRule
from optimizers.model_optimizer import STEPPING
from support.habits import copied, moved
from support.training import closure_of

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


class Descent(StepRule):
    """Small steps along the direction, told in one of several ways."""

    def __init__(self, form: str) -> None:
        self.form = form

    def step(self, context: Any, evaluation: Any) -> Any:
        gradients = context.gradients()
        if not gradients:
            return Outcome(evaluation.value)
        renewal = context.renew(gradients)
        moves = {name: -0.1 * d for name, d in context.solve(gradients).items()}
        if self.form == "moves itself":
            for name, d in moves.items():
                context.trained[name].add_(d)
            return Outcome(evaluation.value, renewal=renewal)
        known = {"without entry": {}, "without renewal": {}, "with entry": {"entry": {}, "renewal": renewal}}
        return Outcome(evaluation.value, moves, **known[self.form])


@pytest.mark.parametrize("form", ["without entry", "without renewal", "with entry"])
def test_steps_of_a_rule_count_whatever_it_tells(form: str) -> None:
    model = network()
    opt = KFAC(model, factor_every=5, step_rule=Descent(form))
    recorded = []
    opt.recorder.record = lambda *args: recorded.append(1)  # type: ignore[method-assign]
    train(model, opt, 30)
    assert opt.steps == 30
    assert len(recorded) < 20
    assert [entry["step"] for entry in opt.history] == list(range(30))


def test_a_rule_that_moves_parameters_itself_counts_with_its_renewals() -> None:
    model = network()
    opt = NaturalGradient(model, step_rule=Descent("moves itself"))
    train(model, opt, 4)
    assert opt.steps == 4


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


def test_empty_steps_between_others_are_no_mistake(said: pytest.LogCaptureFixture) -> None:
    model = network()
    opt = KFAC(model)
    for _ in range(4):
        train(model, opt, 1)
        opt.zero_grad()
        opt.step()
        opt.step()
    assert "three steps in a row" not in said.text


@pytest.mark.parametrize("name", REPEATED)
def test_adaptive_steps_leave_no_empty_state(name: str) -> None:
    model = network()
    opt = REPEATED[name](model)
    closure = closure_of(model, opt, F.mse_loss, X, Y)
    for _ in range(3):
        opt.step(closure)
        assert all(opt.state.values())


def in_turn(model: nn.Module, *optimizers: torch.optim.Optimizer, rounds: int = 3) -> None:
    for _ in range(rounds):
        for opt in optimizers:
            train(model, opt, 1)


@pytest.mark.parametrize("others", [["KFAC"], ["EKFAC"], ["NaturalGradient"], ["of a part"], ["SGD"]])
def test_optimizers_that_step_the_same_parameters_in_turn(others: list[str], said: pytest.LogCaptureFixture):
    model = network()
    kinds = {"KFAC": KFAC, "EKFAC": EKFAC, "NaturalGradient": NaturalGradient}
    make = {name: lambda name=name: kinds[name](model) for name in kinds} | {
        "of a part": lambda: KFAC(model[0]), "SGD": lambda: torch.optim.SGD(model.parameters(), 1e-3),
    }  # fmt: skip
    first = KFAC(model)
    in_turn(model, first)
    in_turn(model, *(made := [make[name]() for name in others]))  # one after the other is no fault
    assert not said.records
    in_turn(model, first, *made)
    (record,) = said.records
    assert "step the same parameters in turn (" in record.message and "weight, ...)" in record.message


def test_an_optimizer_within_another_is_no_mistake(said: pytest.LogCaptureFixture) -> None:
    """As of wrappers that average parameters over steps."""

    class Around(torch.optim.Optimizer):
        def __init__(self, inner: KFAC) -> None:
            super().__init__([p for group in inner.param_groups for p in group["params"]], {})
            self.inner, self.fails = inner, False

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise KeyError("in a step")
            return self.inner.step(closure)

    model = network()
    opt = Around(KFAC(model))
    in_turn(model, opt)
    opt.fails = True
    with pytest.raises(KeyError):
        in_turn(model, opt)
    opt.fails = False
    in_turn(model, opt)
    assert not said.records
    in_turn(model, torch.optim.SGD(model.parameters(), 1e-3), opt.inner)
    assert "KFAC and SGD step the same parameters in turn" in said.text


def test_compiled_steps_of_other_optimizers_stay_as_they_are() -> None:
    """Our hooks are no part of their code."""
    torch._dynamo.reset()
    model = network()
    kept, other = KFAC(model), torch.optim.Adam(nn.Linear(3, 2).parameters())
    while kept.recorder.may_be_due():  # before a renewal nothing is compiled
        train(model, kept, 1)
    for p in other.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    before, counter = len(STEPPING), CompileCounter()
    step = torch.compile(other.step, backend=counter)
    for _ in range(2):
        step()
    assert counter.frame_count and len(STEPPING) == before and not kept._since


def test_optimizers_in_turn_with_closures(said: pytest.LogCaptureFixture):
    """Gradients come in the step itself."""
    model = network()
    both = [KFAC(model, adaptive=True), NaturalGradient(model, adaptive=True)]
    for opt in both * 2:
        opt.zero_grad()
        closure = closure_of(model, opt, F.mse_loss, X, Y)
        opt.step(closure)
    assert "step the same parameters in turn" in said.text


def test_optimizers_of_other_parameters_and_former_ones_are_no_mistake(said: pytest.LogCaptureFixture):
    model = network()
    in_turn(model, KFAC(model[0]), EKFAC(model[2]))
    for _ in range(3):  # made anew
        opt = KFAC(model)
        train(model, opt, 3)
        del opt
    rest = torch.optim.SGD(model[2].parameters(), 1e-3)
    in_turn(model, KFAC(model[0]), rest)
    twin = copy.deepcopy(model)
    one, other = KFAC(model), KFAC(twin)
    for _ in range(3):
        train(model, one, 1)
        train(twin, other, 1)
    halves = KFAC(model), KFAC(model)  # in turn, but each with one layer alone
    for _ in range(3):
        for opt, frozen in zip(halves, (model[0], model[2]), strict=True):
            frozen.requires_grad_(False)
            train(model, opt, 1)
            frozen.requires_grad_(True)
    halves = KFAC(model), torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(3):
        for opt, left in zip(halves, (model[0], model[2]), strict=True):
            opt.zero_grad()
            F.mse_loss(model(X), Y).backward()
            left.zero_grad()  # what has no gradient does not move
            opt.step()
    assert not said.records


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


def test_a_plain_step_takes_a_closure_of_outputs_computed_before() -> None:
    model = network()
    opt, predicted = KFAC(model), model(X)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.mse_loss(predicted, Y)
        loss.backward()
        return loss

    first = opt.step(closure).item()
    assert float(F.mse_loss(model(X), Y)) < first


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
