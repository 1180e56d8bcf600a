"""How often the host waits for the device in the plain loop, counted by the simulated one."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import curvature
from optimizers import EKFAC, KFAC, NaturalGradient
from support.training import task

pytestmark = pytest.mark.fast
STEPS = 40
# Waits in the first 40 steps with what holds now; a step that neither renews nor inverts has none.
BOUNDS = {("KFAC", "mlp"): 220, ("KFAC", "cnn"): 280, ("EKFAC", "mlp"): 220, ("EKFAC", "cnn"): 280}


@pytest.fixture
def simdev(device: str) -> Any:
    if device != "sim":
        pytest.skip("the simulated device counts waits: make test-device")
    return importlib.import_module("support.simulated_device.simdev")


@pytest.mark.parametrize(("kind", "name"), BOUNDS)
def test_waits_of_the_plain_loop(kind: str, name: str, simdev: Any, device: str) -> None:
    model, _, x, y = task(name, device)
    opt, total, ordinary = {"KFAC": KFAC, "EKFAC": EKFAC}[kind](model), 0, 0
    for _ in range(STEPS):
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with simdev.syncs() as found:
            opt.step()
        entry = opt.monitor.entries[-1]
        total += found.count
        if not entry["renewed"] and not entry["inverted"]:
            ordinary += 1
            assert not found.count, found.places("/optimizers/", "/curvature/")
    assert ordinary and total <= BOUNDS[kind, name], total


@pytest.mark.parametrize(
    ("kind", "options", "bound"),
    [
        (KFAC, {"adaptive": True}, 5),  # renewals among them
        (NaturalGradient, {"solver": "cg"}, 13),  # four looks at the residuals, renewals of the preconditioner
        (NaturalGradient, {}, 4),
    ],
    ids=["adaptive", "conjugate gradients", "natural gradient"],
)
def test_waits_where_steps_must_look(kind: Any, options: dict, bound: float, simdev: Any, device: str) -> None:
    """On average, after the first steps, which invert at each."""
    model, _, x, y = task("mlp", device)
    opt, counts = kind(model, **options), []

    def closure() -> Any:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(20):
        closed = [closure] if options.get("adaptive") else []
        if not closed:
            closure()
        with simdev.syncs() as found:
            opt.step(*closed)
        counts.append(found.count)
    assert sum(counts[6:]) <= bound * len(counts[6:]), counts


@pytest.mark.parametrize(("kind", "bound"), [(KFAC, 24), (NaturalGradient, 24)])
def test_waits_of_steps_on_residuals(kind: Any, bound: float, simdev: Any, device: str) -> None:
    """Losses are those of the CPU, although a line search tries several points before it reads their losses."""

    def run(where: str) -> tuple[list[float], list[int]]:
        torch.manual_seed(0)
        field = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1)).double().to(where)
        points = torch.rand(50, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(where)
        opt, losses, counts = kind(field), [], []
        for _ in range(12):
            with simdev.syncs() as found:
                loss = opt.step(lambda: curvature.laplacian(field, points)[2][:, 0] - 1)
            losses.append(float(loss))
            counts.append(found.count)
        return losses, counts

    losses, counts = run(device)
    assert sum(counts[6:]) <= bound * len(counts[6:]), counts
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(run("cpu")[0]), rtol=1e-3, atol=0)
