"""Models whose buffers move in each forward pass: every pass of ours begins from the buffers that there are."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvature
from support.cases.case import Raw, seeded
from support.oracles import brute_force as oracle
from support.rows import all_of_rows, real, rows_of

pytestmark = pytest.mark.fast
LOSS = nn.MSELoss()


def moving(after: bool, itself: bool = False) -> nn.Module:
    """Its buffer grows at each pass, which reads it before it grows or after, a copy of it or itself."""

    def run(m: Any, x: Tensor) -> Tensor:
        before = m.scale.clone()
        m.scale.mul_(1.5)
        return m.layer(x) * ((m.scale if itself else m.scale.clone()) if after else before)

    return Raw(run, layer=nn.Linear(3, 4), scale=torch.ones(()))


norm = lambda: [nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.Linear(4, 4)]  # whose columns take forward mode
MODELS: dict[str, Callable[[], nn.Module]] = {
    "read before": lambda: nn.Sequential(moving(after=False), nn.Tanh(), nn.Linear(4, 4)),
    "read after": lambda: nn.Sequential(moving(after=True), nn.Tanh(), nn.Linear(4, 4)),
    "read itself": lambda: nn.Sequential(moving(after=True, itself=True), nn.Tanh(), nn.Linear(4, 4)),
    "before a norm": lambda: nn.Sequential(moving(after=False), nn.Tanh(), *norm()),
    "after a norm": lambda: nn.Sequential(moving(after=True), nn.Tanh(), *norm()),
    "spectral norm": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 4)), nn.Tanh(), *norm()),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 3)), nn.utils.spectral_norm(nn.Conv1d(1, 4, 3)), nn.Flatten(), nn.Tanh(), nn.Linear(4, 4)
    ),
    "parametrization": lambda: nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 4)
    ),
}


def problem(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        return MODELS[name]().double().train(), torch.randn(5, 3).double(), torch.randn(5, 4).double()


def jacobians(model: nn.Module, x: Tensor) -> Tensor:
    """(N, D, P), each sample's from the present buffers."""
    start, rows = copy.deepcopy(model.state_dict()), []
    for n in range(len(x)):
        rows.append(oracle.jacobian(model, x[n : n + 1])[1])
        model.load_state_dict(start)
    return torch.stack(rows)


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("cached_entries", [1, 1 << 20])
@pytest.mark.parametrize("name", MODELS)
def test_every_product_is_of_the_same_matrix(
    name: str, cached_entries: int, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("curvature.matrices.jacobians.CACHED_ENTRIES", cached_entries)
    model, x, y = problem(name)
    J = jacobians(model, x).flatten(0, 1)
    matrix, before = 2 * J.T @ J / len(J), copy.deepcopy(model.state_dict())
    operator = curvature.gauss_newton(model, LOSS, (x, y))
    V = operator.space.normal(3)
    with curvature.kept(operator) if is_kept else nullcontext():
        for _ in range(3):
            torch.testing.assert_close(operator @ V[:, 0], matrix @ V[:, 0])
            torch.testing.assert_close(operator @ V, matrix @ V)
    torch.testing.assert_close(operator.to_dense(), matrix)
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)


@pytest.mark.parametrize("name", MODELS)
def test_rows_and_what_is_made_of_them(name: str) -> None:
    model, x, y = problem(name)
    before, rows = copy.deepcopy(model.state_dict()), []
    for n in range(len(x)):
        rows.append(rows_of(model, [LOSS(model(x[n : n + 1]), y[n : n + 1])]))
        model.load_state_dict(before)
    expected = {key: torch.cat([own[key] for own in rows]) for key in rows[0]}
    all_of_rows(model, LOSS, x, y, expected)
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    fisher, flat = curvature.empirical_fisher(model, LOSS, (x, y)), real(expected)
    torch.testing.assert_close(fisher.to_dense(), flat.T @ flat / len(x))
    torch.testing.assert_close(fisher @ flat[0], flat.T @ (flat @ flat[0]) / len(x))


@pytest.mark.parametrize("by_vmap", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_jacobians_with_and_without_a_graph(name: str, by_vmap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("no batched form")

    if not by_vmap:
        monkeypatch.setattr("curvature.matrices.jacobians.over_samples", refuse)
    model, x, _ = problem(name)
    expected, before = jacobians(model, x), copy.deepcopy(model.state_dict())
    for create_graph in (False, True):
        found = curvature.per_sample_jacobians(model, x, create_graph=create_graph)
        torch.testing.assert_close(torch.cat([rows.flatten(2) for rows in found.values()], 2), expected)
        torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    squares = torch.stack([rows.square().sum() for rows in found.values()]).sum()
    assert all(
        g.isfinite().all()
        for g in torch.autograd.grad(squares, list(model.parameters()), allow_unused=True)
        if g is not None
    )


@pytest.mark.parametrize("chunk", [1, 2, None])
def test_vmap_in_parts_begins_each_from_the_same_buffers(chunk: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = problem("read before")
    if chunk is not None:
        entries = chunk * sum(p.numel() for p in model.parameters())
        monkeypatch.setattr("curvature.matrices.builders.PRODUCT_ELEMENTS", entries)
    found = curvature.per_sample_hessian_diagonals(model, LOSS, x, y)
    whole = curvature.hessian(model, LOSS, (x, y))
    expected = whole.to_dict(whole.diagonal())
    for name, rows in found.items():
        torch.testing.assert_close(rows.mean(0), expected[name])


@pytest.mark.parametrize("cast", [lambda layer: layer.float().double(), lambda layer: layer.to(torch.float64)])
def test_products_and_jacobians_of_a_module_that_is_cast_in_the_forward_pass(cast: Any) -> None:
    with seeded(0):
        forward = lambda m, x: cast(m.b)(m.norm(m.a(x)).tanh())
        model = Raw(forward, a=nn.Linear(3, 4), norm=nn.GroupNorm(2, 4), b=nn.Linear(4, 4)).double()
        x, y = torch.randn(5, 3).double(), torch.randn(5, 4).double()
    cast(model.b)
    expected = jacobians(model, x)
    J = expected.flatten(0, 1)
    operator = curvature.gauss_newton(model, LOSS, (x, y))
    V = operator.space.normal(3)
    for _ in range(2):
        torch.testing.assert_close(operator @ V, 2 * J.T @ (J @ V) / len(J))
        torch.testing.assert_close(operator @ V[:, 0], 2 * J.T @ (J @ V[:, 0]) / len(J))
    found = curvature.per_sample_jacobians(model, x, create_graph=True)
    torch.testing.assert_close(torch.cat([rows.flatten(2) for rows in found.values()], 2), expected)
