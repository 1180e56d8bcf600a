"""Per-sample gradients without rules: each way alone, which is taken, and parameters of computed tensors."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvature
from curvature.gradients import general_path, jacobian_products
from curvature.gradients.batch import Batch
from support.builders import dense
from support.cases.case import Raw, seeded
from support.cases.shared import Doubled
from support.combinations import member
from support.comparisons import matches
from support.oracles import brute_force as oracle
from support.plans import plans_of
from support.rows import all_of_rows

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
def test_backward_passes_of_a_recorded_graph(cached_bytes: int, is_wrong: bool, monkeypatch: pytest.MonkeyPatch):
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
    assert {plan.loop for plan in plans_of(model)} == {is_wrong}


def test_a_module_that_the_model_holds_twice_keeps_its_parameters() -> None:
    """`torch.func.functional_call` does not give them back."""
    with seeded(0):
        model, x, y = problem()
        model.layer = nn.Linear(4, 4).double()
        model.again = nn.Sequential(model.layer, nn.BatchNorm1d(4), nn.Linear(4, 2)).double().eval()
        model.norm = model.again[1]
    whole = nn.Sequential(model, model.again)
    held = [*whole.parameters(), *whole.buffers()]
    found = curvature.per_sample_gradients(whole, nn.MSELoss(), x, y[:, :2])
    assert [id(t) for t in held] == [id(t) for t in (*whole.parameters(), *whole.buffers())]
    torch.testing.assert_close(found, oracle.per_sample_gradients(whole, nn.MSELoss(), x, y[:, :2]))


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


def computed(forward: Forward) -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        model = Raw(forward, E=(5, 4), P=(4, 4)).double()
        return model, torch.randn(N, 4).double(), torch.randn(N, 5).double()


@pytest.mark.parametrize("forward", MODELS)
def test_computed_weights_beside_what_has_no_rule(forward: Forward) -> None:
    """Rows at every call and what is made of them, matrices of one batch and of two."""
    model, x, y = computed(forward)
    all_of_rows(model, LOSS, x, y, oracle.per_sample_gradients(model, LOSS, x, y))
    assert all("E" in plan.general for plan in plans_of(model)), "the case is none"
    diagonal = oracle.Matrices(model, LOSS, [(x, y)]).gauss_newton.diagonal()
    for build in (curvature.fisher_diagonal, curvature.fisher_blocks, curvature.gauss_newton):
        for data in ([(x[:3], y[:3]), (x[3:], y[3:])], (x, y)):
            with member(build.__name__):
                torch.testing.assert_close(dense(build(model, LOSS, data)).diagonal(), diagonal)


def test_a_read_without_entries_leaves_the_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second call on, too: the plan is kept, and the backprop of an output without entries is none."""

    def never(*_: Any) -> Any:
        raise AssertionError("the rules explain every parameter")

    monkeypatch.setattr("curvature.gradients.per_sample.general_path_terms", never)
    run = lambda m, x: m.head(m.layer(x).tanh()) + m.layer(x[:0]).sum()
    with seeded(0):
        model = Raw(run, layer=nn.Linear(3, 4), head=nn.Linear(4, 2)).double()
        x, y = torch.randn(5, 3).double(), torch.randn(5, 2).double()
    expected = oracle.per_sample_gradients(model, nn.MSELoss(), x, y)
    for _ in range(3):
        for name, rows in curvature.per_sample_gradients(model, nn.MSELoss(), x, y).items():
            matches(rows, expected[name])
