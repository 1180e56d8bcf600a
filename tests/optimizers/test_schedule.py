"""When factors are renewed and blocks inverted, and what an optimizer tells of itself."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pytest
import torch
from torch import nn

import curvature.plots
from optimizers import EKFAC, KFAC
from optimizers.schedule import Schedule
from support.training import TASKS, closure_of, task, train, train_by_closure

pytestmark = pytest.mark.fast


def test_intervals_grow_to_those_given():
    schedule = Schedule(factor_every=4, decompose_every=4)
    renewed = [step for step in range(60) if schedule.renews(step)]
    assert renewed[:16] == [*range(10), 10, 12, 14, 16, 18, 21] and renewed[-3:] == [48, 52, 56]


@pytest.mark.parametrize("every", [1, 3, 10])
def test_every_block_has_its_turn_and_no_step_all_work(every: int):
    schedule = Schedule(10, every)
    costs = [5e9, 1e9, 1e9, 3e9, 2e9]
    turns = torch.tensor([schedule.inverts(step, costs) for step in range(200, 200 + every)]).double()
    assert torch.equal(turns.sum(0), torch.ones(5).double())
    work = turns @ torch.tensor(costs).double()
    assert work.max() <= sum(costs) / min(every, 3) + max(costs)


def test_little_work_is_done_at_once():
    """Many calls for small blocks cost more than one for all."""
    schedule = Schedule(10, 10)
    for step in (0, 1, 100):
        assert all(schedule.inverts(step, [1e6] * 50))
    assert not any(schedule.inverts(101, [1e6] * 50))
    turns = [sum(schedule.inverts(step, [1e6] * 250)) for step in range(100, 110)]
    assert turns == [100, 0, 0, 100, 0, 0, 50, 0, 0, 0]


def test_most_steps_of_an_interval_invert_nothing():
    """At each turn the host waits for the device: there are three at most."""
    schedule = Schedule(10, 20)
    turns = [sum(schedule.inverts(step, [5e9] * 24)) for step in range(400, 420)]
    assert sum(turns) == 24 and max(turns) == 8 and turns.count(0) == 17


def test_large_blocks_wait_for_some_steps_at_first():
    """One after the other. Small ones have their turn at every step, and later all take turns."""
    schedule, costs = Schedule(10, 10), [1e3, 1e8, 1e8, 1e8, 1e3]
    for step in range(9):
        assert schedule.inverts(step, costs) == [True, *(step % 3 == k for k in range(3)), True]
    turns = torch.tensor([schedule.inverts(step, costs) for step in range(100, 110)])
    assert turns.sum(0).tolist() == [1] * 5 and turns.sum(1).max() <= 2


@pytest.mark.parametrize("optimizer", [KFAC, EKFAC])
@pytest.mark.parametrize("adaptive", [False, True])
def test_stats_and_summary(optimizer: type[KFAC], adaptive: bool):
    model, loss, x, y = task("cnn")
    opt = optimizer(model, adaptive=adaptive)
    assert opt.stats()["steps"] == 0 and opt.summary().startswith("step 0")
    (train_by_closure if adaptive else train)(model, opt, loss, x, y, 4)
    stats = opt.stats()
    assert stats["steps"] == 4 and stats["skipped"] == stats["failures"] == 0 and stats["step_size"] is not None
    assert set(stats["conditions"]) == {"0.weight", "1.weight", "1.bias", "4.weight", "5.weight", "5.bias", "9.weight"}
    assert all(1 <= c < 1e9 for c in stats["conditions"].values())
    parts = {"capture", "factors", "inverses", "direction"} | ({"closure", "model"} if adaptive else set())
    assert set(stats["seconds_in"]) == parts and all(s >= 0 for s in stats["seconds_in"].values())
    assert ("damping" in stats and "ratio" in stats) == adaptive
    assert "step 4" in opt.summary() and "0 skipped" in opt.summary() and "\n" not in opt.summary()


def test_history_is_what_the_picture_takes():
    model, loss, x, y = task("mlp")
    opt = KFAC(model, adaptive=True)
    values = [opt.step(closure_of(model, opt, loss, x, y)).item() for _ in range(5)]
    history = opt.history
    assert [h["loss"] for h in history] == values and [h["step"] for h in history] == list(range(5))
    assert all(h["seconds"] > 0 and h["accepted"] for h in history)
    axes = curvature.plots.training(history)
    assert len(axes) == 5
    plt.close(axes[0].figure)


@pytest.mark.parametrize("name", TASKS)
def test_memory_in_the_report_is_that_of_the_state(name: str):
    """Before training: after one forward pass."""
    model, loss, x, y = task(name)
    opt = KFAC(model)
    model(x)
    opt._context(None).renew({})
    expected = sum(b.bytes for b in opt.store.blocks) + 2 * 4 * sum(p.numel() for p in model.parameters())
    assert float(opt.report().split("in all")[1].split()[0]) == pytest.approx(expected / 1e6, abs=0.006)


def test_damping_of_a_parameter_group_is_its_own():
    """A number is exact damping of the layer's block, whatever the others have."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()  # the moves are tiny
    opt = KFAC(model, damping=1e6)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    before = model[0].weight.detach().clone()
    model(x).square().sum().backward()
    gradient = model[0].weight.grad.clone()
    opt.step()
    moved = (model[0].weight.detach() - before) / gradient
    torch.testing.assert_close(
        moved, moved.mean().expand_as(moved), rtol=1e-3, atol=0
    )  # damping rules: a scaled gradient


@pytest.mark.parametrize("kind", [KFAC, EKFAC])
def test_memory_is_known_before_training(kind: type[KFAC]):
    """After one forward pass: at least what is kept later, and that exactly where no side is a sketch."""
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 20), nn.Linear(20, 3000)
    )
    opt = kind(model)
    x = torch.randn(8, 2, 8, 8)
    out = model(x)
    expected = {block.names[0]: block.expected_bytes for block in opt.store.blocks}
    report = opt.report()
    out.square().mean().backward()
    opt.step()
    if kind is EKFAC:  # values are known from the second step on
        model(x).square().mean().backward()
        opt.step()
    for block in opt.store.blocks:
        assert block.bytes <= expected[block.names[0]], block.names
        assert block.names[0] == "4.weight" or expected[block.names[0]] <= 1.01 * block.bytes + 100, block.names
    momenta = 8 * sum(p.numel() for p in model.parameters())
    in_all = float(report.split("in all")[1].split()[0])
    assert in_all == pytest.approx((sum(expected.values()) + momenta) / 1e6, abs=0.01)
