"""A short run with many faults ends where the run without them does, and nothing is ever not finite."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from optimizers import KFAC
from support.training import task

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from faults import FAULTS, MODELS, OPTIMIZERS, not_finite, plain, run


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_with_faults(name: str):
    """5 % of a loss with label smoothing, at the rate of 50 faults in 2,000 steps, which `benchmarks/faults.py` has."""
    losses = []
    for faults in (0, 5):
        torch.manual_seed(0)
        found = run(OPTIMIZERS[name], MODELS["mlp"](), 180, faults, 0)
        assert not found["bad"]
        losses.append(found["loss"])
    assert losses[1] < 1.05 * losses[0], losses


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize("steps", [0, 21])
def test_each_fault_alone_leaves_all_finite(kind: str, steps: int):
    """Also as the very first batch."""
    torch.manual_seed(0)
    model, loss, x, y = task("mlp")
    opt = KFAC(model)
    for step in range(steps + 8):
        if step == steps:
            FAULTS[kind](model, opt, (x, y))
        else:
            plain(model, opt, (x, y))
        assert not not_finite(model, opt)
    assert loss(model(x), y) < 2.3 + 0.1 and opt.steps + opt.skipped >= steps + 7
