"""Batches that are not finite, or that say nothing, for a long time: what follows is learnt as by SGD."""

from __future__ import annotations

from statistics import fmean, geometric_mean

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimizers import EKFAC, KFAC
from support.cases.case import seeded
from support.training import Loss, train

OPTIMIZERS = pytest.mark.parametrize("optimizer", [KFAC, EKFAC], ids=lambda o: o.__name__)

with seeded(0):
    X = torch.randn(128, 8)
    Y = (X @ torch.randn(8, 3)).argmax(1)


def network(seed: int = 1) -> nn.Sequential:
    with seeded(seed):
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def usual(model: nn.Module, opt: torch.optim.Optimizer, steps: int) -> list[float]:
    return train(model, opt, F.cross_entropy, X, Y, steps)


@OPTIMIZERS
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_many_bad_batches_in_a_row_are_as_two(optimizer: type[KFAC], bad: float) -> None:
    """The second undoes the last step; at each of the others the step size shrank, to zero in the end."""
    ends = []
    for count in (2, 60):
        model = network()
        opt = optimizer(model)
        usual(model, opt, 12)
        train(model, opt, lambda output, y: F.cross_entropy(output, y) * bad, X, Y, count)
        assert opt.skipped == count
        usual(model, opt, 12)
        ends.append([opt.stats()["overshoots"], opt.history[-1]["step_size"], *model.parameters()])
    assert ends[0][:2] == ends[1][:2]
    assert all(map(torch.equal, ends[0][2:], ends[1][2:]))


def silence(output: Tensor, y: Tensor) -> Tensor:
    return output.sum() * 0


def one_class(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output, torch.zeros_like(y))


@OPTIMIZERS
@pytest.mark.parametrize("pause", [silence, one_class], ids=lambda f: f.__name__)
def test_a_signal_after_a_long_pause_is_learnt(optimizer: type[KFAC], pause: Loss) -> None:
    """Gradients were clipped to twice their mean, which follows by 3 % a step: no loss fell for thousands of steps.

    Rounding decides single runs, whose pause is at a loss near zero: the geometric mean of several counts.
    """
    ends = []
    for make in (optimizer, lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)):
        found = []
        for seed in range(1, 2 if pause is silence else 6):
            model = network(seed)
            opt = make(model)
            usual(model, opt, 12)
            train(model, opt, pause, X, Y, 800)
            found.append(fmean(usual(model, opt, 80)[-5:]))
        ends.append(geometric_mean(found))
    assert ends[0] < ends[1]


def test_a_run_of_long_gradients_that_is_no_new_scale_is_clipped() -> None:
    """Two in a row, a thousand times as long as usual, move the model as much as two of twice the usual length."""
    ends = []
    for factor in (1e3, 1e6):
        model = network().double()
        opt = KFAC(model)
        train(model, opt, F.cross_entropy, X.double(), Y, 12)
        train(model, opt, lambda output, y, k=factor: F.cross_entropy(output, y) * k, X.double(), Y, 2)
        ends.append([p.detach() for p in model.parameters()])
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
