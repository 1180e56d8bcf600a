"""Random numbers of an accelerator are the model's own, as those of the CPU are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from optimizers import KFAC, NaturalGradient
from support.cases.case import seeded
from support.training import closure_of

pytestmark = pytest.mark.fast
LOSS = nn.CrossEntropyLoss()
MAKERS: dict[str, Callable[[nn.Module], Any]] = {
    "adaptive": functools.partial(KFAC, adaptive=True),
    "line search": functools.partial(NaturalGradient, line_search=True),
    "plain": KFAC,
}


def problem(device: str, drop: float = 0.5) -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Dropout(drop), nn.Linear(32, 3))
        x, y = torch.randn(32, 6), torch.randint(3, (32,))
    return model.to(device), x.to(device), y.to(device)


def run(maker: Callable[[nn.Module], Any], device: str, steps: int = 5) -> list[float]:
    model, x, y = problem(device)
    opt = maker(model)
    closure = closure_of(model, opt, F.cross_entropy, x, y)
    with seeded(3):
        found = []
        for _ in range(steps):
            loss = opt.step(closure) if opt.rule.needs_closure else closure()
            if not opt.rule.needs_closure:
                opt.step()
            found.append(float(loss))
        found.append(float(torch.rand((), device=device)))  # where the random numbers are now
    return found


@pytest.mark.parametrize("name", MAKERS)
def test_dropout_is_that_of_the_same_run_on_the_cpu(name: str, device: str) -> None:
    """Each loss is evaluated with one mask, whatever is evaluated of it beside. (The simulated device and the CPU draw
    the same numbers.)"""
    if device == "cuda":
        pytest.skip("CUDA's random numbers are not the CPU's")
    found = run(MAKERS[name], device)
    assert found == pytest.approx(run(MAKERS[name], "cpu"), rel=1e-3)


@pytest.mark.parametrize("which", [0, 1])
def test_nothing_public_moves_them(which: int, two_devices: tuple[str, str]) -> None:
    model, x, y = problem(two_devices[which])
    module = torch.get_device_module(two_devices[which])
    generator = torch.Generator(two_devices[which]).manual_seed(0)
    before = module.get_rng_state(two_devices[which])
    curvature.per_sample_gradients(model, LOSS, x, y)
    curvature.fisher_diagonal(model, LOSS, (x, y), inject=curvature.sampled(), generator=generator)
    curvature.laplacian(model, x)
    assert torch.equal(module.get_rng_state(two_devices[which]), before)
    with pytest.raises(ValueError, match="random numbers"):
        curvature.check_gradients(model, LOSS, x, y)
