"""Parameters without a rule that are also part of a tensor computed from parameters: every call is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvature
from curvature.gradients.plans import PLANS
from optimizers import KFAC, NaturalGradient
from support.cases.case import Raw, seeded
from support.cases.shared import Doubled
from support.comparisons import right_rows
from support.oracles import brute_force as oracle

pytestmark = pytest.mark.fast
N, LOSS = 6, nn.MSELoss()


def by_distance(m: Any, x: Tensor) -> Tensor:
    """Distances to prototypes, and scores by projected prototypes."""
    return torch.cdist(x[:, None], m.E[None])[:, 0] + x @ (m.E @ m.P).T


def by_function(m: Any, x: Tensor) -> Tensor:
    """The user's own function, and a weight that another parameter masks."""
    return Doubled.apply(x, m.E[:1]).sum(1, keepdim=True) + x @ (m.E * m.P[0].sigmoid()).T


def by_two_weights(m: Any, x: Tensor) -> Tensor:
    """Two computed weights, one of them computed from the other."""
    first = m.E @ m.P
    return torch.cdist(x[:, None], m.E[None])[:, 0] + x @ first.T + x.tanh() @ (first * m.E.exp()).T


def by_slice(m: Any, x: Tensor) -> Tensor:
    """One that a computed weight has only some rows of."""
    weight = torch.cat([m.E[:2] @ m.P, m.P[:3]])
    return torch.cdist(x[:, None], m.E[None])[:, 0] + x @ weight.T


MODELS = [by_distance, by_function, by_two_weights, by_slice]
Forward = Callable[[Any, Tensor], Tensor]


def problem(forward: Forward) -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        model = Raw(forward, E=(5, 4), P=(4, 4)).double()
        return model, torch.randn(N, 4).double(), torch.randn(N, 5).double()


@pytest.mark.parametrize("forward", MODELS)
def test_rows_and_what_is_made_of_them_are_right_at_every_call(forward: Forward) -> None:
    model, x, y = problem(forward)
    expected = right_rows(model, LOSS, x, y, calls=3)
    (plan,) = PLANS[model].values()
    assert "E" in plan.general, "the case is none"
    torch.testing.assert_close(curvature.per_sample_norms(model, LOSS, x, y), oracle.norms(expected))
    torch.testing.assert_close(curvature.per_sample_gram(model, LOSS, x, y), oracle.gram(expected))
    factors = (0.5 / oracle.norms(expected)).clamp(max=1)
    clipped = curvature.clipped_gradient(model, LOSS, x, y, 0.5)
    for name, rows in expected.items():
        torch.testing.assert_close(clipped[name], torch.einsum("n,n...->...", factors, rows))


@pytest.mark.parametrize("forward", MODELS)
@pytest.mark.parametrize("build", [curvature.fisher_diagonal, curvature.fisher_blocks, curvature.gauss_newton])
def test_matrices_of_several_batches_are_those_of_one(forward: Forward, build: Any) -> None:
    model, x, y = problem(forward)
    diagonal = torch.diagonal(oracle.Matrices(model, LOSS, [(x, y)]).gauss_newton)
    for data in [[(x[:3], y[:3]), (x[3:], y[3:])], (x, y)]:
        found = build(model, LOSS, data)
        entries = found if isinstance(found, dict) else {"": found.to_dense().diagonal()}
        torch.testing.assert_close(torch.cat([v.flatten() for v in entries.values()]), diagonal)


@pytest.mark.parametrize("forward", MODELS)
@pytest.mark.parametrize("make", [KFAC, NaturalGradient])
def test_optimizers_go_on_after_the_first_step(forward: Forward, make: Any) -> None:
    model, x, y = problem(forward)
    opt = make(model)
    losses = []
    for _ in range(6):
        opt.zero_grad()
        loss = LOSS(model(x), y)
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
