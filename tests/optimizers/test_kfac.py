"""KFAC and EKFAC in place of SGD: in training loops that stay as they are."""

from __future__ import annotations

import functools
import itertools
import math
import statistics

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import curvature
from curvature.preconditioners.block_diagonal import MAX_EIGEN_SIDE
from optimizers import EKFAC, KFAC
from support.cases.case import Raw, seeded, token_loss
from support.cases.shared import Doubled
from support.combinations import in_turn
from support.training import (
    ORDERS,
    TASKS,
    closure_of,
    digits,
    draws,
    mlp,
    task,
    train,
)


@pytest.mark.training_run
@in_turn(optimizer=[KFAC, EKFAC], name=TASKS)
def test_lowers_the_loss(name: str, optimizer: type[KFAC], device):
    model, loss, x, y = task(name, device)
    before = {k: p.detach().clone() for k, p in model.named_parameters()}
    with seeded(1):
        values = train(model, optimizer(model), loss, x, y, 25)
    assert all(map(math.isfinite, values)) and sum(values[-3:]) / 3 < 0.8 * values[0], values
    moved = {k: not torch.equal(p, before[k]) for k, p in model.named_parameters() if p.grad is not None}
    assert all(moved.values()), moved


def test_report_says_what_it_cannot_look_into():
    model = Raw(lambda m, x: Doubled.apply(m.layer(x), m.scale), layer=nn.Linear(4, 3), scale=(3,))
    opt = KFAC(model)
    model(torch.randn(6, 4))
    assert "torch does not show what uses it (an autograd.Function or the like)" in opt.report()


@pytest.mark.fast
def test_a_large_side_has_no_eigenbasis():
    """The side of an embedding's rows is a diagonal, which is its own."""
    model = torch.nn.Sequential(
        torch.nn.Embedding(MAX_EIGEN_SIDE + 1, 3),
        torch.nn.Linear(3, MAX_EIGEN_SIDE),
        torch.nn.Tanh(),
        torch.nn.Linear(MAX_EIGEN_SIDE, 2),
    )
    opt = EKFAC(model)
    model(torch.arange(8))
    kinds = {block.names[0]: (block.structure, block.reason) for block in opt.store.blocks}
    fine, large = ("eigen", ""), ("kronecker", "too large for an eigenbasis; Kronecker factors are used")
    assert kinds == {"0.weight": fine, "1.weight": fine, "3.weight": large}
    assert large[1] in opt.report()


@pytest.mark.fast
def test_the_first_squares_reach_the_step_where_factors_rest():
    """One batch again and again, and parameters that stay: nothing changes but that squares are known."""
    model, loss, x, y = task("mlp")
    opt = EKFAC(model, inject=curvature.empirical(), loss=loss, lr=1e-30)
    train(model, opt, loss, x, y, 2)
    for block in opt.store.blocks:
        by_factors = block.row_values[:, :, None] * block.column_values[:, None]
        assert block.seen == 1 and (block.values - by_factors).norm() > 0.01 * by_factors.norm()
        inverted, stays = block.inverse.values, block.inverse
        block.invert([block], 0.05, None, {})
        torch.testing.assert_close(inverted, block.inverse.values, rtol=1e-4, atol=0.0)
        block.inverse = stays
    train(model, opt, loss, x, y, 2)
    assert all(block.inverse is not None and not block.is_outdated for block in opt.store.blocks)
    assert set(opt.preconditioner.schedule.inverted.values()) == {1}


@pytest.mark.training_run
@pytest.mark.parametrize("optimizer, adaptive", [(KFAC, False), (EKFAC, True)])
def test_batch_size_and_reduction_change_little(optimizer: type[KFAC], adaptive: bool):
    """The same settings, batches of 64 and of 1,024, means and sums: losses over all data after 40 steps are alike.

    The median of orders for small batches: where one run ends is chance, from 0.07 to 0.14.
    """
    means = [trained_on_batches(optimizer, adaptive, 64, "mean", seed) for seed in ORDERS]
    large = [trained_on_batches(optimizer, adaptive, 1024, reduction, 0) for reduction in ("mean", "sum")]
    # 2.3 at the start; SGD(0.1, momentum=0.9) leaves 0.34, and 0.32 with large batches
    assert statistics.median(means) < 0.2 and max(large) < 0.05, (means, large)
    assert trained_on_batches(optimizer, adaptive, 64, "sum", 0) == pytest.approx(means[0], rel=0.05)
    assert large[1] == pytest.approx(large[0], rel=0.05)


def trained_on_batches(optimizer: type[KFAC], adaptive: bool, size: int, reduction: str, seed: int) -> float:
    """In double precision, in which means and sums go the same way for longer."""
    x, y = digits()
    x = x.double()
    with seeded(seed):
        model = mlp().double()
        opt = optimizer(model, adaptive=adaptive, seed=seed)
        loss = functools.partial(F.cross_entropy, reduction=reduction)
        for rows in itertools.islice(draws(len(x), size, seed), 40):
            opt.step(closure_of(model, opt, loss, x[rows], y[rows]))
    return F.cross_entropy(model(x), y).item()


@pytest.mark.parametrize("samples", [4, 16])
def test_steps_do_not_depend_on_the_basis_of_a_null_space(samples: int) -> None:
    """Factors of fewer tokens than inputs have one, in which rounding alone decides on the eigenvectors."""
    ends = []
    for noise in (0.0, 1e-15):
        with seeded(0):
            model = nn.Sequential(nn.Embedding(11, 32), nn.Linear(32, 96), nn.Tanh(), nn.Linear(96, 11)).double()
            words = torch.randint(11, (8, samples, 7))
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1 + noise * torch.randn_like(p))
        opt = EKFAC(model)
        for x in words:
            train(model, opt, token_loss, x[:, :-1], x[:, 1:], 1)
        ends.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    assert (ends[0] - ends[1]).norm() < 1e-11 * ends[0].norm()
