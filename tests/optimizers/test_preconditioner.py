"""What is solved with, and what stands in where there is no curvature."""

from __future__ import annotations

import pytest
import torch

from optimizers import EKFAC, KFAC
from support.training import task, train

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("optimizer", [KFAC, EKFAC])
def test_without_curvature_a_gradient_is_divided_by_the_mean_eigenvalue_of_all(optimizer: type[KFAC]):
    model, loss, x, y = task("mlp", n=16)
    opt = optimizer(model)
    train(model, opt, loss, x, y, 2)
    blocks = opt.preconditioner.blocks
    mean = sum(float(b.mean_eigenvalue) * b.dimension for b in blocks) / sum(b.dimension for b in blocks)
    trained = {**opt.trained(), "extra": torch.nn.Parameter(torch.zeros(3))}
    gradients = {name: torch.arange(float(p.numel())).view_as(p) for name, p in trained.items()}
    found = opt.preconditioner.solve(gradients, trained)
    torch.testing.assert_close(found["extra"], gradients["extra"] / mean)
