"""A schedule may set rates of another optimizer's, which is told once; a warm-up from next to nothing is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from curvature.recording import warn_once
from optimizers import EKFAC, KFAC, NaturalGradient


class Hand:
    def __init__(self, opt: torch.optim.Optimizer) -> None:
        self.opt, self.number = opt, 0
        self.step()

    def step(self) -> None:
        self.number += 1
        self.opt.param_groups[0]["lr"] = self.number / 100


SCHEDULES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "one cycle": (lambda opt: lr_scheduler.OneCycleLR(opt, 0.01, total_steps=20), True),
    "cyclic": (lambda opt: lr_scheduler.CyclicLR(opt, 0.01, 0.02, cycle_momentum=False), True),
    "one cycle up to 1": (lambda opt: lr_scheduler.OneCycleLR(opt, 1.0, total_steps=20, cycle_momentum=False), False),
    "warm-up": (lambda opt: lr_scheduler.LambdaLR(opt, lambda k: (k + 1) / 1000), False),
    "to zero": (lambda opt: lr_scheduler.LambdaLR(opt, lambda k: 1 - k / 4), False),
    "by hand": (lambda opt: Hand(opt), False),
    "annealed": (lambda opt: lr_scheduler.ExponentialLR(opt, 0.01), False),
}


@pytest.mark.parametrize("optimizer", [KFAC, EKFAC, NaturalGradient], ids=lambda o: o.__name__)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_largest_rate_far_below_one_is_told(optimizer: Any, name: str, caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    make, is_told = SCHEDULES[name]
    model = nn.Linear(3, 2)
    opt = optimizer(model, momentum=0.5)  # schedules of one cycle set it, too
    schedule = make(opt)
    for _ in range(4):
        opt.zero_grad()
        model(torch.ones(4, 3)).square().mean().backward()
        opt.step()
        schedule.step()
    said = [record.getMessage() for record in caplog.records if "multiplies the step" in record.getMessage()]
    assert len(said) == is_told
    assert not is_told or "lr=0.01 " in said[0]
