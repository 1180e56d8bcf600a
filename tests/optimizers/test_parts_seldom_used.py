"""Layers that only some batches use, and layers that are replaced: their curvature is measured, and is theirs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimizers import EKFAC, KFAC, NaturalGradient
from optimizers.schedule import DRIFT, Schedule
from support.cases.case import seeded
from support.combinations import in_pairs, in_turn

EVERY = [KFAC, EKFAC, NaturalGradient, lambda model: NaturalGradient(model, layerwise=True)]

with seeded(0):
    X, Y = torch.randn(32, 6), torch.randint(3, (32,))


def step(model: nn.Module, opt: Any, *args: Any, y: Tensor = Y) -> float:
    opt.zero_grad()
    loss = F.cross_entropy(model(X, *args), y)
    loss.backward()
    opt.step()
    return loss.item()


@pytest.mark.parametrize("period", range(2, 13))
def test_no_period_of_the_loop_hides_a_part_of_the_model(period: int) -> None:
    """After a hundred steps a renewal came every ten steps: of two tasks in turn always at the same."""
    schedule, seen = Schedule(None, None), Counter[int]()
    for k in range(1200):
        if schedule.renews(k):
            schedule.note_renewal(k, {"a": [2 * DRIFT]})
            schedule.note_seen(k, {"a"}, is_whole=False)
            seen[k % period] += k > 200
    usual = 100 / period
    assert len(seen) == period and min(seen.values()) > usual / 3 and 0.8 < sum(seen.values()) / 100 < 1.3


def test_renewals_that_see_all_come_at_regular_distances() -> None:
    found = []
    schedule = Schedule(None, None)
    for k in range(300):
        if schedule.renews(k):
            schedule.note_renewal(k, {"a": [2 * DRIFT]})
            schedule.note_seen(k, {"a"}, is_whole=True)
            found.append(k)
    assert {b - a for a, b in zip(found[-10:], found[-9:], strict=False)} == {10}


def test_a_given_interval_is_kept() -> None:
    schedule = Schedule(4, None, renewed=100)
    schedule.note_seen(100, {"a"}, is_whole=False)
    assert [schedule.renews(k) for k in (103, 104)] == [False, True]


def plain(seed: int, outputs: int) -> nn.Linear:
    with seeded(seed):
        return nn.Linear(8, outputs)


@in_pairs(make=EVERY, outputs=[3, 5, 12], steps=[3, 17, 60])
def test_a_replaced_head_is_trained_with_curvature_of_its_own(make: Any, steps: int, outputs: int) -> None:
    """It has the name of the old one, whose blocks and states have another shape: these were used, and raised."""
    with seeded(2):
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), plain(3, 3))
    opt = make(model)
    for _ in range(steps):
        step(model, opt)
    model[2] = plain(4, outputs)
    opt.add_param_group({"params": model[2].parameters()})
    losses = [step(model, opt) for _ in range(20)]  # the least movement has shrunk: 0.44 to 2 lower than at first
    assert losses[-1] < losses[0] - 0.2
    assert opt.report().count("2.weight") == 1
    opt.load_state_dict(opt.state_dict())
    step(model, opt)


@in_turn(optimizer=[KFAC, EKFAC], steps=[3, 17, 60])
def test_a_layer_may_grow_in_place(optimizer: type[KFAC], steps: int) -> None:
    """As in Net2Net: the same parameters have more entries."""
    with seeded(2):
        model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    opt = optimizer(model)
    for _ in range(steps):
        step(model, opt)
    opt.zero_grad()
    model[0].weight.data = torch.cat([model[0].weight.data] * 2)
    model[0].bias.data = torch.cat([model[0].bias.data] * 2)
    model[2].weight.data = torch.cat([model[2].weight.data] * 2, 1) / 2
    losses = [step(model, opt, y=(Y + 1) % 3) for _ in range(30)]
    assert losses[-1] < losses[0] - 0.3
    assert dict(model.named_parameters())["0.weight"].shape == (8, 6) and "8x8" in opt.report()
