"""Adaptive steps on batches that are too small for them: the plain step takes over, and says so."""

from __future__ import annotations

import copy
import itertools
import logging
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import seeded
from support.training import ORDERS, assert_same, closure_of, copied, data_order, digits, draws, task, train_by_closure

OPTIMIZERS: dict[str, Callable[..., Any]] = {"KFAC": KFAC, "EKFAC": EKFAC, "NaturalGradient": NaturalGradient}


def batches(size: int, count: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    x, y = digits()
    for chosen in itertools.islice(draws(len(x), size, seed), count):
        yield x[chosen].flatten(1), y[chosen]


def perceptron() -> nn.Module:
    with seeded(0):
        return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def train(opt: Any, model: nn.Module, size: int, count: int, seed: int = 0) -> None:
    for x, y in batches(size, count, seed):
        opt.step(closure_of(model, opt, F.cross_entropy, x, y))


def whole_loss(model: nn.Module) -> float:
    x, y = digits()
    with torch.no_grad():
        return F.cross_entropy(model(x.flatten(1)), y).item()


def noisy_losses(model: nn.Module, opt: Any, count: int) -> None:
    """Steps on labels at random, none of whose progress the next batch confirms."""
    for k, (x, y) in enumerate(batches(16, count)):
        drawn = torch.randint(10, y.shape, generator=data_order(k))
        opt.step(closure_of(model, opt, F.cross_entropy, x, drawn))


# -- when


@pytest.mark.training_run
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_small_batches_are_left_to_the_plain_step(optimizer: str, caplog: pytest.LogCaptureFixture):
    model = perceptron()
    opt = OPTIMIZERS[optimizer](model, adaptive=True)  # of five orders KFAC went on for 5 to 6 steps, the last 3 to 10
    assert opt.stats()["plain_from"] is None and "adaptive" not in " ".join(opt.report().split())
    with caplog.at_level(logging.WARNING, "optimizers"):
        train(opt, model, 32, 40)
    start = opt.stats()["plain_from"]
    assert 2 < start < 30
    said = [r.getMessage() for r in caplog.records if "plain steps" in r.getMessage()]
    assert len(said) == 1 and f"step {start} on" in said[0] and said[0].startswith(f"{optimizer}: adaptive=True")
    assert said[0].removeprefix(f"{optimizer}: ") in " ".join(opt.report().split())
    ratios = [entry["ratio"] is not None for entry in opt.history]
    assert ratios == [True] * start + [False] * (40 - start)
    assert opt.steps == 40 and all(math.isfinite(entry["loss"]) for entry in opt.history)
    assert "step_size" in opt.summary() and opt.stats()["damping"] is None


@pytest.mark.training_run
@pytest.mark.parametrize(("size", "most"), [(32, 0.2), (128, 0.03)])
def test_small_batches_get_as_far_as_with_plain_steps(size: int, most: float):
    """About, by the median of some orders of the data: where one run ends is chance.

    Of 2.3 at the start plain steps leave 0.2 with batches of 32, adaptive ones 0.1; with batches of 128 both 0.014.
    SGD(0.1, momentum=0.9) leaves 0.28 and 0.21.
    """
    losses: dict[bool, list[float]] = {False: [], True: []}
    for adaptive, seed in itertools.product(losses, ORDERS):
        model = perceptron()
        opt = KFAC(model, adaptive=adaptive)
        train(opt, model, size, 60, seed)
        losses[adaptive].append(whole_loss(model))
    plain, found = map(statistics.median, losses.values())
    assert found < 2 * plain and found < most, losses


@pytest.mark.training_run
@pytest.mark.parametrize("name", ["mlp", "cnn", "vit", "lstm"])
def test_full_batches_keep_adaptive_steps(name: str):
    """What one step brings the next one sees, to the last digit; also with BatchNorm."""
    model, loss, x, y = task(name)
    opt = KFAC(model, adaptive=True)
    train_by_closure(model, opt, loss, x, y, 15)
    assert opt.stats()["plain_from"] is None
    assert all(entry["confirmed"] == pytest.approx(1.0, abs=1e-3) for entry in opt.history)


def test_looking_back_leaves_no_trace():
    """Parameters, buffers, random numbers and gradients at the second step are those of its closure alone."""
    model, loss, x, y = task("cnn")
    opt = KFAC(model, adaptive=True)
    opt.step(closure_of(model, opt, loss, x, y))
    other = copy.deepcopy(model)
    opt.param_groups[0]["lr"] = 0.0  # look, but do not move
    opt.step(closure_of(model, opt, loss, x, y))
    loss(other(x), y).backward()
    assert_same(copied(model), copied(other))


# -- afterwards


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("steps", [1, 12])
def test_checkpoints_and_copies_go_on_alike(steps: int, optimizer: str):
    """Before the change and after it."""
    model = perceptron()
    opt = OPTIMIZERS[optimizer](model, adaptive=True)
    noisy_losses(model, opt, steps)
    assert (opt.stats()["plain_from"] is None) == (steps == 1)
    again, copied_opt = copy.deepcopy((model, opt))
    other = perceptron()
    other.load_state_dict(model.state_dict())
    loaded = OPTIMIZERS[optimizer](other, adaptive=True)
    loaded.load_state_dict(opt.state_dict())
    for own, mine in ((model, opt), (again, copied_opt), (other, loaded)):
        train(mine, own, 32, 14, seed=1)
    assert_same(copied(model), copied(other))
    assert_same(copied(model), copied(again))
    assert opt.stats()["plain_from"] == loaded.stats()["plain_from"] == copied_opt.stats()["plain_from"] is not None
    assert opt.stats()["factor_every"] == copied_opt.stats()["factor_every"]
    for own in (opt, copied_opt, loaded):  # the plain rule counts its own steps
        assert own.rule.then.first_step == own.stats()["plain_from"] <= own.steps
