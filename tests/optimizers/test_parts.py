"""Parts of an optimizer on their own: what is counted and solved with, when factors are renewed, and what it tells."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from curvature.kronecker.sides import SketchSide
from curvature.preconditioners import BlockDiagonalCurvature
from curvature.recording import warn_once
from optimizers import EKFAC, KFAC
from optimizers.distributed.processes import Distributed, Team
from optimizers.monitor import Monitor
from optimizers.preconditioner import Preconditioner, Renewal
from optimizers.recording.backward_passes import Passes
from optimizers.recording.model_outputs import OutputScale
from optimizers.recording.recorder import Recorder
from optimizers.schedule import DRIFT, Schedule
from support.running_blocks import columns_of, rows_of
from support.training import task, train, train_by_closure

pytestmark = pytest.mark.fast


def preconditioner(factor_decay: float = 0.9) -> tuple[Preconditioner, Passes]:
    store, passes = BlockDiagonalCurvature(), Passes()
    team = Team(Distributed(), torch.device("cpu"), store)
    known = {"outputs": OutputScale(), "was_empty": True, "has_measured": False, "_loss_scale": None}
    parts = {"listener": SimpleNamespace(problem=""), "loss_backprops": SimpleNamespace(deliver=lambda scale: None)}
    recorder: Any = SimpleNamespace(passes=passes, take=lambda: Recorder.take(recorder), **known, **parts)
    return Preconditioner(store, recorder, Schedule(1, 1), team, Monitor(), factor_decay, "KFAC"), passes


def test_without_a_pass_gradients_are_the_directions(caplog: pytest.LogCaptureFixture) -> None:
    part, _ = preconditioner()
    assert not part.has_nothing_due() and part.has_seen_empty_batches_only()
    part.recorder.was_empty = False
    assert not part.has_seen_empty_batches_only()
    warn_once.cache_clear()
    assert part.renew({}, {}, {}) == Renewal(True)
    assert "KFAC.step: no forward pass" in caplog.text
    gradients = {"weight": torch.randn(2, 3)}
    torch.testing.assert_close(part.solve(gradients, {"weight": torch.zeros(2, 3)}), gradients)


intervals = lambda steps: [b - a for a, b in itertools.pairwise(steps)]


def renewals(schedule: Schedule, steps: int, drift: Callable[[int], float]) -> list[int]:
    """The steps that renew, where each changes the averages of three layers by about as much."""
    found = []
    for step in range(steps):
        if schedule.renews(step):
            found.append(step)
            schedule.note_renewal(step, {"a": [drift(step) / 2], "b": [0.0, drift(step)], "c": [3 * drift(step)]})
    return found


def test_renewals_become_fewer_soon_after_the_start():
    found = renewals(Schedule(None, None), 60, lambda _: DRIFT)
    assert found == [0, 1, 2, 3, 5, 7, 10, *range(14, 39, 4), 43, 48, 54]


def test_curvature_that_rests_is_renewed_every_fifty_steps():
    found = renewals(Schedule(None, None), 600, lambda _: 0.001)
    assert intervals(found)[-3:] == [50] * 3 and len(found) < 35
    every = intervals(found)
    assert all(b <= 1.5 * a + 1 for a, b in itertools.pairwise(every))


def test_blocks_are_inverted_once_they_have_changed():
    """Both sides together, also where one of them is dear."""
    for cost in (1e3, 1e15):
        schedule, costs = Schedule(None, None), [1e3, cost]
        assert schedule.inverts(0, "a", costs) == [True, True]  # there are no inverses yet
        schedule.note_inversion(0, "a", [True, True])
        for _ in range(2):
            assert schedule.inverts(0, "a", costs) == [False, False]
            schedule.note_renewal(0, {"a": [0.6 * DRIFT, 0.6 * DRIFT]})
        assert schedule.inverts(0, "a", costs) == [True, True]
        schedule.note_inversion(0, "a", [True, True])
        assert schedule.inverts(0, "a", costs) == [False, False]


def test_a_dear_side_that_has_not_changed_stays():
    schedule = Schedule(None, None)
    for name, costs in {"dear": [1e3, 1e9], "cheap": [1e3, 1e3]}.items():
        schedule.note_inversion(0, name, [True, True])
        for _ in range(4):
            schedule.note_renewal(0, {name: [0.6 * DRIFT, 0.2 * DRIFT]})
        assert schedule.inverts(0, name, costs) == [True, name == "cheap"]
        schedule.note_inversion(0, name, [True, name == "cheap"])
        assert schedule.inverts(0, name, costs) == [False, False]
    for _ in range(4):  # it has not been forgotten
        schedule.note_renewal(0, {"dear": [0.6 * DRIFT, 0.1 * DRIFT]})
    assert schedule.inverts(0, "dear", [1e3, 1e9]) == [True, True]


def test_blocks_are_inverted_as_often_as_given():
    schedule, found = Schedule(1, 3), []
    for step in range(200, 212):
        assert schedule.renews(step)
        schedule.note_renewal(step, {"a": [0.9, 0.0]})
        if any(due := schedule.inverts(step, "a", [1e3, 1e3])):
            found.append(step)
            assert all(due)
            schedule.note_inversion(step, "a", due)
    assert found == [200, 203, 206, 209]


def test_the_change_of_an_average_is_measured():
    """By the running averages before and after, in the Frobenius norm."""
    model, loss, x, y = task("mlp")
    opt = KFAC(model, factor_every=1)
    train(model, opt, loss, x, y, 2)
    block = opt.store.blocks[0]
    before = rows_of(block), columns_of(block)
    train(model, opt, loss, x[: len(x) // 3], y[: len(y) // 3], 1)
    after = rows_of(block), columns_of(block)
    changes = [float((new - old).norm() / old.norm()) for old, new in zip(before, after, strict=True)]
    # entries off the diagonal of a triangle count once
    assert block.drift.tolist() == pytest.approx(changes, rel=0.05)


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


def test_how_far_a_sketch_has_moved_shows_in_its_diagonal():
    """The same matrix has many sketches. Without a drift a layer of two sketches would never be inverted again."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(2100, 2100), nn.Linear(2100, 2)), torch.randn(8, 2100)
    opt = KFAC(model, factor_every=1)
    before = []
    for size in (1.0, 1.0, 2.0):
        before.append([side.diagonal() for side in opt.store.blocks[0].sides] if opt.store.blocks else [])
        opt.zero_grad()
        model(size * x).square().mean().backward()
        opt.step()
    block = opt.store.blocks[0]
    assert [type(side) for side in block.sides] == [SketchSide, SketchSide]
    moved = [float((s.diagonal() - b).norm() / b.norm()) for s, b in zip(block.sides, before[-1], strict=True)]
    assert block.drift.tolist() == pytest.approx(moved, rel=1e-4) and max(moved) > 0.5
