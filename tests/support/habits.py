"""What tests of habits in training loops share: a small model and its data, the plain loop, and what compares runs."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import seeded

Make = Callable[..., KFAC]
M = TypeVar("M", bound=nn.Module)
MAKERS: dict[str, Make] = {
    "KFAC": KFAC, "EKFAC": EKFAC, "NaturalGradient": NaturalGradient,
    "KFAC-adaptive": functools.partial(KFAC, adaptive=True),
    "NaturalGradient-search": functools.partial(NaturalGradient, line_search=True),
}  # fmt: skip
PLAIN = ("KFAC", "EKFAC", "NaturalGradient")
every_optimizer = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)  # such tests make their steps by `train`
without_closure = pytest.mark.parametrize("make", [MAKERS[name] for name in PLAIN], ids=PLAIN)
QUIET = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*torch.jit", "ignore:None of the inputs")
# curvature without chance, for runs that draw other random vectors
EXACT: dict[str, Any] = {"loss": nn.CrossEntropyLoss(), "inject": curvature.exact()}

with seeded(0):
    X, Y = torch.randn(16, 8), torch.randint(3, (16,))


def net(seed: int = 1, inner: nn.Module | None = None) -> nn.Sequential:
    with seeded(seed):
        return here(nn.Sequential(nn.Linear(8, 6), nn.Tanh() if inner is None else inner, nn.Linear(6, 3)))


def here(model: M) -> M:
    """A model where the data are."""
    return model.to(X.device)


def started(make: Make, **options: Any) -> tuple[nn.Sequential, KFAC]:
    """A model and its optimizer."""
    model = net()
    return model, make(model, **options)


def backward(
    model: nn.Module, opt: Any, x: Any = X, y: Tensor = Y, call: Any = None, zero: bool = True, part: float = 1.0
) -> Tensor:
    if zero:
        opt.zero_grad()
    loss = F.cross_entropy((call or model)(x), y) * part
    loss.backward()
    return loss


def train(model: nn.Module, opt: Any, steps: int = 3, x: Any = X, y: Tensor = Y, call: Any = None) -> list[float]:
    """The losses before each of the steps."""
    losses = []
    for _ in range(steps):
        if isinstance(opt, KFAC | NaturalGradient) and opt.rule.needs_closure:
            losses.append(opt.step(lambda: backward(model, opt, x, y, call)))
        else:
            losses.append(backward(model, opt, x, y, call))
            opt.step()
    return [loss.item() for loss in losses]


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def assert_same(one: nn.Module, other: nn.Module) -> None:
    assert torch.equal(flat(one), flat(other)), (flat(one) - flat(other)).abs().max()


def assert_close(one: nn.Module, other: nn.Module, relative: float = 1e-9) -> None:
    assert (flat(one) - flat(other)).norm() <= relative * flat(one).norm()


def reference(make: Make, steps: int = 3, **options: Any) -> nn.Module:
    """The run without any habit."""
    model = net()
    before = flat(model)
    train(model, make(model, **options), steps)
    assert not torch.equal(flat(model), before)
    return model


def moved(model: nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}
