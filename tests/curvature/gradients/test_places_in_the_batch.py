"""Samples meet by their place in the batch or their number, by gates and masks in buffers, by adjacency matrices."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from support.cases.case import Raw, seeded
from support.comparisons import matches
from support.oracles import brute_force
from support.rows import all_of_rows

pytestmark = [pytest.mark.fast, pytest.mark.usefixtures("double")]


def first_of_its_expert(m: Any, x: Tensor) -> Tensor:
    """An expert takes one sample; all others get nothing."""
    taken = x[:, 0].abs().nonzero()[:1, 0]
    return m.b(m.a(x).tanh()).index_add(0, taken, m.c(x[taken]))


N = 5

ENTROPY = nn.CrossEntropyLoss()

MASKS = torch.eye(N, dtype=torch.float64), torch.eye(N, dtype=torch.float64) + 0.5 * torch.eye(N).roll(1, 0)

CALLS: dict[str, Callable[..., Any]] = {
    "per_sample_gradients": curvature.per_sample_gradients,
    "per_sample_norms": curvature.per_sample_norms,
    "kfac": curvature.kfac,
    "ekfac": curvature.ekfac,
    "empirical_fisher": lambda *a: curvature.empirical_fisher(*a).to_dense(),
}

BY_PLACE = {
    "a table with a row for each place": lambda m, x: m.b((m.a(x) + m.table[: len(x)]).tanh()),
    "an index of places": lambda m, x: m.b(m.a(x) * m.table[torch.arange(len(x))]),
    "divided by the number of samples": lambda m, x: m.b(m.a(x)) / len(x),
    "the number of samples": lambda m, x: m.b((m.a(x) + len(x) * m.table[0]).tanh()),
    "the first of its expert": first_of_its_expert,
    "ranks": lambda m, x: m.b(m.a(x) * m.table[x[:, 0].argsort().argsort()]),
}
MATRICES = {"gauss_newton": curvature.gauss_newton, "hessian": curvature.hessian, "fisher": curvature.fisher}


def prepared(name: str, count: int) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Raw(BY_PLACE[name], a=nn.Linear(4, 5), b=nn.Linear(5, 3), c=nn.Linear(4, 3), table=(8, 5))
    return model, torch.randn(count, 4), torch.randint(3, (count,))


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("function", MATRICES)
@pytest.mark.parametrize("name", BY_PLACE)
def test_matrices_are_those_of_the_batch(name: str, function: str, count: int) -> None:
    model, x, y = prepared(name, count)
    reference = brute_force.of_the_batch(model, ENTROPY, x, y)[function == "hessian"]
    found = MATRICES[function](model, ENTROPY, (x, y))
    v = torch.linspace(0, 1, found.space.size)
    torch.testing.assert_close(found.to_dense(), reference)
    torch.testing.assert_close(found.diagonal(), reference.diagonal())
    torch.testing.assert_close(found @ v, reference @ v)


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("function", CALLS)
@pytest.mark.parametrize("name", BY_PLACE)
def test_what_is_defined_by_samples_is_refused(name: str, function: str, count: int) -> None:
    model, x, y = prepared(name, count)
    for _ in range(2):
        with pytest.raises(ValueError, match="the output of a sample changes"):
            CALLS[function](model, ENTROPY, x, y)


def test_a_model_that_takes_no_single_sample_is_not_refused() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        assert len(x) > 1
        return m.b(m.a(x).tanh())

    model = Raw(run, a=nn.Linear(4, 5), b=nn.Linear(5, 3))
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    rows = curvature.per_sample_gradients(model, ENTROPY, x, y)
    torch.testing.assert_close(
        rows["b.weight"].mean(0), torch.autograd.grad(F.cross_entropy(model(x), y), model.b.weight)[0]
    )


def test_draws_of_each_sample_are_not_taken_for_places() -> None:
    model = Raw(lambda m, x: m.b(m.a(x) + 0.1 * torch.randn(len(x), 5)), a=nn.Linear(4, 5), b=nn.Linear(5, 3))
    curvature.per_sample_gradients(model, ENTROPY, torch.randn(5, 4), torch.randint(3, (5,)))


@pytest.mark.parametrize("seed", range(5))
def test_rounding_where_a_layer_cancels_says_nothing(seed: int) -> None:
    """One sample alone is rounded in another way, and its output is as small as the rounding of what it consists of."""
    with seeded(seed):
        model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1, bias=False))
        x, y = torch.cat([torch.randn(19, 1), 1e-5 * torch.randn(1, 1)]), torch.randn(20, 1)
        with torch.no_grad():
            model[0].bias.mul_(0.01)
            model[0].weight[32:], model[0].bias[32:] = 1.01 * model[0].weight[:32], model[0].bias[:32]
            model[2].weight[:, :32] = 100 * torch.randn(32)
            model[2].weight[:, 32:] = -model[2].weight[:, :32]
    found = curvature.per_sample_gradients(model, nn.MSELoss(), x, y)
    model.zero_grad()
    nn.MSELoss()(model(x), y).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name].mean(0), p.grad, rtol=1e-3, atol=1e-3)


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
@pytest.mark.parametrize("name", [*BUFFERS, "an adjacency matrix that is an input"])
def test_what_alone_mixes_samples(name: str, function: str) -> None:
    inside = name in BUFFERS
    forward, shut, opened = BUFFERS[name] if inside else (lambda m, x, A: m.b((A @ m.a(x)).tanh()), *MASKS)
    model = Raw(forward, **layers(**({"gate": shut.clone()} if inside else {})))
    for state in (shut, opened, shut, opened if inside else opened.T):
        x, y = torch.randn(N, 4), torch.randint(3, (N,))
        given = x if inside else (x, state)
        if inside:
            model.gate.copy_(state)
        if state is shut:
            CALLS[function](model, ENTROPY, given, y)
            continue
        with pytest.raises(ValueError, match="the output of a sample changes"):
            CALLS[function](model, ENTROPY, given, y)
        if inside:
            found = curvature.gauss_newton(model, ENTROPY, (x, y))
            torch.testing.assert_close(found.to_dense() @ torch.ones(43), found @ torch.ones(43))


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
        all_of_rows(model, ENTROPY, x, y, brute_force.per_sample_gradients(model, ENTROPY, x, y))
        reference = brute_force.Matrices(model, ENTROPY, (x, y)).gauss_newton
        found = curvature.gauss_newton(model, ENTROPY, (x, y))
        matches(found.to_dense(), reference)
        matches(found @ torch.ones(43), reference @ torch.ones(43))

    compare()
    for _ in range(2):
        hook = model[0].weight.register_hook(lambda g: g * mask)
        compare()
        hook.remove()
        compare()
