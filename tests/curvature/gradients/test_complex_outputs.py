"""Complex outputs: rows and Hessians are autograd's, and matrices made of vectors at the output say what they need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvature
from support.cases.case import Raw, seeded
from support.oracles.influence import own_gradients

N = 6
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "distances": lambda f, y: (f - y).abs().sum(1).mean(),
    "squares": lambda f, y: (f - y).abs().square().mean(),
    "projections": lambda f, y: (f * y.conj()).real.exp().mean(),
    "angles": lambda f, y: (1 - torch.cos(f.angle() - y.angle())).sum(1).mean(),
}


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        model = Raw(lambda m, x: torch.exp(1j * m.angle) * m.up(x), up=nn.Linear(4, 3), angle=(3,)).double()
        return model, torch.randn(N, 4).double(), torch.randn(N, 3, dtype=torch.cdouble)


def by_backward_passes(model: nn.Module, loss: Any, x: Tensor, y: Tensor) -> Tensor:
    """The Hessian, row by row."""
    parameters = list(model.parameters())
    gradient = torch.autograd.grad(loss(model(x), y), parameters, create_graph=True)
    entries = torch.cat([g.flatten() for g in gradient])
    rows = [torch.autograd.grad(g, parameters, retain_graph=True, materialize_grads=True) for g in entries]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


@pytest.mark.parametrize("name", LOSSES)
def test_rows_clipped_sums_and_hessians(name: str) -> None:
    (model, x, y), loss = problem(), LOSSES[name]
    rows = own_gradients(model, loss, x, y)
    found = curvature.per_sample_gradients(model, loss, x, y)
    torch.testing.assert_close(torch.cat([g.flatten(1) for g in found.values()], 1), rows)
    norms = rows.norm(dim=1)
    bound = float(norms.median())
    clipped = curvature.clipped_gradient(model, loss, x, y, bound)
    expected = ((bound / norms).clamp(max=1)[:, None] * rows).sum(0)
    torch.testing.assert_close(torch.cat([g.flatten() for g in clipped.values()]), expected)
    whole = by_backward_passes(model, loss, x, y)
    for data in ((x, y), [(x[:4], y[:4]), (x[4:], y[4:])]):
        torch.testing.assert_close(curvature.hessian(model, loss, data).to_dense(), whole)


def test_a_loss_that_is_no_sum_over_samples_is_found() -> None:
    model, x, y = problem()
    with pytest.raises(ValueError, match="samples"):
        curvature.clipped_gradient(model, lambda f, y: (f - y).abs().square().mean().sqrt(), x, y, 1.0)


@pytest.mark.parametrize("build", [curvature.fisher_diagonal, curvature.gauss_newton, curvature.kfac])
def test_what_needs_vectors_at_the_output_is_refused(build: Any) -> None:
    model, x, y = problem()
    with pytest.raises(ValueError, match=r"real floating point tensor.* got torch\.complex128"):
        build(model, LOSSES["squares"], (x, y)).to_dense()
