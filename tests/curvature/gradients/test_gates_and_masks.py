"""What lets samples meet after the first call: gates and masks in buffers, adjacency matrices; and hooks on weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvature
from support.cases.case import Raw
from support.oracles import brute_force

pytestmark = [pytest.mark.fast, pytest.mark.usefixtures("double")]
N = 5
ENTROPY = nn.CrossEntropyLoss()
MASKS = torch.eye(N, dtype=torch.float64), torch.eye(N, dtype=torch.float64) + 0.5 * torch.eye(N).roll(1, 0)
CALLS: dict[str, Callable[..., Any]] = {
    "per_sample_gradients": curvature.per_sample_gradients,
    "per_sample_norms": curvature.per_sample_norms,
    "kfac": lambda m, f, x, y: curvature.kfac(m, f, (x, y)),
    "empirical_fisher": lambda m, f, x, y: curvature.empirical_fisher(m, f, (x, y)).to_dense(),
}


def layers(**more: Any) -> dict[str, Any]:
    return {"a": nn.Linear(4, 5), "b": nn.Linear(5, 3), **more}


def gated(m: Any, x: Tensor) -> Tensor:
    return m.b(m.a(x) + m.gate * m.a(x).mean(0))


BUFFERS: dict[str, tuple[Any, Tensor, Tensor]] = {
    "a gate": (gated, torch.zeros(()), torch.full((), 0.5)),
    "a mask": (lambda m, x: m.b(m.gate[: len(x), : len(x)] @ m.a(x)), *MASKS),
    "a switch": (lambda m, x: m.b(torch.where(m.gate, m.a(x) - m.a(x).mean(0), m.a(x))),
                 torch.tensor(False), torch.tensor(True)),
}  # fmt: skip


@pytest.mark.parametrize("function", CALLS)
@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_that_alone_mixes_samples(name: str, function: str) -> None:
    forward, shut, opened = BUFFERS[name]
    model = Raw(forward, **layers(gate=shut.clone()))
    for state in (shut, opened, shut, opened):
        model.gate.copy_(state)
        x, y = torch.randn(N, 4), torch.randint(3, (N,))
        if state is shut:
            CALLS[function](model, ENTROPY, x, y)
        else:
            with pytest.raises(ValueError, match="the output of a sample changes"):
                CALLS[function](model, ENTROPY, x, y)
            found = curvature.gauss_newton(model, ENTROPY, (x, y))
            torch.testing.assert_close(found.to_dense() @ torch.ones(43), found @ torch.ones(43))


@pytest.mark.parametrize("function", CALLS)
def test_an_adjacency_matrix_that_is_an_input(function: str) -> None:
    model = Raw(lambda m, x, A: m.b((A @ m.a(x)).tanh()), **layers())
    for A in (MASKS[0], MASKS[1], MASKS[0], MASKS[1].T):
        x, y = torch.randn(N, 4), torch.randint(3, (N,))
        if A is MASKS[0]:
            CALLS[function](model, ENTROPY, (x, A), y)
        else:
            with pytest.raises(ValueError, match="the output of a sample changes"):
                CALLS[function](model, ENTROPY, (x, A), y)


def test_buffers_are_counted_once_where_they_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[Tensor] = []
    count = torch.count_nonzero
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).eval()
    x, y = torch.randn(N, 4), torch.randint(3, (N,))
    monkeypatch.setattr(torch, "count_nonzero", lambda t: (counted.append(t), count(t))[1])
    for _ in range(3):
        curvature.per_sample_norms(model, ENTROPY, x, y)
    assert len(counted) == 3  # buffers


def test_hooks_on_parameters_that_come_and_go() -> None:
    """As one that masks the gradient of a pruned weight."""
    model, x, y = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(N, 4), torch.randint(3, (N,))
    mask = (torch.rand(5, 4) > 0.5).double()

    def compare() -> None:
        expected = brute_force.per_sample_gradients(model, ENTROPY, x, y)
        for name, row in curvature.per_sample_gradients(model, ENTROPY, x, y).items():
            torch.testing.assert_close(row, expected[name])
        norms = torch.cat([g.flatten(1) for g in expected.values()], 1).norm(dim=1)
        torch.testing.assert_close(curvature.per_sample_norms(model, ENTROPY, x, y), norms)
        reference = brute_force.Matrices(model, ENTROPY, (x, y)).gauss_newton
        found = curvature.gauss_newton(model, ENTROPY, (x, y))
        torch.testing.assert_close(found.to_dense(), reference)
        torch.testing.assert_close(found @ torch.ones(43), reference @ torch.ones(43))

    compare()
    for _ in range(2):
        hook = model[0].weight.register_hook(lambda g: g * mask)
        compare()
        hook.remove()
        compare()
