"""Gradients that are zeroed by others than the optimizer, added by hand, or differentiated once more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from curvature import empirical
from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import Raw
from support.habits import X, Y, assert_close, flat, net
from support.training import train

OPTIMIZERS = pytest.mark.parametrize("optimizer", [KFAC, EKFAC, NaturalGradient], ids=lambda o: o.__name__)
INJECTIONS = pytest.mark.parametrize("inject", [curvature.exact(), curvature.empirical()], ids=repr)
LOSS = nn.CrossEntropyLoss()
flat_squares = lambda gradients: torch.cat([g.flatten() for g in gradients]).square().sum()


def by_the_model(model: nn.Module) -> None:
    model.zero_grad()


def by_hand(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None


def trained(optimizer: Any, inject: Any, before: Callable[[nn.Module], None]) -> nn.Module:
    """Something may happen before the backward pass of each step."""
    model = net().double()
    opt = optimizer(model, loss=LOSS, inject=inject)
    for _ in range(5):
        before(model)
        LOSS(model(X.double()), Y).backward()
        opt.step()
        model.zero_grad()
    return model


@OPTIMIZERS
@INJECTIONS
@pytest.mark.parametrize("zero", [by_the_model, by_hand], ids=lambda f: f.__name__)
def test_an_attack_before_the_step_does_not_count(optimizer: Any, inject: Any, zero: Callable[[Any], None]) -> None:
    """Its backward pass leaves gradients of parameters, too, which are zeroed."""

    def attack(model: nn.Module) -> None:
        (3 * LOSS(model(X[:5].double().requires_grad_()), Y[:5])).backward()
        zero(model)

    assert_close(trained(optimizer, inject, attack), trained(optimizer, inject, lambda model: None), 1e-12)


@OPTIMIZERS
@INJECTIONS
def test_gradients_that_stay_count_together(optimizer: Any, inject: Any) -> None:
    """Summed by the backward passes, or by hand from torch.autograd.grad, which leaves no gradient in between."""
    ends = []
    for is_by_hand in (False, True):
        model = net().double()
        opt = optimizer(model, loss=nn.CrossEntropyLoss(reduction="sum"), inject=inject)
        for _ in range(5):
            opt.zero_grad()
            sums: list[Tensor] = []
            for part in (slice(0, 6), slice(6, 16)):
                loss = F.cross_entropy(model(X[part].double()), Y[part], reduction="sum")
                if is_by_hand:
                    found = torch.autograd.grad(loss, list(model.parameters()))
                    sums = [a + b for a, b in zip(sums, found, strict=True)] if sums else list(found)
                else:
                    loss.backward()
            for p, g in zip(model.parameters(), sums, strict=False):
                p.grad = g
            opt.step()
        ends.append(model)
    whole = net().double()
    adds = nn.CrossEntropyLoss(reduction="sum")
    train(whole, optimizer(whole, loss=adds, inject=inject), adds, X.double(), Y, 5)
    for model in ends:
        assert_close(model, whole)


@pytest.mark.filterwarnings("ignore:Using backward")
@OPTIMIZERS
def test_gradients_that_the_loss_is_made_of_do_not_count(optimizer: Any) -> None:
    """Of the pass that a penalty on gradients differentiates first, and `backward` then."""
    found = []
    for weight in (None, 0.0):
        model = net().double()
        opt = optimizer(model, inject=empirical())
        loss = LOSS(model(X.double()), Y)
        if weight is not None:
            gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            loss = loss + weight * flat_squares(gradients)
        loss.backward()
        opt.step()
        found.append([block.mean_eigenvalue for block in opt.store.blocks])
    torch.testing.assert_close(*found)


def last(kind: Any) -> nn.Module:
    """A recurrent layer, of whose last output there are logits."""
    layer, head = kind(3, 4, batch_first=True), nn.Linear(4, 3)
    return Raw(lambda m, x: m.head(m.layer(x)[0][:, -1]), layer=layer, head=head).double()


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_create_graph(kind: Any) -> None:
    """The loop's own backprops are those of the recurrent weight, too."""
    ends = []
    for create_graph in (False, True):
        torch.manual_seed(0)
        model, x, y = last(kind), torch.randn(6, 5, 3, dtype=torch.float64), torch.tensor([0, 1, 2] * 2)
        opt = KFAC(model, loss=nn.CrossEntropyLoss(), inject=empirical())
        for _ in range(4):
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward(create_graph=create_graph)
            opt.step()
        ends.append(flat(model))
        opt.zero_grad()  # gradients with a graph refer to themselves
    torch.testing.assert_close(*ends)
