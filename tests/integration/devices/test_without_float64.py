"""Devices that have no double precision, as MPS: all is in single precision there."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import curvature
from curvature.linalg.devices import widest
from optimizers import EKFAC, KFAC, NaturalGradient
from support.training import closure_of, task

pytestmark = pytest.mark.fast
LOSS = nn.CrossEntropyLoss()


@pytest.fixture
def single(device: str) -> Iterator[str]:
    if device != "sim":
        pytest.skip("the simulated device can do without float64: make test-device")
    simdev = importlib.import_module("support.simulated_device.simdev")
    widest.cache_clear()
    with simdev.without_float64():
        yield device
    widest.cache_clear()


def test_the_device_refuses_float64(single: str) -> None:
    for make in (lambda: torch.ones(2, device=single).double(), lambda: torch.zeros(2, dtype=torch.float64).to(single)):
        with pytest.raises(TypeError, match="float64"):
            make()


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "KFAC": KFAC,
    "KFAC damped": functools.partial(KFAC, damping=0.1, weight_decay=0.1),
    "KFAC adaptive": functools.partial(KFAC, adaptive=True),
    "EKFAC": EKFAC,
    "line search": functools.partial(NaturalGradient, line_search=True),
    **{s: functools.partial(NaturalGradient, solver=s) for s in ("woodbury", "dense", "cg", "diagonal")},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, single: str) -> None:
    model, loss, x, y = task("mlp", single, n=16)
    if name == "dense":
        model, x = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 10)).to(single), x[:, 0, 0]
    opt = OPTIMIZERS[name](model)
    closure = closure_of(model, opt, loss, x, y)
    losses = []
    for _ in range(6):
        losses.append(float(opt.step(closure)))
    assert losses[-1] < losses[0] and opt.stats()["failures"] == 0


def test_residuals(single: str) -> None:
    model, _, x, y = task("mlp", single, n=8)
    for opt in (KFAC(model), NaturalGradient(model)):
        losses = [float(opt.step(lambda: (model(x) - F.one_hot(y, 10)).flatten() / 8)) for _ in range(3)]
        assert losses[-1] < losses[0]


BUILDERS = "fisher", "gauss_newton", "empirical_fisher", "hessian", "kfac", "ekfac", "fisher_blocks"


@pytest.mark.parametrize("name", BUILDERS)
def test_matrices(name: str, single: str) -> None:
    model, _, x, y = task("mlp", single, n=8)
    plain, loss, here, there = task("mlp", n=8)
    found = getattr(curvature, name)(model, LOSS, (x, y))
    expected = getattr(curvature, name)(plain, LOSS, (here, there))
    v = torch.randn(found.shape[0], 2, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close((found @ v.to(single)).cpu(), expected @ v, rtol=1e-3, atol=1e-5)
    if name != "hessian":
        torch.testing.assert_close(found.solve(v.to(single), 0.1).cpu(), expected.solve(v, 0.1), rtol=1e-2, atol=1e-4)
    torch.testing.assert_close(found.diagonal().cpu(), expected.diagonal(), rtol=1e-3, atol=1e-5)


def test_gradients_and_layouts(single: str) -> None:
    model, _, x, y = task("cnn", single, n=8)
    model.eval()
    curvature.check_gradients(model, LOSS, x, y)
    diagonal = curvature.fisher_diagonal(model, LOSS, (x, y))
    assert all(d.isfinite().all() for d in diagonal.values())
    with curvature.capture(model) as tape:
        output = model(x)
    assert all(layout is not None for layout in curvature.sample_layouts(tape, output))


def test_a_wide_last_layer(single: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 200)).to(single)
    data = torch.randn(6, 4).to(single), torch.randint(200, (6,)).to(single)
    found = curvature.fisher_diagonal(model, LOSS, data)
    expected = curvature.fisher_diagonal(model.cpu(), LOSS, (data[0].cpu(), data[1].cpu()))
    for name, d in expected.items():
        torch.testing.assert_close(found[name].cpu(), d, rtol=1e-3, atol=1e-6)
