"""Loops that differentiate their gradients once more: what a pass shows is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvature import empirical
from optimizers import KFAC


class Last(nn.Module):
    """A recurrent layer, of whose last output there are logits."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layer, self.head = kind(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_create_graph(kind: Any) -> None:
    """The loop's own backprops are those of the recurrent weight, too."""
    ends = []
    for create_graph in (False, True):
        torch.manual_seed(0)
        model, x, y = Last(kind).double(), torch.randn(6, 5, 3, dtype=torch.float64), torch.tensor([0, 1, 2] * 2)
        opt = KFAC(model, loss=nn.CrossEntropyLoss(), inject=empirical())
        for _ in range(4):
            opt.zero_grad()
            F.cross_entropy(model(x), y).backward(create_graph=create_graph)
            opt.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        opt.zero_grad()  # gradients with a graph refer to themselves
    torch.testing.assert_close(*ends)
