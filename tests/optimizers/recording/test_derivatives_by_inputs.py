"""Derivatives of a watched model by its inputs, between two steps: no training passes, whoever takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import functional

from curvature import empirical, exact
from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import seeded

pytestmark = pytest.mark.fast

OPTIMIZERS = {"KFAC": KFAC, "EKFAC": EKFAC, "NaturalGradient": NaturalGradient}
cubes = lambda model: lambda x: model(x).pow(3).sum()


def saliency(model: nn.Module, x: Tensor) -> Any:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(model(x).amax(1).sum(), x)


def attack(model: nn.Module, x: Tensor) -> Any:
    x = x.clone().requires_grad_()
    model(x).square().sum().backward(inputs=[x])


FIRST: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "jacobian": lambda model, x: functional.jacobian(model, x),
    "vjp": lambda model, x: functional.vjp(model, x, torch.ones(len(x), 3).double()),
    "saliency": saliency,
    "attack": attack,
}
SECOND: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "jvp": lambda model, x: functional.jvp(model, x, x),
    "hessian": lambda model, x: functional.hessian(cubes(model), x[:1]),
    "hvp": lambda model, x: functional.hvp(cubes(model), x, x),
    "vhp": lambda model, x: functional.vhp(cubes(model), x, x),
}


def trained(kind: Any, inject: Any, look: Any) -> Tensor:
    with seeded(0):
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        x, y = torch.randn(8, 4).double(), torch.randint(3, (8,))
    opt = kind(model, loss=nn.CrossEntropyLoss(), inject=inject)
    for _ in range(3):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if look is not None:
            look(model, x[:3])
        opt.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("name", [*FIRST, *SECOND])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_own_gradient_of_the_loss_alone_counts(kind: str, name: str):
    look = (FIRST | SECOND)[name]
    found, expected = (trained(OPTIMIZERS[kind], empirical(), each) for each in (look, None))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", FIRST)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_passes_that_are_differentiated_by_inputs_do_not_count(kind: str, name: str):
    """Where vectors are sent back; but a gradient with a graph may be what the loss is made of."""
    found, expected = (trained(OPTIMIZERS[kind], exact(), each) for each in (FIRST[name], None))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
