"""Laplace posteriors against dense inverses, determinants and Jacobians of one sample at a time."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import curvature
from curvature.uses.posteriors import posterior
from support.cases.case import Raw, seeded
from support.comparisons import matches
from support.oracles.brute_force import Matrices
from support.oracles.laplace import LinearRegression
from support.posteriors import LABELS, NOISE, PRIOR, STRUCTURES, both, cnn, problem

pytestmark = pytest.mark.fast


def label_constant(labels: str, y: Tensor) -> float:
    return -float(torch.lgamma(y + 1).sum()) if labels == "counts" else 0.0


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("labels", LABELS)
def test_posterior_is_that_of_dense_matrices(structure: str, labels: str) -> None:
    found, expected = both(structure, labels)
    x, y = expected.of.data
    matches(found.precision.to_dense(), expected.precision, 1e-8)
    f, covariance = found.outputs(x)
    matches(f, expected.of.model(x).detach())
    matches(covariance, expected.output_covariance(), 1e-8)
    evidence = expected.log_marginal_likelihood() + label_constant(labels, y)
    matches(found.log_marginal_likelihood(), evidence.detach(), 1e-8)


@pytest.mark.parametrize("structure", ["kfac", "diagonal", "last_layer"])
def test_convolutions_with_groups(structure: str) -> None:
    found, expected = both(structure, "classes", cnn)
    matches(found.outputs(expected.of.data[0])[1], expected.output_covariance(), 1e-8)
    matches(found.log_marginal_likelihood(), expected.log_marginal_likelihood().detach(), 1e-8)


def test_no_jacobian_where_factors_do(monkeypatch: pytest.MonkeyPatch) -> None:
    found, expected = both("dense", "classes", cnn)
    monkeypatch.setattr(posterior, "ROWS_ELEMENTS", 1)  # samples one by one
    matches(found.outputs(expected.of.data[0])[1], expected.output_covariance(), 1e-8)
    linear, expected = both("kfac", "classes")
    monkeypatch.delattr(posterior, "_by_rows")
    matches(linear.outputs(expected.of.data[0])[1], expected.output_covariance(), 1e-8)


@pytest.mark.parametrize("structure", ["kfac", "diagonal", "dense"])
def test_a_prior_for_each_layer(structure: str) -> None:
    found, expected = both(structure, "squares", prior=torch.tensor([0.3, 2.0], dtype=torch.float64))
    matches(found.precision.to_dense(), expected.precision, 1e-8)
    matches(found.log_marginal_likelihood(), expected.log_marginal_likelihood().detach(), 1e-8)
    named = found.log_marginal_likelihood({"0": 0.3, "2": 2.0})
    matches(named, found.log_marginal_likelihood())


@pytest.mark.parametrize("structure", ["kfac", "dense"])
def test_evidence_is_differentiable(structure: str) -> None:
    found, _ = both(structure, "squares")
    inputs = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (PRIOR, [0.4, 1.5], NOISE)]
    assert torch.autograd.gradcheck(found.log_marginal_likelihood, (inputs[0], inputs[2]))
    assert torch.autograd.gradcheck(found.log_marginal_likelihood, (inputs[1], inputs[2]))


def test_linear_regression_is_exact() -> None:
    with seeded(0):
        X, y, new = torch.randn(7, 3).double(), torch.randn(7).double(), torch.randn(4, 3).double()
    ones = lambda x: torch.cat([x, torch.ones_like(x[:, :1])], 1)
    textbook = LinearRegression(ones(X), y, torch.full((4,), PRIOR, dtype=torch.float64), NOISE)
    model = nn.Linear(3, 1).double()
    with torch.no_grad():
        model.weight.copy_(textbook.mean[None, :3])
        model.bias.copy_(textbook.mean[3:])
    for structure in STRUCTURES:
        if structure != "diagonal":
            found = curvature.laplace(model, nn.MSELoss(), (X, y[:, None]), structure, prior=PRIOR, noise=NOISE)
            mean, variance = (entry[:, 0] for entry in found.predict(new))
            expected = textbook.predict(ones(new))
            matches(mean, expected[0])
            matches(variance, expected[1])
            matches(found.log_marginal_likelihood(), textbook.log_evidence())


def test_probabilities() -> None:
    """Draws agree with a Gauss-Hermite quadrature for one binary output, and the probit is near it."""
    with seeded(0):
        model, x = nn.Linear(2, 1).double(), torch.randn(6, 2).double()
        y = torch.rand(6, 1).round().double()
    found = curvature.laplace(model, nn.BCEWithLogitsLoss(), (x, y), "dense", prior=0.2)
    f, covariance = found.outputs(x)
    grid = torch.linspace(-9, 9, 2001, dtype=torch.float64)
    weights = torch.exp(-grid.square() / 2) / math.sqrt(2 * math.pi) * (grid[1] - grid[0])
    exact = ((f + covariance[:, 0].sqrt() * grid).sigmoid() * weights).sum(1)
    drawn = found.predict(x, samples=20_000)
    assert (drawn.mean[:, 0] - exact).abs().max() < 0.01
    assert (found.predict(x).mean[:, 0] - exact).abs().max() < 0.02
    matches(drawn.variance, drawn.mean * (1 - drawn.mean))


def test_counts_and_variances_of_their_own() -> None:
    """Means and variances of labels by draws agree with the closed forms."""
    found, expected = both("kfac", "counts", prior=20.0)
    x, _ = expected.of.data
    exact, drawn = found.predict(x), found.predict(x, samples=40_000)
    assert all(((a - b) / b).abs().max() < 0.05 for a, b in zip(drawn, exact, strict=True))
    with seeded(0):
        model = nn.Sequential(nn.Linear(3, 2), nn.Softplus()).double()
        y = torch.randn(5, 1).double()
    heads = curvature.laplace(model, nn.GaussianNLLLoss(), (x, y), "dense")
    summed = nn.GaussianNLLLoss(reduction="sum")
    matches(heads.precision.to_dense(), Matrices(model, summed, (x, y)).fisher + torch.eye(8))
    f, covariance = heads.outputs(x)
    matches(heads.predict(x).variance, f[:, 1:] + covariance[:, :1, 0])
    mean, variance = f.T
    likelihood = torch.distributions.Normal(mean, variance.sqrt()).log_prob(y[:, 0]).sum()
    matches(heads.fit.log_likelihood(heads.noise), likelihood)


def test_variances_below_eps_count_as_eps() -> None:
    """In predictions as in the loss; of draws, also those below zero."""
    with seeded(0):
        model, x, y = nn.Linear(3, 2).double(), torch.randn(5, 3).double(), torch.randn(5, 1).double()
    heads = curvature.laplace(model, nn.GaussianNLLLoss(eps=0.3), (x, y))
    f, covariance = heads.outputs(x)
    assert (f[:, 1] < 0.3).any() and (f[:, 1] > 0.3).any()
    matches(heads.predict(x).variance, f[:, 1:].clamp(min=0.3) + covariance[:, :1, 0])
    assert (heads.predict(x, samples=9).variance >= 0.3).all()


def test_draws() -> None:
    found, expected = both("kfac", "squares")
    drawn = found.sample(20_000, generator=torch.Generator().manual_seed(0))
    assert list(drawn) == [name for name, _ in expected.of.model.named_parameters()]
    flat = torch.cat([part.flatten(1) for part in drawn.values()], 1)
    assert (flat.mean(0) - expected.mean).norm() < 0.05 * expected.covariance.trace().sqrt()
    assert (flat.T.cov() - expected.covariance).norm() < 0.05 * expected.covariance.norm()


def test_optimized_prior_is_where_the_evidence_is_flat() -> None:
    with seeded(0):
        x = torch.randn(20, 3).double()
        model = nn.Linear(3, 2).double()
        y = model(x).detach() + 0.3 * torch.randn(20, 2).double()
    before = curvature.laplace(model, nn.MSELoss(), (x, y), "kfac")
    after = before.optimize_prior()
    assert after.log_marginal_likelihood() > before.log_marginal_likelihood()
    matches(before.prior, torch.tensor(1.0).double())
    point = [after.prior.log().requires_grad_(), after.noise.log().requires_grad_()]
    slopes = torch.autograd.grad(after.log_marginal_likelihood(*(own.exp() for own in point)), point)
    assert max(slope.abs() for slope in slopes) < 1e-3
    found, _ = both("kfac", "classes")
    assert found.optimize_prior(per_layer=True).prior.shape == (2,)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_devices(structure: str, device: str) -> None:
    model, loss, (x, y) = problem("squares")
    here = curvature.laplace(model, loss, (x, y), structure).optimize_prior(per_layer=True)
    x, y = x.to(device), y.to(device)
    there = curvature.laplace(copy.deepcopy(model).to(device), loss, (x, y), structure).optimize_prior(per_layer=True)
    matches(there.log_marginal_likelihood().cpu(), here.log_marginal_likelihood(), 1e-6)
    for found, expected in zip(there.predict(x), here.predict(x.cpu()), strict=True):
        assert found.device == x.device
        matches(found.cpu(), expected, 1e-4)
    assert there.predict(x, samples=2).mean.device == there.sample(2)["2.weight"].device == x.device


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": nn.L1Loss()}, "L1Loss has none here; these have one: CrossEntropyLoss"),
        ({"loss": lambda output, target: output.sum()}, "needs a likelihood"),
        ({"loss": nn.PoissonNLLLoss(log_input=False)}, "log_input=True"),
        ({"loss": nn.MSELoss(reduction="none")}, "reduction='none'"),
        ({"structure": "full"}, "structure: expected one of kfac"),
        ({"prior": 0.0}, "prior: expected positive"),
        ({"prior": torch.tensor([1.0, -1.0])}, "prior: expected positive"),
        ({"prior": [1.0]}, "prior: expected a positive number"),
        ({"prior": torch.ones(3)}, "2 layers"),
        ({"prior": {"0": 1.0}}, "each of"),
        ({"noise": 0.0}, "noise: expected positive"),
        ({"noise": torch.ones(2)}, "noise: expected a single number"),
        ({"loss": nn.BCEWithLogitsLoss(), "noise": 1.0}, "has its own"),
        ({"data": []}, "no batch"),
        ({"data": (torch.zeros(0, 3).double(), torch.zeros(0, 3).double())}, "empty"),
        ({"model": nn.Sequential(nn.Linear(3, 3), nn.Dropout()).double()}, "model.eval"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    model, loss, data = problem("squares")
    arguments = {"model": model, "loss": loss, "data": data} | change
    with pytest.raises((ValueError, TypeError), match=message):
        curvature.laplace(**arguments)


def test_what_a_posterior_refuses() -> None:
    model, _, (x, _) = problem("squares", lambda: nn.Linear(3, 3))
    posterior = curvature.laplace(model, nn.MSELoss(), (x, model(x).detach()))
    with pytest.raises(ValueError, match="no maximum"):
        posterior.optimize_prior()
    with pytest.raises(TypeError, match="samples: expected a number of draws, found 0"):
        posterior.predict(x, samples=0)
    with pytest.raises(TypeError, match="samples: expected a number of draws, found True"):
        posterior.predict(x, samples=True)
    with pytest.raises(TypeError, match="n: expected a number of draws, found 1.5"):
        posterior.sample(1.5)
    with pytest.raises(ValueError, match="noise: BCE.* has its own"):
        curvature.laplace(model, nn.BCEWithLogitsLoss(), (x, torch.ones(5, 3).double())).with_prior(1.0, noise=1.0)


def test_parameters_that_vmap_reads() -> None:
    with seeded(0):
        model = Raw(lambda m, x: torch.func.vmap(lambda row: m.w @ row)(x), w=(3, 4)).double()
        x, y = torch.randn(6, 4).double(), torch.arange(6) % 3
    posterior = curvature.laplace(model, nn.CrossEntropyLoss(), (x, y), "dense", prior=2.0)
    p = model(x).detach().softmax(1)
    J = torch.einsum("cd,ni->ncdi", torch.eye(3).to(x), x).flatten(2)
    H = p.diag_embed() - p[:, :, None] * p[:, None]
    precision = (J.mT @ H @ J).sum(0) + 2 * torch.eye(12).to(x)
    torch.testing.assert_close(posterior.precision.to_dense(), precision)
    torch.testing.assert_close(posterior.outputs(x)[1], J @ torch.linalg.inv(precision) @ J.mT)
    with pytest.raises(ValueError, match="which layer is the last"):
        curvature.laplace(model, nn.CrossEntropyLoss(), (x, y), "last_layer")
