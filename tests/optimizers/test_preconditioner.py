"""What is solved with, and what stands in where there is no curvature."""

from __future__ import annotations

import pytest
import torch

from optimizers import EKFAC, KFAC
from optimizers.solving import VectorSolver
from optimizers.steps.layer_vector import LayerVector, layout_of
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


def test_what_solves_is_made_anew_where_an_inverse_is():
    model, loss, x, y = task("mlp", n=16)
    opt = KFAC(model, factor_every=1, decompose_every=3)
    train(model, opt, loss, x, y, 20)
    parts, inverted = opt.preconditioner, []
    for step in range(opt.steps, opt.steps + 6):
        before = parts.solver
        train(model, opt, loss, x, y, 1)
        inverted.append(step in parts.schedule.inverted.values())
        assert parts.schedule.renewed == step and (parts.solver is not before) == inverted[-1]
        assert parts.solver is not None
        names = parts.solver.layout.names
        vector = LayerVector.of(parts.solver.layout, {name: torch.randn_like(opt.trained()[name]) for name in names})
        fresh = VectorSolver(parts.solver.layout, parts.blocks)(vector)
        assert all(map(torch.equal, parts.solver(vector).vectors, fresh.vectors))
    assert set(inverted) == {True, False}


def test_the_mean_eigenvalue_is_that_of_the_last_renewal():
    """Of a parameter without curvature, also where nothing was inverted."""
    model, loss, x, y = task("mlp", n=16)
    opt = KFAC(model, factor_every=1, decompose_every=3)
    train(model, opt, loss, x, y, 20)
    gradients = {name: torch.ones_like(p) for name, p in opt.trained().items()} | {"extra": torch.ones(3)}
    parts, found = opt.preconditioner, []
    vector = LayerVector.of(layout_of([b.names for b in parts.blocks], gradients, lambda name: 0), gradients)
    for _ in range(4):
        parts.solve_vector(vector, opt.trained())
        x = 2 * x
        opt.zero_grad()
        loss(model(x), y).backward()
        parts.renew({}, opt.trained(), opt._context(None).options)
        opt.monitor.steps += 1
        found.append(parts.solve_vector(vector, opt.trained())["extra"])
        torch.testing.assert_close(found[-1], parts.solve(gradients, opt.trained())["extra"])
    assert len({float(u[0]) for u in found}) == 4
