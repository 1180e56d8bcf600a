"""Posteriors of models whose parameters are read where no recorder sees it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import curvature
from support.cases.case import Raw, seeded

LOSS = nn.CrossEntropyLoss()


def test_parameters_that_vmap_reads() -> None:
    with seeded(0):
        model = Raw(lambda m, x: torch.func.vmap(lambda row: m.w @ row)(x), w=(3, 4)).double()
        x, y = torch.randn(6, 4).double(), torch.arange(6) % 3
    posterior = curvature.laplace(model, LOSS, (x, y), "dense", prior=2.0)
    p = model(x).detach().softmax(1)
    J = torch.einsum("cd,ni->ncdi", torch.eye(3).to(x), x).flatten(2)
    H = p.diag_embed() - p[:, :, None] * p[:, None]
    precision = (J.mT @ H @ J).sum(0) + 2 * torch.eye(12).to(x)
    torch.testing.assert_close(posterior.precision.to_dense(), precision)
    torch.testing.assert_close(posterior.outputs(x)[1], J @ torch.linalg.inv(precision) @ J.mT)
    with pytest.raises(ValueError, match="which layer is the last"):
        curvature.laplace(model, LOSS, (x, y), "last_layer")
