"""A closure that is called again for other parameters has to compute with them; others are refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvature.recording import warn_once
from optimizers import EKFAC, KFAC, NaturalGradient

REPEATED = {
    "KFAC": lambda model: KFAC(model, adaptive=True),
    "EKFAC": lambda model: EKFAC(model, adaptive=True),
    "NaturalGradient": lambda model: NaturalGradient(model, adaptive=True),
    "line search": lambda model: NaturalGradient(model, line_search=True),
}
X, Y = torch.rand(20, 4, generator=torch.Generator().manual_seed(0)), torch.ones(20, 1)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))


def cached(model: nn.Module) -> Callable[[], Tensor]:
    predicted = model(X)
    return lambda: F.mse_loss(predicted, Y)


def cached_beside_a_call(model: nn.Module) -> Callable[[], Tensor]:
    predicted = model(X)

    def loss() -> Tensor:
        model(X)
        return F.mse_loss(predicted, Y)

    return loss


def cached_loss(model: nn.Module) -> Callable[[], Tensor]:
    value = F.mse_loss(model(X), Y)
    return lambda: value


def of_a_copy(model: nn.Module) -> Callable[[], Tensor]:
    other = copy.deepcopy(model)
    return lambda: F.mse_loss(other(X), Y)


def of_a_copy_beside_a_call(model: nn.Module) -> Callable[[], Tensor]:
    other = copy.deepcopy(model)

    def loss() -> Tensor:
        model(X)
        return F.mse_loss(other(X), Y)

    return loss


CLOSURES = {
    "cached predictions": (cached, "before the closure was called"),
    "cached predictions, and a call": (cached_beside_a_call, "before the closure was called"),
    "cached loss": (cached_loss, "before the closure was called"),
}


@pytest.mark.parametrize("is_detached", [False, True])
@pytest.mark.parametrize("case", CLOSURES)
@pytest.mark.parametrize("name", REPEATED)
def test_a_closure_of_a_loss_that_no_step_changes_raises(name: str, case: str, is_detached: bool) -> None:
    model = network()
    opt = REPEATED[name](model)
    make, message = CLOSURES[case]
    loss = make(model)

    def closure() -> Tensor:
        opt.zero_grad()
        value = loss()
        value.backward(retain_graph=True)
        return value.detach() if is_detached else value

    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=f"closure: it returned a loss .*{message}"):
        opt.step(closure)
    for p, then in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, then)


@pytest.mark.parametrize("make", [of_a_copy, of_a_copy_beside_a_call])
@pytest.mark.parametrize("name", REPEATED)
def test_a_step_on_the_loss_of_another_model_is_none_and_logged(name: str, make: Any, caplog: Any) -> None:
    warn_once.cache_clear()
    model = network()
    opt, loss = REPEATED[name](model), make(model)
    before = [p.detach().clone() for p in model.parameters()]

    def closure() -> Tensor:
        opt.zero_grad()
        value = loss()
        value.backward()
        return value

    for _ in range(3):
        opt.step(closure)
    for p, then in zip(model.parameters(), before, strict=True):
        assert torch.equal(p, then)
    assert opt.steps == 0
    assert [r.getMessage() for r in caplog.records if "depends on no parameter" in r.getMessage()] != []


@pytest.mark.parametrize("make", [KFAC, NaturalGradient, lambda m: NaturalGradient(m, adaptive=True)])
@pytest.mark.parametrize("case", ["outputs", "residuals", "copy"])
def test_residuals_from_outside_raise(make: Any, case: str) -> None:
    model = network().double()
    x, opt = X.double(), make(model)
    predicted, other = model(x), copy.deepcopy(model)
    residuals = (predicted - 1)[:, 0]
    closures = {
        "outputs": lambda: (predicted - 1)[:, 0],
        "residuals": lambda: residuals,
        "copy": lambda: (other(x) - 1)[:, 0],
    }
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
