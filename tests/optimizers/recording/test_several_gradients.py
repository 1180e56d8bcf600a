"""Gradients that are zeroed by others than the optimizer, added by hand, or differentiated once more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from curvature import empirical
from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import Raw
from support.habits import X, Y, flat, net

OPTIMIZERS = pytest.mark.parametrize("optimizer", [KFAC, EKFAC, NaturalGradient], ids=lambda o: o.__name__)
LOSS = nn.CrossEntropyLoss()
flat_squares = lambda gradients: torch.cat([g.flatten() for g in gradients]).square().sum()


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
