"""Samples of weight zero, ignored or masked: their own loss is 0/0, and they add nothing to any matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from support.cases.case import Raw
from support.combinations import in_pairs
from support.oracles import brute_force as oracle

pytestmark = pytest.mark.usefixtures("double")
N, CLASSES = 6, 3
NOTHING = [1, 5]  # numbers of the samples that count nothing
COUNTED = [n for n in range(N) if n not in NOTHING]
WEIGHT = torch.tensor([1.0, 0.0, 2.5], dtype=torch.float64)
LABELS = torch.tensor([0, 1, 2, 2, 0, 1])
entropies = lambda o, y: F.cross_entropy(o, y, reduction="none")


def weights(tokens: int | None = None) -> Tensor:
    drawn = torch.rand((N,) if tokens is None else (N, tokens)) + 0.5
    drawn[NOTHING] = 0
    return drawn if tokens is None else drawn * (torch.arange(N * tokens).view(N, tokens) % 3 > 0)


def of_tokens(o: Tensor, y: Any) -> Tensor:
    return (entropies(o.transpose(1, 2), y[0]) * y[1]).sum() / y[1].sum()


Y, T = torch.randint(CLASSES, (N, 4), generator=torch.Generator().manual_seed(0)), 4
# name: (loss, target, whether the input has tokens)
LOSSES: dict[str, tuple[Any, Callable[[], Any], bool]] = {
    "weights in the target": (
        lambda o, y: (entropies(o, y[0]) * y[1]).sum() / y[1].sum(), lambda: (Y[:, 0], weights()), False,
    ),
    "squares": (
        lambda o, y: ((o - y["y"]).square().sum(1) * y["w"]).sum() / y["w"].sum(),
        lambda: {"y": torch.randn(N, CLASSES), "w": weights()}, False,
    ),
    "weighted by class": (lambda o, y: F.cross_entropy(o, y, weight=WEIGHT), lambda: LABELS, False),
    "weighted by class, of torch": (nn.CrossEntropyLoss(weight=WEIGHT), lambda: LABELS, False),
    "tokens": (of_tokens, lambda: (Y, weights(T)), True),
    "one loss after the other": (
        lambda o, y: sum(w * F.mse_loss(a, b) for a, b, w in zip(o, *y, strict=True)) / float(y[1].sum()),
        lambda: (torch.randn(N, CLASSES), weights()), False,
    ),
}  # fmt: skip
MATRICES = {
    "gauss_newton @": lambda *a: curvature.gauss_newton(*a) @ torch.eye(count(a[0])),
    "gauss_newton": lambda *a: curvature.gauss_newton(*a).to_dense(),
    "gauss_newton, solved": lambda *a: curvature.gauss_newton(*a).solve(torch.eye(count(a[0])), damping=10.0),
    "hessian": lambda *a: curvature.hessian(*a) @ torch.eye(count(a[0])),
    "fisher": lambda *a: curvature.fisher(*a) @ torch.ones(count(a[0])),
    "fisher_diagonal": curvature.fisher_diagonal,
    "fisher_blocks": lambda *a: curvature.fisher_blocks(*a).to_dense(),
}


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def prepared(name: str) -> tuple[nn.Module, Any, Tensor, Any]:
    torch.manual_seed(0)
    loss, target, has_tokens = LOSSES[name]
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES))
    return model, loss, torch.randn(N, T, 4) if has_tokens else torch.randn(N, 4), target()


def take(tree: Any, some: Any) -> Any:
    return oracle.map_tensors(lambda t: t[some], tree)


@in_pairs(name=LOSSES, matrix=MATRICES, ends=[(6,), (3, 6), (1, 2, 5, 6), (5, 6)])
def test_a_matrix_is_that_of_the_samples_that_count(name: str, matrix: str, ends: tuple[int, ...]) -> None:
    model, loss, x, y = prepared(name)
    starts = (0, *ends[:-1])
    data = [(x[a:b], take(y, slice(a, b))) for a, b in zip(starts, ends, strict=True)]
    found = MATRICES[matrix](model, loss, data)
    torch.testing.assert_close(found, MATRICES[matrix](model, loss, (x[COUNTED], take(y, COUNTED))))


@pytest.mark.parametrize("ends", [(6,), (3, 6), (1, 2, 5, 6)], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_kronecker_factors_have_the_activations_of_all_samples(name: str, ends: tuple[int, ...]) -> None:
    """And backprops of those that count: the traces of A and B are multiplied."""
    model, loss, x, y = prepared(name)
    data = [(x[a:b], take(y, slice(a, b))) for a, b in zip((0, *ends[:-1]), ends, strict=True)]
    found = curvature.kfac(model, loss, data)
    counted = curvature.kfac(model, loss, (x[COUNTED], take(y, COUNTED)))
    with torch.no_grad():
        for layer, a in (("0", x), ("2", model[:2](x))):
            trace = lambda some: some.square().sum(-1).mean() + 1
            torch.testing.assert_close(found[layer].trace() / trace(a), counted[layer].trace() / trace(a[COUNTED]))


@pytest.mark.fast
@pytest.mark.parametrize("name", LOSSES)
def test_the_gauss_newton_matrix_and_the_hessian_are_those_of_the_batch(name: str) -> None:
    model, loss, x, y = prepared(name)
    G, H = oracle.of_the_batch(model, loss, x, y)
    torch.testing.assert_close(curvature.gauss_newton(model, loss, (x, y)).to_dense(), G)
    torch.testing.assert_close(curvature.hessian(model, loss, (x, y)).to_dense(), H)


@pytest.mark.fast
@pytest.mark.parametrize("name", LOSSES)
def test_rows_are_zero(name: str) -> None:
    model, loss, x, y = prepared(name)
    expected = oracle.per_sample_gradients(model, loss, x, y)
    for own in expected.values():
        own[NOTHING] = 0
    for _ in range(2):
        torch.testing.assert_close(curvature.per_sample_gradients(model, loss, x, y), expected)
    torch.testing.assert_close(curvature.per_sample_norms(model, loss, x, y), oracle.norms(expected))
    torch.testing.assert_close(curvature.per_sample_gram(model, loss, x, y), oracle.gram(expected))
    flat = torch.cat([own.flatten(1) for own in expected.values()], 1)
    found = curvature.empirical_fisher(model, loss, (x, y))
    torch.testing.assert_close(found @ torch.eye(count(model)), flat.T @ flat / N)
    torch.testing.assert_close(found.to_dense(), flat.T @ flat / N)
    alone = [(x[n : n + 1], take(y, slice(n, n + 1))) for n in range(N)]
    torch.testing.assert_close(curvature.empirical_fisher(model, loss, alone).to_dense(), flat.T @ flat / N)


@pytest.mark.parametrize("function", ["per_sample_fisher_diagonals", "per_sample_hessian_diagonals"])
@pytest.mark.parametrize("name", LOSSES)
def test_diagonals_of_samples_are_zero(name: str, function: str) -> None:
    model, loss, x, y = prepared(name)
    found = getattr(curvature, function)(model, loss, x, y)
    of_counted = getattr(curvature, function)(model, loss, x[COUNTED], take(y, COUNTED))
    for key, own in found.items():
        assert not own[NOTHING].any()
        torch.testing.assert_close(own[COUNTED], of_counted[key])


def test_a_loss_in_which_nothing_counts_is_refused() -> None:
    model, loss, x, y = prepared("weights in the target")
    y = y[0], torch.zeros(N)
    for builder in (curvature.gauss_newton, curvature.hessian, curvature.fisher):
        with pytest.raises(ValueError, match="no term of it counts"):
            _ = builder(model, loss, (x, y)) @ torch.ones(count(model))
    for name in ("fisher_diagonal", "kfac", "per_sample_fisher_diagonals", "per_sample_hessian_diagonals"):
        with pytest.raises(ValueError, match="no term of it counts"):
            getattr(curvature, name)(model, loss, x, y)


@in_pairs(
    builder=[curvature.gauss_newton, curvature.fisher, curvature.empirical_fisher],
    sizes=[(1,), (4, 2), (1, 5), (1, 1, 4)],
    loss=[lambda o, y: F.mse_loss(o, y), lambda o, y: (o - y).square().sum()],
)
def test_a_target_that_is_not_finite_is_no_weight_of_zero(builder: Any, sizes: tuple[int, ...], loss: Any) -> None:
    model, _, x, _ = prepared("squares")
    y = torch.randn(N, CLASSES)
    y[0, 1] = torch.nan
    data = list(zip(x[: sum(sizes)].split(list(sizes)), y[: sum(sizes)].split(list(sizes)), strict=True))
    with pytest.raises(ValueError, match="not finite|nan or infinite|no term of it counts"):
        builder(model, loss, data).to_dense()


def test_a_smoothed_term_of_weight_zero_is_of_no_sample_also_after_a_batch_without_one() -> None:
    """Its mass is zero, but not its part in the loss."""
    model, _, x, _ = prepared("squares")
    loss = nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.3)
    curvature.fisher_diagonal(model, loss, (x, LABELS * 2 % 4))
    with pytest.raises(ValueError, match="no weighted sum"):
        curvature.fisher_diagonal(model, loss, (x, LABELS))
    G, _ = oracle.of_the_batch(model, loss, x, LABELS)
    torch.testing.assert_close(curvature.gauss_newton(model, loss, (x, LABELS)).to_dense(), G)
    with pytest.raises(ValueError, match="all data as one batch"):
        curvature.gauss_newton(model, loss, [(x[:3], LABELS[:3]), (x[4:], LABELS[4:])]).to_dense()


OUTPUTS = {
    "tuple": (lambda m, x: (m.a(x), m.b(x)), lambda o: o[0] + o[1]),
    "dict": (lambda m, x: {"a": m.a(x), "b": m.b(x)}, lambda o: o["a"] + o["b"]),
    "without a rule": (lambda m, x: m.a(x).abs() ** m.s + m.b(x), lambda o: o),
}


@pytest.mark.parametrize("place", [0, 2, 5])
@pytest.mark.parametrize("name", OUTPUTS)
def test_rows_of_the_general_path_are_zero(name: str, place: int) -> None:
    run, joined = OUTPUTS[name]
    torch.manual_seed(0)
    model, x, own = Raw(run, a=nn.Linear(4, 3), b=nn.Linear(4, 3), s=(3,)), torch.randn(N, 4), torch.rand(N)
    own[place] = 0
    loss = lambda o, y: (entropies(joined(o), y[0]) * y[1]).sum() / y[1].sum()
    expected = oracle.per_sample_gradients(model, loss, x, (LABELS, own))
    for rows in expected.values():
        assert name != "without a rule" or rows[place].isnan().any()
        rows[place] = 0
    for _ in range(2):
        torch.testing.assert_close(curvature.per_sample_gradients(model, loss, x, (LABELS, own)), expected)
    curvature.check_gradients(model, loss, x, (LABELS, own))


def test_a_temperature_in_the_loss() -> None:
    """Which the loss reads by itself."""
    model, _, x, _ = prepared("squares")
    model.register_parameter("log_scale", nn.Parameter(torch.tensor(0.3)))
    loss = lambda o, y: of_samples(o * model.log_scale.exp(), y)
    of_samples, y = LOSSES["weights in the target"][0], (LABELS, weights())
    expected = oracle.per_sample_gradients(model, loss, x, y)
    for rows in expected.values():
        rows[NOTHING] = 0
    torch.testing.assert_close(curvature.per_sample_gradients(model, loss, x, y), expected)


def test_a_gradient_that_is_not_finite_for_another_reason_stays_so() -> None:
    model, _, x, _ = prepared("squares")
    y = torch.randn(N, CLASSES)
    y[2, 1] = torch.nan
    rows = curvature.per_sample_gradients(model, lambda o, t: F.mse_loss(o, t), x, y)["0.weight"]
    assert rows[2].isnan().all() and rows[[0, 1, 3, 4, 5]].isfinite().all()
    with pytest.raises(RuntimeError, match="gradient of sample 2"):
        curvature.check_gradients(model, lambda o, t: F.mse_loss(o, t), x, y)


def test_nested_tensors_are_refused_by_name() -> None:
    x = torch.nested.nested_tensor([torch.randn(n, 4) for n in (2, 3)], layout=torch.jagged)
    model = Raw(lambda m, x: torch.stack([m.a(part).mean(0) for part in x.unbind()]), a=nn.Linear(4, 3))
    for name in ("per_sample_gradients", "fisher_diagonal"):
        with pytest.raises(TypeError, match="x: found a nested tensor.*padded"):
            getattr(curvature, name)(model, nn.CrossEntropyLoss(), x, LABELS[:2])
