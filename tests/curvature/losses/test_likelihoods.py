"""Fisher information of the losses whose Hessian depends on the label, against sums over all labels by torch alone."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from curvature.losses.injections import exact, propagated, sampled
from curvature.losses.likelihoods import PROBABILITY_EPS, LabelDistribution, NormalLabel, PoissonLabel
from curvature.losses.table import TORCH_LOSSES, resolve
from support.moments import binary, classes, rand, randn, second_moment, source
from support.output_batches import at, masses_of, root_of, sampler_of

C, PLACES = 3, 2
DOUBLE = torch.float64
WEIGHT = torch.tensor([0.5, 1.0, 2.5], dtype=DOUBLE)


def products(marginals, shape):
    """All (probability, labels of shape (1, *shape)) of independent entries, from (probability, label) of each."""
    for joint in itertools.product(*marginals):
        probability = math.prod(p for p, _ in joint)
        yield probability, torch.tensor([y for _, y in joint], dtype=DOUBLE).reshape(1, *shape)


bernoulli = lambda output: products([[(p, 1.0), (1 - p, 0.0)] for p in output.flatten().tolist()], output.shape)


def poisson(output):
    """Up to 40: for rates below 3 the rest has a probability of less than 1e-24."""
    rate = lambda f: [(math.exp(-f + y * math.log(f) - math.lgamma(y + 1)), float(y)) for y in range(40)]
    return products([rate(f) for f in output.flatten().tolist()], output.shape)


def normal(output):
    """Nodes of Gauss and Hermite: exact, the Hessian being of second degree in the label."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(4)
    weights = weights / weights.sum()
    mean, variance = (half.flatten().tolist() for half in output.chunk(2))
    marginals = [
        [(w, m + v**0.5 * x) for w, x in zip(weights, nodes, strict=True)] for m, v in zip(mean, variance, strict=True)
    ]
    return products(marginals, (len(output) // 2, *output.shape[1:]))


def as_heads(loss):
    """The loss as torch has it, of (output, target)."""
    if not isinstance(loss, nn.GaussianNLLLoss):
        return loss
    return lambda output, target: loss(output.chunk(2, 1)[0], target, output.chunk(2, 1)[1])


def expected_hessian(loss, labels, output):
    """The oracle: sum over labels of their probability times the Hessian there, (D, D); output of one sample."""
    pairs = list(labels(output))
    f = lambda o: sum(p * as_heads(loss)(o.reshape(1, *output.shape), y) for p, y in pairs)
    return torch.autograd.functional.hessian(f, output.flatten())


def expected_squares(loss, _, output):
    """Where the Hessian is zero: sum over places and labels of the probability times the square of the gradient."""
    total, places = 0, output[0].numel()
    for place, label in itertools.product(range(places), range(C)):
        y = torch.full((places,), -100).index_fill(0, torch.tensor(place), label).reshape(1, *output.shape[1:])
        g = gradients(nn.NLLLoss(reduction="sum"), output[None], y).flatten()
        total = total + output.reshape(C, -1)[label, place].exp() * torch.outer(g, g)
    return total / places if loss.reduction == "mean" else total


expectation = lambda loss, labels, output: (expected_hessian if labels else expected_squares)(loss, labels, output)
log_probabilities = lambda *shape: randn(*shape).log_softmax(1)
probabilities = lambda *shape: rand(*shape) * 0.8 + 0.1
rates = lambda *shape: rand(*shape) + 0.5


def heads(*shape):
    mean = randn(*shape)
    return torch.cat([mean, rand(*mean.shape) + 0.3], 1)


def cases(reduction):
    """id, loss, labels, output of a shape without heads, shapes small enough for all their labels."""
    places = [(2, C), (2, C, PLACES)]
    return [
        ("nll", nn.NLLLoss(reduction=reduction), None, log_probabilities, places),
        ("bce", nn.BCELoss(reduction=reduction), bernoulli, probabilities, places),
        ("bce_weight", nn.BCELoss(reduction=reduction, weight=WEIGHT), bernoulli, probabilities, places[:1]),
        ("poisson", nn.PoissonNLLLoss(reduction=reduction, log_input=False), poisson, rates, [(3,), (2, 2)]),
        ("gaussian", nn.GaussianNLLLoss(reduction=reduction), normal, heads, [(2, 1), (2, 2), (2, 1, 2)]),
        ("gaussian_full", nn.GaussianNLLLoss(reduction=reduction, full=True), normal, heads, [(2, 2)]),
        ("gaussian_clamped", nn.GaussianNLLLoss(reduction=reduction, eps=0.1), normal, heads, [(2, 2)]),
    ]


CASES = [
    pytest.param(loss, labels, make(*shape), id=f"{name}_{reduction}_{shape}")
    for reduction in ("mean", "sum")
    for name, loss, labels, make, shapes in cases(reduction)
    for shape in shapes
]


@pytest.mark.parametrize("loss, labels, output", CASES)
def test_exact_is_the_expectation(loss, labels, output):
    """Without a target: none is needed."""
    got = second_moment(exact().vectors(output, loss))
    for n in range(len(output)):
        torch.testing.assert_close(got[n], expectation(loss, labels, output[n]), rtol=1e-10, atol=1e-10)


def gradients(loss, output, labels):
    """Of each sample's own term or terms, by torch."""
    point = output.clone().requires_grad_()
    return torch.autograd.grad(as_heads(loss)(point, labels), point)[0]


labels_of_nll = lambda output, drawn: drawn.abs().argmax(1)
labels_of_bce = lambda output, drawn: (drawn < 0).double()
labels_of_poisson = lambda output, drawn: (output - drawn * output).round()


def labels_of_gaussian(output, drawn):
    mean, variance = output.chunk(2, 1)
    return mean - drawn.chunk(2, 1)[0] * variance


@pytest.mark.parametrize(
    "loss, output, recover",
    [
        (nn.NLLLoss(reduction="sum"), log_probabilities(50, C, PLACES), labels_of_nll),
        (nn.BCELoss(reduction="sum"), probabilities(50, C), labels_of_bce),
        (nn.PoissonNLLLoss(reduction="sum", log_input=False, eps=0.0), rates(50, C), labels_of_poisson),
        (nn.GaussianNLLLoss(reduction="sum"), heads(50, C, PLACES), labels_of_gaussian),
    ],
)
def test_drawn_gradients_are_gradients_at_labels(loss, output, recover):
    drawn = sampler_of(loss, output)(1, source(4))[0]
    want = gradients(loss, output, recover(output, drawn))
    if isinstance(loss, nn.NLLLoss):  # up to a sign
        drawn = -drawn.abs()
    torch.testing.assert_close(drawn, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_variances_below_eps_count_as_eps(eps):
    """And their gradient passes, as in torch."""
    output = torch.cat([randn(3, 2), torch.tensor([[0.2, 0.9], [0.0, 1.0], [eps / 2, 0.7]], dtype=DOUBLE)], 1)
    v = output[:, 2:].clamp(min=eps)
    got = second_moment(exact().vectors(output, nn.GaussianNLLLoss(reduction="sum", eps=eps)))
    torch.testing.assert_close(got, torch.diag_embed(torch.cat([1 / v, 0.5 / v**2], 1)), rtol=1e-12, atol=0)


def test_probabilities_of_zero_and_one():
    """Where torch's own gradient is 0, as the label that is certain has it, or bounded."""
    p = torch.tensor([[0.0, 1.0, 1e-13, 0.5]], dtype=DOUBLE)
    got = root_of(nn.BCELoss(reduction="sum"), p)(torch.ones(1, 1, 4, dtype=DOUBLE))[0, 0]
    assert got[:2].eq(0).all() and got[3] == 2
    torch.testing.assert_close(got[2].square().item(), 1e-13 / PROBABILITY_EPS**2, rtol=1e-10, atol=0)
    drawn = sampler_of(nn.BCELoss(), p)(100, source())
    assert drawn[:, :, :2].eq(0).all() and drawn.isfinite().all()


NAN = [
    (nn.CrossEntropyLoss(), randn(3, C), classes),
    (nn.BCEWithLogitsLoss(), randn(3, C), binary),
    (nn.PoissonNLLLoss(), randn(3, C), binary),
    (nn.NLLLoss(), log_probabilities(3, C), None),
    (nn.BCELoss(), probabilities(3, C), None),
    (nn.PoissonNLLLoss(log_input=False), rates(3, C), None),
]


@pytest.mark.parametrize("loss, output, target", NAN)
def test_nan_stays_in_its_sample(loss, output, target):
    output = output.clone()
    output[1, 0] = math.nan
    for inject in (exact(), sampled(2), propagated(2)):
        vectors = inject.vectors(output, loss, target and target(output))
        assert vectors[:, 1].isnan().any() and vectors[:, [0, 2]].isfinite().all()


def test_negative_rates_and_variances():
    """torch has nan for the loss of the first, and refuses the second."""
    for inject in (exact(), sampled()):
        assert inject.vectors(torch.tensor([[-0.5]]), nn.PoissonNLLLoss(log_input=False)).isnan().all()
        with pytest.raises(ValueError, match="GaussianNLLLoss: the variances have negative entries"):
            inject.vectors(torch.tensor([[1.0, -0.5]]), nn.GaussianNLLLoss())
        with pytest.raises(ValueError, match=r"GaussianNLLLoss takes an output \(N, 2d, ...\).*found \(2, 3\)"):
            inject.vectors(torch.ones(2, 3), nn.GaussianNLLLoss())


def test_masses_of_heads():
    """One term for each mean: d of them, not 2d."""
    output = heads(2, C, PLACES)
    torch.testing.assert_close(masses_of(nn.GaussianNLLLoss(), output), torch.full_like(output, 1 / (C * PLACES)))
    assert masses_of(nn.GaussianNLLLoss(reduction="sum"), output).eq(1).all()
    with pytest.raises(ValueError, match="give both the same shape"):
        masses_of(nn.GaussianNLLLoss(), output, randn(2, 2 * C, PLACES))


def test_a_subclass_is_its_own_loss():
    class Mine(nn.GaussianNLLLoss):
        def forward(self, output, target):
            return (output - target).square().mean()

    assert type(resolve(Mine())) not in TORCH_LOSSES
    got = second_moment(exact().vectors(randn(2, 3), Mine(), randn(2, 3)))
    torch.testing.assert_close(got, torch.eye(3, dtype=DOUBLE).mul(2 / 3).expand(2, 3, 3))


@pytest.mark.parametrize("labels", [NormalLabel(), PoissonLabel()], ids=["normal", "Poisson"])
def test_labels_where_the_output_is_normal(labels: LabelDistribution):
    """Mean and variance of the label, by quadrature over the output: the law of total variance."""
    f, variance, noise = (torch.tensor(x, dtype=DOUBLE) for x in ([-0.4, 0.0, 0.7], [0.3, 1.0, 0.05], 0.6))
    nodes, weights = map(torch.from_numpy, np.polynomial.hermite_e.hermegauss(40))
    weights = weights / weights.sum()
    mean, spread = labels.given(f + variance.sqrt() * nodes[:, None], noise)
    expected = (weights[:, None] * mean).sum(0)
    total = (weights[:, None] * (spread + mean.square())).sum(0) - expected.square()
    found = labels.marginal(f, variance, noise)
    torch.testing.assert_close(found.mean, expected)
    torch.testing.assert_close(found.variance, total)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.NLLLoss()], ids=lambda loss: type(loss).__name__)
def test_counts_of_drawn_classes_come_of_the_generator_alone(loss):
    output, eps, found = randn(2, C, PLACES).log_softmax(1), randn(1, 2, C, PLACES), []
    likelihood, _ = at(loss, output).drawn_from()
    for seed in (0, 1):
        torch.manual_seed(seed)
        found.append(likelihood.drawn_root(50, source(4))(eps))
    assert torch.equal(*found)
