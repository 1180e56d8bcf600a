"""Per-sample gradients without rules: each of the two ways alone, and which one is taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvature
from curvature.gradients import general_path, jacobian_products
from curvature.gradients.batch import Batch
from curvature.gradients.plans import PLANS
from support.cases.case import Raw, seeded
from support.cases.shared import Doubled
from support.oracles import brute_force as oracle

pytestmark = pytest.mark.fast


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    """A parameter that is read by a function without a rule."""
    with seeded(0):
        model = Raw(lambda m, x: torch.cdist(x[:, None], m.p[None])[:, 0].tanh(), p=(4, 3)).double()
        return model, torch.randn(5, 3).double(), torch.randn(5, 4).double()


@pytest.mark.parametrize("way", [general_path.by_vmap, general_path.by_loop], ids=lambda way: way.__name__)
def test_each_way_alone(way: Any) -> None:
    model, x, y = problem()
    found = way(Batch.of(model, nn.MSELoss(), x, y))
    torch.testing.assert_close(found, oracle.per_sample_gradients(model, nn.MSELoss(), x, y))


@pytest.mark.parametrize("cached_bytes", [0, 3000, 1 << 25])
@pytest.mark.parametrize("is_wrong", [False, True])
def test_backward_passes_of_a_recorded_graph(
    cached_bytes: int, is_wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some at a time where the graph is small, unless that is wrong."""
    rows = jacobian_products.gradient_rows
    wrong = lambda *args: [g * (1 + (len(g) > 1)) for g in rows(*args)]
    monkeypatch.setattr(jacobian_products, "gradient_rows", wrong if is_wrong else rows)
    monkeypatch.setattr(general_path, "CACHED_BYTES", cached_bytes)
    model, x, y = problem()
    batch = Batch.of(model, nn.MSELoss(), x, y)
    found = general_path.by_recorded_pass(batch, batch.losses(batch.output()))
    torch.testing.assert_close(found, oracle.per_sample_gradients(model, nn.MSELoss(), x, y))


@pytest.mark.parametrize("is_wrong", [False, True])
def test_the_loop_is_taken_where_vmap_is_wrong(is_wrong: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last sample is compared with itself alone."""
    by_vmap = general_path.by_vmap
    wrong = lambda batch: {name: g.roll(1, 0) for name, g in by_vmap(batch).items()}
    monkeypatch.setattr(general_path, "by_vmap", wrong if is_wrong else by_vmap)
    model, x, y = problem()
    for _ in range(2):
        found = curvature.per_sample_gradients(model, nn.MSELoss(), x, y)
        torch.testing.assert_close(found, oracle.per_sample_gradients(model, nn.MSELoss(), x, y))
    assert {plan.loop for plan in PLANS[model].values()} == {is_wrong}


def test_the_log_says_what_torch_does_not_let_it_see(caplog: pytest.LogCaptureFixture) -> None:
    model = Raw(lambda m, x: Doubled.apply(x, m.hidden), hidden=(3,))
    curvature.per_sample_norms(model, nn.MSELoss(), torch.randn(5, 3), torch.randn(5, 3))
    assert "hidden (used in an autograd.Function or the like)" in caplog.text


CASTS: dict[str, Any] = {
    "to": lambda layer: layer.to(torch.float64),
    "double": lambda layer: layer.double(),
    "float, then double": lambda layer: layer.float().double(),
    "float": lambda layer: layer.float(),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("name", ["layer.weight", "p"])
def test_a_module_that_is_cast_in_the_forward_pass(cast: str, name: str) -> None:
    """It is on a gradient's path, and so is the parameter that has no rule."""
    with seeded(0):
        forward = lambda m, x: torch.cdist(x, m.p) * CASTS[cast](m.layer)(x.to(cast_to(cast))).double()
        model = Raw(forward, p=(4, 3), layer=nn.Linear(3, 4)).double()
        x, y = torch.randn(5, 3).double(), torch.randn(5, 4).double()
    CASTS[cast](model.layer)
    found = curvature.per_sample_gradients(model, nn.MSELoss(), x, y)[name]
    expected = oracle.per_sample_gradients(model, nn.MSELoss(), x, y)[name]
    torch.testing.assert_close(found, expected)


def cast_to(cast: str) -> torch.dtype:
    return torch.float32 if cast == "float" else torch.float64
