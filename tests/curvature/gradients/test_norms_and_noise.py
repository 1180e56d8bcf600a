"""Norms by parameter and the gradient noise scale, against loops over samples."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import curvature
from support.cases.case import seeded
from support.comparisons import matches

LOSS = nn.CrossEntropyLoss()


def problem(count: int) -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        model = nn.Sequential(nn.Conv1d(2, 3, 3), nn.GroupNorm(1, 3), nn.Tanh(), nn.Flatten(), nn.Linear(9, 4))
        return model.double(), torch.randn(count, 2, 5).double(), torch.randint(4, (count,))


def rows(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    named = dict(model.named_parameters())
    found = [torch.autograd.grad(LOSS(model(x[n : n + 1]), y[n : n + 1]), [*named.values()]) for n in range(len(y))]
    return dict(zip(named, map(torch.stack, zip(*found, strict=True)), strict=True))


def test_norms_by_parameter():
    model, x, y = problem(5)
    found = curvature.per_sample_norms_by_parameter(model, LOSS, x, y)
    expected = rows(model, x, y)
    assert list(found) == list(expected)
    for name, g in expected.items():
        matches(found[name], g.flatten(1).norm(dim=1))


@pytest.mark.parametrize("loss", [LOSS, nn.CrossEntropyLoss(reduction="sum")], ids=lambda loss: loss.reduction)
def test_the_noise_scale(loss: nn.Module):
    """Uneven batches are one; a sum or a mean, each sample's gradient is its own."""
    model, x, y = problem(23)
    flat = torch.cat([g.flatten(1) for g in rows(model, x, y).values()], 1)
    trace = flat.var(0).sum()
    norm = flat.mean(0).square().sum() - trace / len(flat)
    loader = DataLoader(TensorDataset(x, y), batch_size=5)
    for data in ((x, y), loader):
        found = curvature.gradient_noise_scale(model, loss, data)
        assert math.isclose(found.trace, trace, rel_tol=1e-10)
        assert math.isclose(found.squared_norm, norm, rel_tol=1e-10)
        assert math.isclose(found.value, trace / norm, rel_tol=1e-10)


def test_its_parts_have_no_bias():
    """Over all pairs of a population, drawn with replacement."""
    model, x, y = problem(6)
    flat = torch.cat([g.flatten(1) for g in rows(model, x, y).values()], 1)
    pairs = [torch.tensor([a, b]) for a in range(6) for b in range(6)]
    found = [curvature.gradient_noise_scale(model, LOSS, (x[pair], y[pair])) for pair in pairs]
    matches(torch.tensor([f.trace for f in found]).double().mean(), flat.var(0, correction=0).sum(), 1e-6)
    matches(torch.tensor([f.squared_norm for f in found]).double().mean(), flat.mean(0).square().sum(), 1e-6)
    assert any(f.value == math.inf for f in found)


def test_one_sample_has_no_covariance():
    model, x, y = problem(1)
    with pytest.raises(ValueError, match="two samples at least, found 1"):
        curvature.gradient_noise_scale(model, LOSS, (x, y))
    with pytest.raises(TypeError, match="expected a pair"):
        curvature.gradient_noise_scale(model, LOSS, x)
