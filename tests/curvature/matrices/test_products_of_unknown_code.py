"""What the code of a model may read where nobody can compare it: products of such models keep no graphs."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
import support.cases.case as other_module
from support.cases.case import seeded

NUMBERS = {"scale": [1.0]}


class Net(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(3, 4), nn.Linear(4, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


class Slotted:
    """Nobody sees what is in the slots of an object."""

    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


ARRAY = np.ones(1)
SLOTTED = Slotted()


def from_slots(x: Tensor) -> Tensor:
    return x * SLOTTED.scale


def from_an_array(x: Tensor) -> Tensor:
    return x * float(ARRAY[0])


def from_a_module(x: Tensor) -> Tensor:
    return x * getattr(other_module, "scale", 1.0)


def from_an_import(x: Tensor) -> Tensor:
    import support.cases.case as case

    return x * getattr(case, "scale", 1.0)


def from_the_environment(x: Tensor) -> Tensor:
    return x * float(os.environ.get("SCALE", "1"))


def by_evaluation(x: Tensor) -> Tensor:
    scaled: Tensor = eval("x * NUMBERS['scale'][0]")
    return scaled


def made(source: str, **names: Any) -> Callable[[Tensor], Tensor]:
    """A function of no module."""
    exec(source, names)
    found: Callable[[Tensor], Tensor] = names["made"]
    return found


@functools.wraps(F.gumbel_softmax)  # whose __module__ it gets
def under_another_name(x: Tensor) -> Tensor:
    return x * SLOTTED.scale


UNKNOWN = [
    from_slots,
    from_an_array,
    from_a_module,
    from_an_import,
    from_the_environment,
    by_evaluation,
    under_another_name,
]
UNKNOWN += [made("def made(x): return x * slotted.scale", slotted=SLOTTED)]


@pytest.mark.parametrize(("function", "is_kept"), [(torch.tanh, True), *((function, False) for function in UNKNOWN)])
def test_what_nobody_knows_is_not_kept(
    function: Callable[[Tensor], Tensor], is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with seeded(0):
        model, x = Net(function).double(), torch.randn(5, 3, dtype=torch.float64)
    setting: Any = model, nn.CrossEntropyLoss(), (x, torch.tensor([0, 1, 1, 0, 2]))
    operator = curvature.gauss_newton(*setting)
    V = operator.space.normal(2)
    first = operator @ V
    assert bool(operator._product.__self__.passes.kept.found) == is_kept
    monkeypatch.setattr(SLOTTED, "scale", 2.0)
    monkeypatch.setattr(other_module, "scale", 2.0, raising=False)
    monkeypatch.setenv("SCALE", "2")
    monkeypatch.setitem(NUMBERS, "scale", [2.0])
    ARRAY[0] = 2.0
    try:
        found, expected = operator @ V, curvature.gauss_newton(*setting) @ V
    finally:
        ARRAY[0] = 1.0
    assert torch.allclose(found, first) == is_kept
    torch.testing.assert_close(found, expected)


def test_after_a_recurrent_layer_under_vmap() -> None:
    """Its list of weights still holds those of `vmap`, which have no memory, up to the next forward pass."""
    with seeded(0):
        model, x = nn.RNN(3, 3, batch_first=True).double(), torch.randn(5, 2, 3, dtype=torch.float64)
    run = lambda p: torch.func.functional_call(model, p, x)[0].sum()
    weights = {name: p.expand(2, *p.shape) for name, p in model.named_parameters()}
    with pytest.raises(RuntimeError):
        torch.func.vmap(torch.func.hessian(lambda p: run(p).item()))(weights)
    last = Last(model)
    y = torch.tensor([0, 1, 1, 0, 2])
    operator = curvature.gauss_newton(last, nn.CrossEntropyLoss(), (x, y))
    v = operator.space.normal(1)
    torch.testing.assert_close(operator @ v, curvature.gauss_newton(last, nn.CrossEntropyLoss(), (x, y)) @ v)


class Last(nn.Module):
    def __init__(self, rnn: nn.RNN) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0][:, -1]
