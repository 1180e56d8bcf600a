"""GaussianNLLLoss, which torch calls with three arguments, of models with a mean and a variance head."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from curvature import check_gradients, per_sample_gradients
from curvature.losses.table import join_heads, per_sample_losses, resolve, sample_masses
from support.combinations import pairwise
from support.moments import rand, randn

pytestmark = pytest.mark.fast

DOUBLE = torch.float64
OPTIONS = [
    {"reduction": reduction, "full": full, "eps": eps}
    for reduction, full, eps in pairwise(("mean", "sum"), (False, True), (1e-6, 0.8))
]
LOSSES = pytest.mark.parametrize("loss", [nn.GaussianNLLLoss(**options) for options in OPTIONS], ids=map(str, OPTIONS))


class Net(nn.Module):
    """Both heads in one tensor, or a tuple of them."""

    def __init__(self, form, outputs=3):
        super().__init__()
        self.body, self.mean, self.variance = nn.Linear(4, 5), nn.Linear(5, outputs), nn.Linear(5, outputs)
        self.scale = nn.Parameter(torch.tensor(1.3))  # read by no layer: the general path
        self.form = form
        self.double()

    def forward(self, x):
        h = self.body(x).tanh()
        return self.form(self.mean(h) * self.scale.sin(), F.softplus(self.variance(h)) * self.scale.cosh())


def tensor(mean, variance):
    return torch.cat([mean, variance], 1)


def pair(mean, variance):
    return mean, variance


def shared(mean, variance):
    """One variance for all outputs of a sample."""
    return [mean, variance.mean(1, keepdim=True)]


def vector(mean, variance):
    return mean, variance.mean(1)


def parted(mean, variance):
    """The same as a pair, with places: (N, 1, d)."""
    return mean[:, None], variance[:, None]


FORMS = pytest.mark.parametrize("form", [tensor, pair, shared, vector, parted], ids=lambda f: f.__name__)


def torch_loss(loss, output, target):
    """As a user of torch calls it."""
    mean, variance = output.chunk(2, 1) if isinstance(output, torch.Tensor) else output
    return loss(mean, target, variance)


@FORMS
@LOSSES
def test_per_sample_gradients(loss, form):
    torch.manual_seed(0)
    model, x = Net(form), randn(6, 4)
    y = randn(6, 1, 3, seed=5) if form is parted else randn(6, 3, seed=5)
    got = per_sample_gradients(model, loss, x, y)
    for n in range(6):
        value = torch_loss(loss, model(x[n : n + 1]), y[n : n + 1])
        want = torch.autograd.grad(value, list(model.parameters()))
        for (name, _), g in zip(model.named_parameters(), want, strict=True):
            torch.testing.assert_close(got[name][n], g, rtol=1e-10, atol=1e-12)
    check_gradients(model, loss, x, y)


@LOSSES
@pytest.mark.parametrize("shape", [(6, 3), (6, 1), (6, 2, 4), (6, 2, 2, 2)], ids=str)
@pytest.mark.parametrize("rows", [1, 2])
def test_per_sample_losses_and_their_derivatives(rows, shape, loss):
    """Some variances are below eps: there the gradient passes, as in torch."""
    target, count = randn(*shape, seed=5), 6 // rows
    output = torch.cat([randn(*shape), rand(*shape) * 2], 1).requires_grad_()
    got = per_sample_losses(loss, output, target, count)
    parts = zip(output.chunk(count), target.chunk(count), strict=True)
    want = torch.stack([torch_loss(loss, o, y) for o, y in parts])
    weights = torch.linspace(0.5, 2, count, dtype=DOUBLE)
    for _ in range(3):  # the losses and two derivatives
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        got, want = (torch.autograd.grad(v, output, weights, create_graph=True)[0] for v in (got, want))
        weights = randn(*output.shape, seed=7)
    terms = target[0].numel() * rows if loss.reduction == "mean" else 1
    torch.testing.assert_close(sample_masses(loss, output, target, count), torch.full((count,), terms, dtype=DOUBLE))


def refused(match, output, target, count=2):
    with pytest.raises(ValueError, match=f"GaussianNLLLoss.*{match}"):
        per_sample_losses(nn.GaussianNLLLoss(), output, target, count)


def test_refusals():
    refused(r"target \(1, 1\).*means are \(1, 3\)", rand(2, 6), randn(2, 1))
    refused(r"target \(1, 6\).*means are \(1, 3\)", rand(2, 6), randn(2, 6))
    refused(r"\(N, 2d, ...\).*found \(1, 5\)", rand(2, 5), randn(2, 3))
    refused(r"\(N, 2d, ...\).*found \(2,\)", rand(2), randn(2))
    refused("negative entries; softplus or exp", torch.cat([rand(2, 3), -rand(2, 3)], 1), randn(2, 3))
    with pytest.raises(ValueError, match=r"mean must have shape \(N, d, ...\), found \(2,\)"):
        join_heads(resolve(nn.GaussianNLLLoss()), (rand(2), rand(2)))
    with pytest.raises(ValueError, match="reduction='none'"):
        per_sample_losses(nn.GaussianNLLLoss(reduction="none"), rand(2, 6), randn(2, 3), 2)
    with pytest.raises(ValueError, match=r"found tuple|mean, variance"):
        resolve(nn.GaussianNLLLoss())((rand(2, 3),) * 3, randn(2, 3))
