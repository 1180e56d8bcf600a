"""Parameters change their precision or device in place, as by ``model.double()``: all state follows."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import seeded

MAKERS: dict[str, Callable[..., Any]] = {
    "KFAC": KFAC,
    "KFAC-damped": functools.partial(KFAC, damping=0.1, momentum=0.5),
    "EKFAC": EKFAC,
    "KFAC-adaptive": functools.partial(KFAC, adaptive=True),
    **{
        f"NaturalGradient-{solver}": functools.partial(NaturalGradient, solver=solver, momentum=0.5)
        for solver in ("woodbury", "cg", "dense", "diagonal")
    },
    "residuals": KFAC,
    "NaturalGradient-residuals": functools.partial(NaturalGradient, momentum=0.5),
}
with seeded(0):
    X, Y = torch.randn(12, 5), torch.randint(3, (12,))


def network() -> nn.Module:
    with seeded(1):
        return nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))


def train(model: nn.Module, opt: Any, steps: int, residuals: bool) -> list[float]:
    first = next(model.parameters())
    x = X.to(first)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x).float(), Y.to(first.device))
        loss.backward()
        return loss

    losses = []
    for _ in range(steps):
        if residuals:
            losses.append(opt.step(lambda: (model(x) - x[:, :3]).flatten()).item())
        elif opt.rule.needs_closure:
            losses.append(opt.step(closure).item())
        else:
            losses.append(closure().item())
            opt.step()
    return losses


def tensors_of(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    for x in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from tensors_of(x)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("steps", [0, 3, 11])
def test_a_model_in_double_precision_goes_on_as_from_a_state(name: str, steps: int) -> None:
    """Of the run in single precision, loaded into an optimizer of a model in double precision."""
    model, residuals = network(), "residuals" in name
    opt = MAKERS[name](model)
    losses = train(model, opt, steps, residuals)
    other = copy.deepcopy(model).double()
    resumed = MAKERS[name](other)
    resumed.load_state_dict(opt.state_dict())
    model.double()
    losses += train(model, opt, 4, residuals)
    train(other, resumed, 4, residuals)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert one.dtype == torch.float64 and torch.equal(one, two)
    assert losses[-1] < losses[0]
    kept = [x for entry in opt.state_dict()["state"].values() for x in tensors_of(entry) if x.is_floating_point()]
    assert all(x.dtype == torch.float64 for x in kept if x.ndim)


@pytest.mark.parametrize("name", [name for name in MAKERS if "residuals" not in name])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_and_back(name: str, dtype: torch.dtype) -> None:
    model = network()
    opt = MAKERS[name](model)
    losses = train(model, opt, 3, False)
    train(model.to(dtype), opt, 2, False)
    assert all(p.dtype == dtype == s["momentum_buffer"].dtype for p, s in opt.state.items() if "momentum_buffer" in s)
    losses += train(model.float(), opt, 4, False)
    assert losses[-1] < losses[0] and all(bool(torch.isfinite(p).all()) for p in model.parameters())


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("steps", [0, 3])
def test_another_device(name: str, steps: int, device: str) -> None:
    model, residuals = network(), "residuals" in name
    opt = MAKERS[name](model)
    losses = train(model, opt, steps, residuals)
    losses += train(model.to(device), opt, 4, residuals)
    assert losses[-1] < losses[0] and {p.device.type for p in model.parameters()} == {device}
    losses += train(model.cpu(), opt, 2, residuals)
    assert losses[-1] < losses[0]


def test_a_part_of_the_model_changes_between_two_renewals() -> None:
    """Also where no pass is recorded before the step."""
    model = network()
    opt = KFAC(model)
    train(model, opt, 10, False)
    while opt.recorder.is_due():
        train(model, opt, 1, False)
    model[3].double()
    model[2].register_forward_hook(lambda module, args, output: output.double())
    before = [p.detach().clone() for p in model.parameters()]
    train(model, opt, 1, False)
    assert not any(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
