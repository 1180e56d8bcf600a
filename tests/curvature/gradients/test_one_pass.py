"""A pass that draws random numbers or moves buffers: rows are of one pass, from the buffers that there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from support.cases.case import Raw, seeded

pytestmark = pytest.mark.fast


def masked(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    """`p` is read by a function without a rule, `layer` by one that has a rule; both see the mask."""
    return m.layer(x * mask) + torch.cdist(x * mask, m.p)


RANDOM: dict[str, Any] = {
    "dropout": lambda m, x: masked(m, x, F.dropout(torch.ones_like(x), 0.5, m.training)),
    "noise": lambda m, x: masked(m, x, torch.rand_like(x)),
    "stochastic depth": lambda m, x: masked(m, x, torch.empty(len(x), 1).bernoulli_(0.5).to(x) + 0.1),
    "gumbel": lambda m, x: masked(m, x, F.gumbel_softmax(x, hard=True)),
}


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    return dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters())), strict=True))


@pytest.mark.parametrize("member", RANDOM)
def test_rows_are_of_the_pass_of_the_same_seed(member: str) -> None:
    with seeded(0):
        model = Raw(RANDOM[member], p=(4, 3), layer=nn.Linear(3, 4)).double().train()
        x, y, loss = torch.randn(5, 3).double(), torch.randn(5, 4).double(), nn.MSELoss()
    for _ in range(2):  # learnt, and known
        with seeded(3):
            rows = curvature.per_sample_gradients(model, loss, x, y)
        with seeded(3):
            output = model(x)
        for n in range(len(x)):
            expected = gradients_kept(loss(output[n], y[n]), model)
            torch.testing.assert_close({k: g[n] for k, g in rows.items()}, expected)
        with seeded(3):
            diagonal = curvature.fisher_diagonal(model, loss, (x, y), inject=curvature.empirical())
        torch.testing.assert_close(diagonal, {k: g.square().mean(0) for k, g in rows.items()})


def gradients_kept(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    found = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    return dict(zip(dict(model.named_parameters()), found, strict=True))


class Counted(nn.Module):
    """A buffer moves at each pass, and the pass reads it: before it moves or after."""

    def __init__(self, after: bool) -> None:
        super().__init__()
        self.layer, self.after = nn.Linear(3, 4), after
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        before = self.scale.clone()
        self.scale.mul_(1.5)
        return self.layer(x) * (self.scale.clone() if self.after else before)


MOVING: dict[str, Any] = {
    "spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(3, 4)),
    "parametrization": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.utils.spectral_norm(nn.Conv1d(1, 4, 3)), nn.Flatten()
    ),
    "read before": lambda: Counted(after=False),
    "read after": lambda: Counted(after=True),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("member", MOVING)
def test_rows_are_from_the_buffers_that_there_are(member: str, training: bool) -> None:
    with seeded(0):
        model = nn.Sequential(MOVING[member](), nn.Tanh(), nn.Linear(4, 2)).double().train(training)
        x, y, loss = torch.randn(5, 3).double(), torch.randn(5, 2).double(), nn.MSELoss()
    start = {k: v.clone() for k, v in model.state_dict().items()}
    alone = []
    for n in range(len(x)):
        alone.append(gradients(loss(model(x[n : n + 1]), y[n : n + 1]), model))
        model.load_state_dict(start)
    for _ in range(2):
        rows = curvature.per_sample_gradients(model, loss, x, y)
        torch.testing.assert_close(rows, {k: torch.stack([a[k] for a in alone]) for k in rows})
        torch.testing.assert_close(dict(model.state_dict()), start, rtol=0, atol=0)
    flat = torch.cat([rows[k].flatten(1) for k, _ in model.named_parameters()], 1)
    fisher = curvature.empirical_fisher(model, loss, (x, y))
    v = torch.ones(flat.shape[1]).double()
    torch.testing.assert_close(fisher.to_dense(), flat.T @ flat / len(x))
    torch.testing.assert_close(fisher @ v, fisher.to_dense() @ v)
