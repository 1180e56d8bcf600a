"""Values put together in all kinds of ways, against one backward pass for each value."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import curvature
from curvature.gradients.plans import PLANS
from curvature.recording import warn_once
from support.cases.case import Raw, seeded
from support.oracles import derivatives as oracle_derivatives

pytestmark = pytest.mark.fast

X, Y = torch.linspace(-1, 1, 14).reshape(7, 2).double(), torch.linspace(0, 2, 8).reshape(4, 2).double()


def case() -> nn.Sequential:
    with seeded(0):
        return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def one(model: nn.Module) -> Tensor:
    """(7,), of the model's gradient."""
    x = X.clone().requires_grad_()
    return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].square().sum(1)


def two(model: nn.Module) -> Tensor:
    """(4,)."""
    return model(Y)[:, 0]


def twice(x: Tensor) -> Tensor:
    return torch.cat([x, x])


# values, and the sizes of the pieces that have terms of their own
VALUES: dict[str, tuple[Callable[[nn.Sequential], Tensor], list[int]]] = {
    "nested": (lambda m: torch.cat([torch.cat([one(m), two(m)]), two(m).exp()]), [7, 4, 4]),
    "a piece twice": (lambda m: twice(one(m)), [7, 7]),
    "pieces twice": (lambda m: twice(torch.cat([one(m), two(m)])), [7, 4, 7, 4]),
    "scaled afterwards": (lambda m: torch.cat([torch.cat([one(m), two(m)]) / 3, two(m)]), [11, 4]),
    "a constant piece": (lambda m: torch.cat([torch.ones(2).double(), one(m)]), [9]),
    "a piece without parameters": (lambda m: torch.cat([X[:2, 0].clone().requires_grad_() * 2, one(m)]), [2, 7]),
    "a parameter": (lambda m: torch.cat([one(m), m[0].bias, m[2].bias]), [7, 5, 5]),
    "a parameter alone": (lambda m: m[2].bias, [5]),
    "a parameter and a constant of its size": (
        lambda m: torch.cat([torch.zeros(5).double().requires_grad_(), m[0].bias]), [5, 5]
    ),
    "penalties": (lambda m: torch.cat([one(m), *(0.1 * p.flatten() for p in m.parameters())]), [7, 10, 5, 25, 5, 5, 1]),
    "along another axis": (lambda m: torch.cat([m(X), m(X) ** 2], 1).flatten(), [14]),
    "matrices": (lambda m: torch.cat([m(X), m(Y)])[:, 0], [11]),
    "stacked": (lambda m: torch.stack([one(m), one(m).exp()], 1)[:, 0], [7]),
    "exchanged": (lambda m: torch.cat([one(m), two(m)])[torch.arange(11).flip(0)], [11]),
    "expanded": (lambda m: two(m).sum().expand(3), [3]),
    "mixed precision": (lambda m: torch.cat([one(m).float(), two(m)]), [7, 4]),
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_values(name: str):
    """Twice: what the first call learnt serves the second."""
    model, (make, sizes) = case(), VALUES[name]
    for _ in range(2):
        values = make(model)
        jacobian = curvature.Jacobian.of(values, model)
        expected = oracle_derivatives.rows(values, model)
        assert [size for size, _ in jacobian.parts] == sizes
        torch.testing.assert_close(jacobian.to_dense(), expected)
        torch.testing.assert_close(jacobian.gram(), expected @ expected.T)


def test_pieces_of_pieces_have_rules(caplog: pytest.LogCaptureFixture):
    warn_once.cache_clear()
    caplog.set_level(logging.WARNING, "curvature")
    model = case()
    curvature.Jacobian.of(VALUES["nested"][0](model), model)
    assert not caplog.records


def test_a_table_read_at_random_is_learnt_once():
    table = nn.Parameter(torch.randn(20, 3).double())
    model = Raw(lambda m, index: m.table[index].sin().sum(1), table=table)
    for seed in range(3):
        with seeded(seed):
            values = model(torch.randint(20, (7,)))
        expected = oracle_derivatives.rows(values, model)
        torch.testing.assert_close(curvature.Jacobian.of(values, model).to_dense(), expected)
    assert len(PLANS[model]) == 1


def test_values_without_gradients():
    model = case()
    with torch.no_grad(), pytest.raises(ValueError, match="values: they were computed without gradients"):
        curvature.Jacobian.of(two(model), model)
