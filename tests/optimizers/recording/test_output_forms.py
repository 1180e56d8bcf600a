"""Outputs in objects, as distributions, sparse, or without an axis for their only sample: the same run in each form."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn

import curvature
from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import Raw, seeded
from support.habits import flat

OPTIMIZERS = pytest.mark.parametrize("optimizer", [KFAC, EKFAC, NaturalGradient], ids=lambda o: o.__name__)
FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": (lambda mean, scale: (mean, scale), lambda out: out),
    "normal": (distributions.Normal, lambda out: (out.loc, out.scale)),
    "independent": (
        lambda mean, scale: distributions.Independent(distributions.Normal(mean, scale), 1),
        lambda out: (out.base_dist.loc, out.base_dist.scale),
    ),
    "beside another": (
        lambda mean, scale: (distributions.Normal(mean, scale), mean.detach()),
        lambda out: (out[0].loc, out[0].scale),
    ),
    "object": (lambda mean, scale: SimpleNamespace(mean=mean, scale=scale), lambda out: (out.mean, out.scale)),
}

with seeded(0):
    X, Y = torch.randn(12, 5).double(), torch.randn(12, 2).double()


def policy(form: Callable[[Tensor, Tensor], Any]) -> nn.Module:
    with seeded(1):
        parts = {"body": nn.Linear(5, 4), "mean": nn.Linear(4, 2), "scale": nn.Linear(4, 2)}
    run = lambda m, x: form(m.mean(h := m.body(x).tanh()), m.scale(h).exp())
    return Raw(run, **parts).double()


def perceptron(end: Callable[[Tensor], Tensor], *layers: nn.Module) -> nn.Module:
    return Raw(lambda m, x: end(m.body(x)), body=nn.Sequential(nn.Linear(5, 4), nn.Tanh(), *layers)).double()


@OPTIMIZERS
@pytest.mark.parametrize("form", [name for name in FORMS if name != "tuple"])
def test_tensors_of_an_object_are_outputs(optimizer: Any, form: str) -> None:
    """Without them parameters moved along their gradients, or those behind the distribution did."""
    ends = []
    for name in ("tuple", form):
        make, parts = FORMS[name]
        model = policy(make)
        opt = optimizer(model)
        for _ in range(4):
            opt.zero_grad()
            mean, scale = parts(model(X))
            (-distributions.Normal(mean, scale).log_prob(Y).sum(1).mean()).backward()
            opt.step()
        assert "mean of others" not in opt.report()
        ends.append(flat(model))
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-12)


@OPTIMIZERS
def test_sparse_outputs_are_as_dense_ones(optimizer: Any) -> None:
    """Their last layer is not the one that makes the output as it is: what is sent back there is not copied."""
    ends = []
    for is_sparse in (False, True):
        with seeded(1):
            model = perceptron(lambda z: z.to_sparse() if is_sparse else z, nn.Linear(4, 3), nn.Tanh())  # noqa: B023
        opt = optimizer(model)
        for _ in range(4):
            opt.zero_grad()
            z = model(X)
            (z.to_dense() if is_sparse else z).square().mean().backward()
            opt.step()
        ends.append(flat(model))
    torch.testing.assert_close(*ends, rtol=1e-12, atol=1e-12)


@OPTIMIZERS
@pytest.mark.parametrize("inject", [curvature.isotropic(), curvature.exact(), curvature.empirical()], ids=repr)
@pytest.mark.parametrize("sizes", [(8, 1), (1,), (1, 1)], ids=str)
def test_a_squeezed_output_of_one_sample_is_an_output(optimizer: Any, inject: Any, sizes: tuple[int, ...]) -> None:
    """The last batch of an epoch may have one sample, and `squeeze()` leaves no axis: it was taken for a loss."""
    ends = []
    for squeeze in (lambda z: z[:, 0], lambda z: z.squeeze()):
        with seeded(1):
            model = perceptron(squeeze, nn.Linear(4, 1))
        opt = optimizer(model, loss=nn.MSELoss(), inject=inject)
        for step in range(6):
            opt.zero_grad()
            for size in sizes:
                x, y = X[step : step + size], Y[step : step + size, 0]
                (model(x).reshape(-1) - y).square().mean().backward()
            opt.step()
        ends.append(flat(model))
        assert "its loss" not in opt.report()
    torch.testing.assert_close(*ends, rtol=1e-9, atol=1e-12)
