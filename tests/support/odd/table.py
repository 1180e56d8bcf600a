"""Odd models: what people give to `torch.optim.SGD` that is no plain network from inputs to outputs.

A model is entered with the function that computes the loss of one step, which is all that a training loop knows of it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.cases.case import Raw, seeded

with seeded(0):
    X, Y = torch.randn(12, 6), torch.randint(3, (12,))
    T = torch.randn(12, 3)
    PIXELS, WORDS, NOISE = torch.randn(12, 2, 5, 5), torch.randint(7, (12, 4)), torch.randn(12, 2)
    C = torch.linspace(0.5, 2, 5)
DATA = X, Y, T, PIXELS, WORDS, NOISE, C
entropy = lambda z: F.cross_entropy(z, Y)
fit = lambda z: F.mse_loss(z, T)


@dataclass(frozen=True)
class Odd:
    """A model and how its loss is computed.

    Attributes:
        criterion: the loss module that fits the model's output.
        closes: whether a closure may compute the loss again.
    """

    build: Callable[[], nn.Module]
    loss: Callable[[Any], Tensor]
    criterion: nn.Module
    closes: bool = True

    def make(self) -> nn.Module:
        with seeded(1):
            return self.build().to(X.device)


ODD: dict[str, Odd] = {}


def odd(
    name: str, build: Callable[[], nn.Module], loss: Callable[[Any], Tensor], kind: Any = nn.MSELoss, **options: bool
) -> None:
    assert name not in ODD
    ODD[name] = Odd(build, loss, kind(), **options)


def classifier(
    name: str, build: Callable[[], nn.Module], loss: Callable[[Any], Tensor] = lambda m: entropy(m(X)), **options: bool
) -> None:  # fmt: skip
    """Of X, if nothing else is said."""
    odd(name, build, loss, nn.CrossEntropyLoss, **options)


def net(outputs: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, outputs))


def changed(change: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
    """A network whose first layer is changed."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
        change(model[0])
        return model

    return build


def linear(*sizes: int) -> Callable[[], nn.Module]:
    return functools.partial(nn.Linear, *sizes)


def raw(function: Callable[..., Any], **parts: Any) -> Callable[[], nn.Module]:
    """Of `parts`, a shape is a parameter; what can be called makes a module."""
    return lambda: Raw(function, **{name: part() if callable(part) else part for name, part in parts.items()})
