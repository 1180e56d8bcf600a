"""Losses that draw the same random numbers at every call: a sample alone has those of the first sample of a batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature

pytestmark = [pytest.mark.fast, pytest.mark.usefixtures("double")]


def drawn(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0))


SEEDED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "noise on outputs": lambda o, y: F.cross_entropy(o + drawn(*o.shape), y),
    "negatives": lambda o, y: (o[:, 0] - o.gather(1, (3 * drawn(len(o), 1)).long())[:, 0]).sigmoid().mean(),
    "smoothed labels": lambda o, y: (F.one_hot(y, 3) - drawn(*o.shape) - o).square().mean(),
}


@pytest.mark.parametrize("name", SEEDED)
def test_draws_that_go_by_the_place_of_a_sample_are_refused(name: str) -> None:
    model, x, y = nn.Linear(4, 3), torch.randn(5, 4), torch.randint(3, (5,))
    for call in (curvature.per_sample_gradients, curvature.per_sample_norms, curvature.kfac):
        with pytest.raises(ValueError, match="no weighted sum of the losses of its samples"):
            call(model, SEEDED[name], x, y)


@pytest.mark.parametrize("seed", range(6))
def test_rows_have_the_draws_of_a_batch_of_one(seed: int) -> None:
    """Weights that are drawn change what a sample counts for in a batch, and alone it has the first of them."""
    torch.manual_seed(seed)
    loss = lambda o, y: (drawn(len(o)) * F.cross_entropy(o, y, reduction="none")).sum()
    model, x, y = nn.Linear(4, 3), torch.randn(5, 4), torch.randint(3, (5,))
    rows = curvature.per_sample_gradients(model, loss, x, y)["weight"]
    for n in range(5):
        torch.testing.assert_close(
            rows[n], torch.autograd.grad(loss(model(x[n : n + 1]), y[n : n + 1]), model.weight)[0]
        )
