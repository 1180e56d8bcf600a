"""A bias that counts with another factor than its weight is no further input of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvature
from optimizers import EKFAC, KFAC
from support.cases.case import Raw, seeded
from support.oracles.influence import own_gradients, scores

LOSS = nn.CrossEntropyLoss()
FACTORS = [(1.0, 1.0), (0.5, 1.0), (1.0, 2.0), (2.0, 2.0), (0.0, 1.0)]


def problem(beta: float, alpha: float) -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        forward = lambda m, x: torch.addmm(m.bias, x, m.weight, beta=beta, alpha=alpha)
        return Raw(forward, weight=(4, 3), bias=(3,)).double(), torch.randn(6, 4).double(), torch.arange(6) % 3


@pytest.mark.parametrize("build", [curvature.kfac, curvature.ekfac])
@pytest.mark.parametrize(("beta", "alpha"), FACTORS)
def test_factors_of_one_sample_are_its_gauss_newton_matrix(beta: float, alpha: float, build: Any) -> None:
    """Both factors have no more than one term then; weight and bias are one block if their factors are alike."""
    model, x, y = problem(beta, alpha)
    blocks = build(model, LOSS, (x[:1], y[:1])).blocks
    assert len(blocks) == (1 if beta == alpha else 2)
    for block in blocks.values():
        exact = curvature.gauss_newton(model, LOSS, (x[:1], y[:1]), parameters=block.space.names)
        jacobian = curvature.per_sample_jacobians(model, x[:1], parameters=block.space.names)
        rows = torch.cat([jacobian[name].reshape(3, -1) for name in block.space.names], 1)
        p = model(x[:1])[0].detach().softmax(0)
        expected = rows.T @ (p.diag() - p.outer(p)) @ rows
        torch.testing.assert_close(exact.to_dense(), expected)
        torch.testing.assert_close(block.to_dense(), expected)


@pytest.mark.parametrize("build", [curvature.kfac, curvature.ekfac])
@pytest.mark.parametrize(("beta", "alpha"), FACTORS)
def test_scores_and_posteriors_are_those_of_the_matrix(beta: float, alpha: float, build: Any) -> None:
    model, x, y = problem(beta, alpha)
    K, rows = build(model, LOSS, (x, y)), own_gradients(model, LOSS, x, y)
    found = curvature.influence(model, LOSS, (x, y), (x[:2], y[:2]), K, damping=0.1)
    torch.testing.assert_close(found, scores(K.to_dense(), rows[:2], rows, 0.1))
    posterior = curvature.laplace(model, LOSS, (x, y), prior=2.0)
    jacobian = curvature.per_sample_jacobians(model, x)
    J = torch.cat([part.reshape(6, 3, -1) for part in jacobian.values()], 2)
    expected = J @ torch.linalg.inv(posterior.precision.to_dense()) @ J.mT
    torch.testing.assert_close(posterior.outputs(x)[1], expected)


@pytest.mark.parametrize("make", [KFAC, EKFAC])
def test_optimizers_keep_them_apart(make: Any) -> None:
    for factors, blocks in (((1.0, 1.0), 1), ((0.5, 2.0), 2)):
        model, x, y = problem(*factors)
        opt = make(model)
        LOSS(model(x), y).backward()
        opt.step()
        assert len(opt.store.blocks) == blocks
