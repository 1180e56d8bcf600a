"""Logits of tokens whose classes are not on the axis that cross-entropy takes: tokens were taken for classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import curvature
from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import seeded

OPTIMIZERS = pytest.mark.parametrize("optimizer", [KFAC, EKFAC, NaturalGradient], ids=lambda o: o.__name__)
INJECTIONS = pytest.mark.parametrize("inject", [curvature.exact(), curvature.sampled()], ids=repr)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)

with seeded(0):
    X, Y = torch.randn(8, 4, 5), torch.randint(3, (8, 4))


@OPTIMIZERS
@INJECTIONS
@DTYPES
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), F.cross_entropy], ids=["module", "function"])
def test_classes_on_the_last_axis_are_refused(optimizer: Any, inject: Any, dtype: torch.dtype, loss: Any) -> None:
    model = nn.Linear(5, 3).to(dtype)
    opt = optimizer(model, loss=loss, inject=inject)
    value = F.cross_entropy(model(X.to(dtype)).flatten(0, 1).float(), Y.flatten())
    with pytest.raises(ValueError, match=r"axis 1 of the model's output, found \(8, 4, 3\).*movedim"):
        value.backward()
    assert opt.steps == 0


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with seeded(1):
            self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x).movedim(-1, 1)


@OPTIMIZERS
@INJECTIONS
@DTYPES
def test_classes_on_axis_1_and_other_losses_train(optimizer: Any, inject: Any, dtype: torch.dtype) -> None:
    for loss in (
        lambda z: F.cross_entropy(z.float(), Y),
        lambda z: F.cross_entropy(z.float(), Y) + 0.1 * z.float().square().mean(),
        lambda z: z.float().square().mean(),
    ):
        model = Tokens().to(dtype)
        opt = optimizer(model, loss=nn.CrossEntropyLoss(), inject=inject)
        loss(model(X.to(dtype))).backward()
        before = model.head.weight.detach().clone()
        opt.step()
        assert not torch.equal(before, model.head.weight)
