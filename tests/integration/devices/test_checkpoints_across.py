"""Runs that are saved on one device and go on on another."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import seeded
from support.training import closure_of

pytestmark = pytest.mark.fast
MAKERS: dict[str, Callable[[nn.Module], Any]] = {
    "KFAC": KFAC,
    "EKFAC": EKFAC,
    "adaptive": functools.partial(KFAC, adaptive=True),
    **{s: functools.partial(NaturalGradient, solver=s) for s in ("woodbury", "dense", "cg", "diagonal")},
}
TOLERANCE = 1e-10  # of kernels that add up in other orders; the simulated device has the CPU's


def started(name: str, device: str) -> tuple[nn.Module, Any]:
    with seeded(0):
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double().to(device)
    return model, MAKERS[name](model)


def go_on(model: nn.Module, opt: Any, steps: int) -> None:
    with seeded(1):
        x, y = torch.randn(12, 4).double(), torch.randint(3, (12,))
    x, y = (t.to(next(model.parameters()).device) for t in (x, y))
    closure = closure_of(model, opt, F.cross_entropy, x, y)
    for _ in range(steps):
        opt.step(closure)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("places", [(0, "cpu"), ("cpu", 0), (0, 1)], ids=["to the CPU", "from the CPU", "between two"])
def test_a_run_goes_on_elsewhere(name: str, places: tuple[Any, Any], two_devices: tuple[str, str]) -> None:
    """Tensors that are loaded to where they were saved go to the parameters.

    The vectors that a generator draws are those of its device: where these differ, steps are only alike.
    """
    here, there = (place if place == "cpu" else two_devices[place] for place in places)
    model, opt = started(name, here)
    go_on(model, opt, 3)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other, resumed = started(name, there)
    other.load_state_dict(state["model"])
    resumed.load_state_dict(state["opt"])
    assert resumed.steps == 3
    go_on(model, opt, 3)
    go_on(other, resumed, 3)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert q.device == torch.device(there)
        if two_devices[0].startswith("sim"):
            torch.testing.assert_close(q.cpu(), p.cpu(), rtol=TOLERANCE, atol=TOLERANCE)
        assert q.isfinite().all()
    tensors = [t for entry in resumed.state.values() for t in entry.values() if isinstance(t, Tensor) and t.ndim]
    assert all(t.device == torch.device(there) for t in tensors)
