"""Priors by held-out data, against a fine grid of dense matrices; priors for classes that need no data beside."""

import copy
import logging
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_wine
from torch import Tensor, nn

import curvature
from curvature.uses.posteriors.search import golden_section, least_that_passes, one_by_one
from optimizers import KFAC
from support.cases.case import seeded
from support.combinations import in_turn
from support.comparisons import matches
from support.oracles.laplace import log_loss
from support.posteriors import LABELS, both
from support.training import train

pytestmark = pytest.mark.fast


def held_out(labels: str) -> tuple[Tensor, Tensor]:
    with seeded(1):
        return torch.randn(5, 3).double(), LABELS[labels][1]()


def at(expected: Any, prior: float, noise: float | None) -> Any:
    moved = copy.copy(expected)
    moved.prior, moved.noise = torch.full_like(expected.prior, prior), noise
    return moved


@in_turn(structure=["kfac", "last_layer"], labels=LABELS)
def test_no_prior_of_a_fine_grid_has_a_lower_log_loss(structure: str, labels: str) -> None:
    posterior, expected = both(structure, labels)
    data = held_out(labels)
    best = posterior.optimize_prior(validation=data)
    noise = float(best.noise) if labels == "squares" else None
    least = log_loss(at(expected, float(best.prior), noise), data)
    scale = float(1 / expected.mean.square().mean())
    for prior in (scale * torch.logspace(-3, 5, 161)).tolist():
        assert least <= log_loss(at(expected, prior, noise), data) + 1e-3 * abs(least)
    if noise is not None:
        for other in (noise * torch.logspace(-1, 1, 81)).tolist():
            assert least <= log_loss(at(expected, float(best.prior), other), data) + 1e-3 * abs(least)


def test_the_log_loss_is_that_of_each_label() -> None:
    for labels in LABELS:
        posterior, expected = both("dense", labels)
        data = held_out(labels)
        ours = [posterior.with_prior(prior)._log_loss(data) for prior in (4.0, 20.0)]
        exact = [log_loss(at(expected, prior, expected.noise), data) for prior in (4.0, 20.0)]
        # differences, which have no constants of labels and pi
        assert ours[0] - ours[1] == pytest.approx(exact[0] - exact[1], rel=1e-6), labels


def test_priors_of_layers_are_no_worse_than_one_for_all() -> None:
    posterior, expected = both("kfac", "classes")
    data = held_out("classes")
    one, each = (posterior.optimize_prior(validation=data, per_layer=flag) for flag in (False, True))
    assert each.prior.shape == (2,) and one.prior.ndim == 0
    assert each._log_loss(data) <= one._log_loss(data)
    batches = [(data[0][:2], data[1][:2]), (data[0][2:], data[1][2:])]
    matches(posterior.optimize_prior(validation=batches).prior, one.prior)


def test_variances_of_heads_count_in_the_log_loss() -> None:
    with seeded(0):
        model, x, y = nn.Linear(3, 2).double(), torch.randn(5, 3).double(), torch.randn(5, 1).double()
    heads = curvature.laplace(model, nn.GaussianNLLLoss(eps=0.3), (x, y))
    two = heads, heads.with_prior(9.0)
    predicted = [posterior.predict(x) for posterior in two]
    exact = [-torch.distributions.Normal(p.mean, p.variance.sqrt()).log_prob(y).sum() for p in predicted]
    ours = [posterior._log_loss((x, y)) for posterior in two]
    assert ours[0] - ours[1] == pytest.approx(float(exact[0] - exact[1]), rel=1e-6)


def clusters() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    with seeded(0):
        centres = 2 * torch.randn(4, 8)
        y = torch.arange(200) % 4
        data = centres[y] + torch.randn(200, 8), y
        model = nn.Sequential(nn.Linear(8, 30), nn.ReLU(), nn.Linear(30, 4))
        train(model, KFAC(model), nn.CrossEntropyLoss(), *data, 40)
    return model, data


def test_by_default_the_log_loss_of_classes_hardly_rises() -> None:
    """By at most 4e-5 of that of guesses; a prior of half the size, or less, would raise it by more."""
    model, (x, y) = clusters()
    x, y = x[:120], y[:120]
    some = torch.where(torch.arange(120) % 3 > 0, y, -100)  # of the others the loss knows nothing
    weights = torch.tensor([1.0, 20.0, 0.1, 3.0])
    with seeded(0):
        one = nn.Sequential(nn.Linear(8, 30), nn.ReLU(), nn.Linear(30, 1))
        above = (y[:, None] > 1).float()
        train(one, KFAC(one), nn.BCEWithLogitsLoss(), x, above, 40)
    for network, loss, labels, structure in (
        (model, nn.CrossEntropyLoss(), y, "kfac"),
        (model, nn.CrossEntropyLoss(), y, "last_layer"),
        (model, nn.CrossEntropyLoss(weights), some, "kfac"),
        (one, nn.BCEWithLogitsLoss(), above, "kfac"),
    ):
        posterior = curvature.laplace(network, loss, (x, labels), structure)

        def rise(prior: Tensor) -> float:
            with torch.no_grad():
                f, covariance = posterior.with_prior(prior).outputs(x)  # noqa: B023
                shrunk = f / (1 + math.pi / 8 * covariance.diagonal(dim1=1, dim2=2)).sqrt()
                at, network_at, guess = (loss(z, labels).double() for z in (shrunk, f, 0 * f))  # noqa: B023
            return float((at - network_at) / guess)

        assert rise(posterior.prior) < 4.1e-5 < rise(posterior.prior / 2)


def test_by_default_a_network_that_is_right_stays_as_good() -> None:
    """Of wine, few training samples and no mistake on others."""
    x, y = map(torch.as_tensor, load_wine(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    x, y = x[order].float(), y[order]
    x = (x - x[:89].mean(0)) / x[:89].std(0)
    with seeded(1):
        model = nn.Sequential(nn.Linear(13, 50), nn.LayerNorm(50), nn.ReLU(), nn.Linear(50, 3))
        train(model, KFAC(model), nn.CrossEntropyLoss(), x[:89], y[:89], 60)
    network = float(F.cross_entropy(model(x[133:]), y[133:]).detach())
    assert network < 0.03
    p = curvature.laplace(model, nn.CrossEntropyLoss(), (x[:89], y[:89])).predict(x[133:]).mean
    assert F.nll_loss(p.log(), y[133:]) < network + 0.003


def test_a_prior_that_halves_confidence_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    model, (x, y) = clusters()
    with caplog.at_level(logging.WARNING, "curvature"):
        posterior = curvature.laplace(model, nn.CrossEntropyLoss(), (x, y))
        curvature.laplace(model, nn.CrossEntropyLoss(), (x, y), prior=float(posterior.prior))
        posterior.optimize_prior(validation=(x, y))
        assert not caplog.records
        curvature.laplace(model, nn.CrossEntropyLoss(), (x, y), prior=1e-3)
        posterior.optimize_prior()
    assert len(caplog.records) == 2
    assert all("mean confidence on the training data falls from" in line for line in caplog.messages)


def test_what_a_search_needs_is_asked_for() -> None:
    posterior, expected = both("kfac", "classes")
    x, y = held_out("classes")
    with pytest.raises(ValueError, match="not finite with any prior"):
        posterior.optimize_prior(validation=(x * float("nan"), y))
    with pytest.raises(TypeError, match="validation: expected a pair"):
        posterior.optimize_prior(x)
    for wrong, error in ({"steps": "5"}, TypeError), ({"steps": 0}, ValueError), ({"per_layer": 1}, TypeError):
        with pytest.raises(error, match=next(iter(wrong))):
            posterior.optimize_prior(**wrong)
    for draw in (lambda g: posterior.predict(x, 2, generator=g), lambda g: posterior.sample(2, generator=g)):
        for seed in (0, 1):  # not to be taken for none
            with pytest.raises(TypeError, match="expected a torch.Generator"):
                draw(seed)
    wide = nn.Linear(2, 5000).double()
    data = torch.randn(3, 2).double(), torch.arange(3)
    with pytest.raises(ValueError, match=r"pass prior=\.\.\."):
        curvature.laplace(wide, nn.CrossEntropyLoss(), data, "diagonal")
    assert curvature.laplace(wide, nn.CrossEntropyLoss(), data, "diagonal", prior=2.0).prior == 2


def test_searches_find_what_is_least() -> None:
    x, value = golden_section(lambda x: (x - 0.3) ** 2, 0.0, 1.0)
    assert abs(x - 0.3) < 0.03 and value < 1e-3
    point = one_by_one(lambda p: (p[0] - 1) ** 2 + (p[1] + p[0]) ** 2, [0.0, 0.0], 1.0)
    assert F.mse_loss(torch.tensor(point), torch.tensor([1.0, -1.0])) < 0.02
    assert abs(least_that_passes(lambda x: x > 0.7, 0.0, 1.0) - 0.7) < 0.01
    assert least_that_passes(lambda x: False, 0.0, 1.0) == 1.0
