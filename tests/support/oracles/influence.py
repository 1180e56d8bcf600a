"""Influence scores from loops over samples, a dense matrix and its inverse."""

from typing import Any

import torch
from torch import Tensor, nn

from support.oracles.brute_force import trainable


def own_gradients(model: nn.Module, loss: Any, x: Tensor, y: Tensor) -> Tensor:
    """(N, P): each sample's as a batch of its own."""
    rows = []
    for n in range(len(x)):
        found = torch.autograd.grad(loss(model(x[n : n + 1]), y[n : n + 1]), list(trainable(model).values()))
        rows.append(torch.cat([g.flatten() for g in found]))
    return torch.stack(rows)


def scores(matrix: Tensor, queries: Tensor, rows: Tensor, damping: float) -> Tensor:
    """(Q, N)."""
    return queries @ torch.linalg.inv(matrix + damping * torch.eye(len(matrix)).to(matrix)) @ rows.T
