"""Parameters without entries (a layer without inputs, a placeholder) change no number anywhere."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvature
from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import Raw, seeded
from support.combinations import in_pairs, member
from support.training import train

pytestmark = pytest.mark.fast
N, LOSS = 5, nn.CrossEntropyLoss()


def plain(m: Any, x: Tensor) -> Tensor:
    return m.layer(x)


def empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape))


# what each adds to `layer` and how it is read; nothing of it changes the output
MODELS: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[], dict[str, Any]]]] = {
    "no input": (lambda m, x: m.layer(x) + m.none(x[:, :0]), lambda: {"none": nn.Linear(0, 2, bias=False)}),
    "no output": (lambda m, x: torch.cat([m.layer(x), m.none(x)], 1), lambda: {"none": nn.Linear(3, 0)}),
    "no unit": (
        lambda m, x: m.layer(x) + m.none(x),
        lambda: {"none": nn.Sequential(nn.Linear(3, 0), nn.Tanh(), nn.Linear(0, 2, bias=False))},
    ),
    "first and added up": (lambda m, x: m.layer(x) + m.none.sum(), lambda: {"none": empty(0)}),
    "not read": (plain, lambda: {"none": empty(0, 3)}),
    "tall": (lambda m, x: m.layer(x) + (x[:, :0] * m.none[0]).sum(1, keepdim=True), lambda: {"none": empty(4, 0)}),
    "no row": (
        lambda m, x: m.layer(x) + m.none(x[:, :0].long()).sum((1, 2))[:, None],
        lambda: {"none": nn.Embedding(0, 3)},
    ),
    "no column": (
        lambda m, x: torch.cat([m.layer(x), m.none((x[:, 0] > 0).long())], 1),
        lambda: {"none": nn.Embedding(2, 0)},
    ),
    "no bag": (
        lambda m, x: m.layer(x) + m.none(x[:0, 0].long(), torch.zeros(len(x)).long()).sum(1, keepdim=True),
        lambda: {"none": nn.EmbeddingBag(0, 3)},
    ),
    "computed": (lambda m, x: m.layer(x) + (x @ m.none.T.exp()).sum(1, keepdim=True), lambda: {"none": empty(0, 3)}),
}


def problem(name: str) -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    """The model, the same without its empty parameter, and a batch."""
    forward, parts = MODELS[name]
    with warnings.catch_warnings(), seeded(0):
        warnings.simplefilter("ignore")
        found = parts()
        layer = nn.Linear(3, 2)
        first = {**found, "layer": layer} if "first" in name else {"layer": layer, **found}
        alike = nn.Linear(3, 2)
        alike.load_state_dict(layer.state_dict())
        x, y = torch.randn(N, 3).double(), torch.randint(2, (N,))
    return Raw(forward, **first).double(), Raw(plain, layer=alike).double(), x, y


BUILDERS = [
    curvature.gauss_newton, curvature.fisher, curvature.empirical_fisher, curvature.hessian, curvature.fisher_blocks,
    curvature.kfac, curvature.ekfac,
]  # fmt: skip
FORMS: dict[str, Callable[[Any, Tensor], Any]] = {
    "@": lambda M, v: M @ v,
    "solve": lambda M, v: M.solve(v, damping=0.5),
    "trace": lambda M, v: M.trace(),
    "diagonal": lambda M, v: M.diagonal(),
    "eigenvalues": lambda M, v: M.eigenvalues(),
    "logdet": lambda M, v: M.logdet(damping=0.5),
    "to_dense": lambda M, v: M.to_dense(),
    "sum": lambda M, v: (2 * M + M).to_dense(),
}


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(found, dict):
        found = {name: value for name, value in found.items() if value.numel()}
        expected = {name: value for name, value in expected.items() if value.numel()}
    torch.testing.assert_close(found, expected)


@in_pairs(name=MODELS, build=BUILDERS, form=FORMS)
def test_matrices_are_those_without_it(name: str, build: Any, form: str) -> None:
    model, alike, x, y = problem(name)
    halves = [(x[:2], y[:2]), (x[2:], y[2:])]
    found, expected = build(model, LOSS, halves), build(alike, LOSS, halves)
    v = torch.linspace(-1, 1, expected.shape[1], dtype=torch.float64)
    assert_same(FORMS[form](found, v), FORMS[form](expected, v))


@pytest.mark.parametrize("name", MODELS)
def test_draws_and_files_have_all_parameters(name: str, tmp_path: Path) -> None:
    model, _, x, y = problem(name)
    K = curvature.kfac(model, LOSS, (x, y))
    drawn = K.sample(3, damping=0.5)
    parts = K.space.split(drawn) if isinstance(drawn, Tensor) else drawn
    assert {k: g.shape[1:] for k, g in parts.items()} == {k: p.shape for k, p in model.named_parameters()}
    K.save(tmp_path / "factors.pt")
    torch.testing.assert_close(curvature.load(tmp_path / "factors.pt").to_dense(), K.to_dense())


OTHERS: dict[str, Callable[..., Any]] = {
    "rows": lambda m, x, y: curvature.per_sample_gradients(m, LOSS, x, y),
    "norms": lambda m, x, y: curvature.per_sample_norms(m, LOSS, x, y),
    "gram": lambda m, x, y: curvature.per_sample_gram(m, LOSS, x, y),
    "clipped": lambda m, x, y: curvature.clipped_gradient(m, LOSS, x, y, 1.0),
    "jacobians": lambda m, x, y: curvature.per_sample_jacobians(m, x),
    "diagonal": lambda m, x, y: curvature.fisher_diagonal(m, LOSS, (x, y)),
    "diagonals": lambda m, x, y: curvature.per_sample_fisher_diagonals(m, LOSS, x, y),
    "projections": lambda m, x, y: curvature.per_sample_projections(m, LOSS, x, y, curvature.SignProjection(4)),
    "sides": lambda m, x, y: curvature.per_sample_projections(m, LOSS, x, y, curvature.KroneckerProjection(2)),
    "influence": lambda m, x, y: curvature.influence(m, LOSS, (x, y), (x, y)),
    "saliencies": lambda m, x, y: curvature.saliencies(curvature.kfac(m, LOSS, (x, y)), m),
    "quantize": lambda m, x, y: curvature.quantize(curvature.kfac(m, LOSS, (x, y)), m, 4),
    "prune": lambda m, x, y: curvature.prune(curvature.kfac(m, LOSS, (x, y)), m, 0.5)[0],
    "laplace": lambda m, x, y: curvature.laplace(m, LOSS, (x, y)).optimize_prior().predict(x),
    "diagonal laplace": lambda m, x, y: curvature.laplace(m, LOSS, (x, y), structure="diagonal").predict(x),
}


@pytest.mark.parametrize("name", MODELS)
def test_all_else_is_as_without_it(name: str) -> None:
    for what, function in OTHERS.items():
        model, alike, x, y = problem(name)
        with member(what):
            for _ in range(2):  # the second call has a plan
                assert_same(function(model, x, y), function(alike, x, y))


MAKERS = {"KFAC": KFAC, "EKFAC": EKFAC, "natural": NaturalGradient}
MAKERS["with the loss"] = lambda model: KFAC(model, loss=LOSS, inject=curvature.exact())


@pytest.mark.parametrize("name", MODELS)
def test_optimizers_take_the_steps_of_the_model_without_it(name: str) -> None:
    for kind, make in MAKERS.items():
        model, alike, x, y = problem(name)
        with member(kind):
            for m in (model, alike):
                opt = make(m)
                train(m, opt, LOSS, x, y, 3)
                make(m).load_state_dict(opt.state_dict())
            torch.testing.assert_close(model.layer.weight, alike.layer.weight)
