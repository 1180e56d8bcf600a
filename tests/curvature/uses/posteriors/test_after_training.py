"""Posteriors, influence, saliencies and merging in single precision, of nets that KFAC has trained."""

import copy
import functools
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvature
from optimizers import KFAC
from support.cases.case import seeded
from support.combinations import in_pairs
from support.comparisons import check_operator
from support.training import ORDERS, order_seed, train

pytestmark = [pytest.mark.fast, pytest.mark.training_run]

LOSS = nn.MSELoss()
Data = tuple[Tensor, Tensor]


@functools.cache
def trained(hidden: tuple[int, ...], seed: int = 0) -> tuple[nn.Module, Data]:
    with seeded(order_seed(seed)):
        x = torch.rand(60, 1) * 6 - 3
        y = (2 * x).sin() + 0.1 * torch.randn(60, 1)
        widths = [1, *hidden, 1]
        layers = [layer for a, b in zip(widths, widths[1:], strict=False) for layer in (nn.Linear(a, b), nn.Tanh())]
        model = nn.Sequential(*layers[:-1])
        opt = KFAC(model)
        train(model, opt, LOSS, x, y, 100)
    return model, (x, y)


def in_double(model: nn.Module, data: Data) -> tuple[nn.Module, Data]:
    return copy.deepcopy(model).double(), (data[0].double(), data[1].double())


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@in_pairs(
    per_layer=[False, True], structure=["kfac", "diagonal", "dense", "last_layer"], hidden=[(30,), (20, 20), (64,)]
)
def test_error_bars_after_training_are_those_in_double_precision(
    hidden: tuple[int, ...], structure: str, per_layer: bool
) -> None:
    x, errors, of_samples = torch.linspace(-4, 4, 30)[:, None], [], []
    for order in ORDERS if structure == "kfac" else ORDERS[:1]:
        model, data = trained(hidden, order)
        found = curvature.laplace(model, LOSS, data, structure).optimize_prior(per_layer=per_layer)
        wide_model, wide_data = in_double(model, data)
        wide = curvature.laplace(wide_model, LOSS, wide_data, structure)
        expected = wide.with_prior(found.prior, found.noise)
        errors.append(relative(found.outputs(x)[1], expected.outputs(x.double())[1]))
        prediction = found.predict(x)
        assert prediction.variance.dtype == torch.float32 and bool((prediction.variance > 0).all())
        draws = found.sample(500)
        assert {t.dtype for t in draws.values()} == {torch.float32}
        variances = torch.cat([own.var(0).flatten() for own in draws.values()])
        of_samples.append(relative(variances, expected.covariance.diagonal()))
    # The eigenvalues of factors are known to 1e-7 of the largest, which is a few percent of the prior, and more where
    # training has left a prior that is small. Of nine runs one had an error of 0.27; medians are below 0.06. The other
    # structures have errors below 0.02 in each run.
    assert median(errors) < 0.25 and median(of_samples) < 0.3, (errors, of_samples)


@pytest.mark.parametrize("prior", [0.7, torch.tensor([0.3, 2.0])])
@pytest.mark.parametrize("structure", ["kfac", "diagonal", "dense"])
def test_precision_is_one_matrix_in_all_its_forms(structure: str, prior: Any) -> None:
    model, data = in_double(*trained((6,)))
    check_operator(model, curvature.laplace(model, LOSS, data, structure, prior=prior, noise=0.5).precision)


def test_a_prior_below_rounding_is_refused_and_the_one_that_the_message_names_works() -> None:
    model, data = trained((30,))
    posterior = curvature.laplace(model, LOSS, data, prior=1e-7, noise=1e-3)
    with pytest.raises(
        ValueError, match=r"prior: 1e-07 is below the rounding of float32.*with_prior\(.*double"
    ) as told:
        posterior.predict(data[0])
    with pytest.raises(ValueError, match="with_prior"):
        posterior.sample(2)
    named = float(str(told.value).split("with_prior(")[1].split(")")[0])
    assert bool(posterior.with_prior(named).predict(data[0]).variance.isfinite().all())
    wide, double = in_double(model, data)
    found = curvature.laplace(wide, LOSS, double, prior=1e-3, noise=0.01).predict(double[0])
    assert bool(found.variance.isfinite().all())


@pytest.mark.parametrize("builder", [curvature.kfac, curvature.ekfac, curvature.gauss_newton])
def test_influence_saliencies_and_merging_are_those_in_double_precision(builder: Any) -> None:
    found, expected = (
        _used(model, data, builder) for model, data in (trained((20, 20)), in_double(*trained((20, 20))))
    )
    for name, value in found.items():
        assert relative(value, expected[name]) < 1e-2, name


def _used(model: nn.Module, data: Data, builder: Any) -> dict[str, Tensor]:
    K, (x, y) = builder(model, LOSS, data), data
    moved = {name: p.detach() * 1.1 for name, p in model.named_parameters()}
    flat = lambda named: torch.cat([t.flatten() for t in named.values()])
    return {
        "influence": curvature.influence(model, LOSS, data, (x[:5], y[:5]), K),
        "saliencies": flat(curvature.saliencies(K, model)),
        "merge": flat(curvature.merge([model, moved], [K, K], damping=1e-2)),
    }
