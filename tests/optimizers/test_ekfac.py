"""EKFAC, and what KFAC and EKFAC promise of their trajectories."""

from __future__ import annotations

import functools
import io
import itertools
import statistics
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import curvature
from curvature.preconditioners.block_diagonal import MAX_EIGEN_SIDE
from optimizers import EKFAC, KFAC
from support.cases.case import seeded, token_loss
from support.training import ORDERS, assert_same, closure_of, copied, digits, draws, mlp, task, train
from support.training import train_by_closure as train_adaptive


@pytest.mark.parametrize(
    "options", [{}, {"damping": 0.1, "weight_decay": 0.01}, {"inject": curvature.empirical()}, {"adaptive": True}]
)
@pytest.mark.parametrize("optimizer", [KFAC, EKFAC])
def test_resumes_bitwise(options: dict[str, Any], optimizer: type[KFAC], device, steps: int = 13):
    """From a checkpoint that was read to the CPU, as is usual, and to the device (other steps: `test_checkpoints`)."""
    model, loss, x, y = task("cnn", device)
    opt = optimizer(model, **options)
    trained = train_adaptive if "adaptive" in options else train
    trained(model, opt, loss, x, y, steps)
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, saved)
    trained(model, opt, loss, x, y, 8)
    for place in {"cpu", device}:
        again, *_ = task("cnn", device)
        resumed = optimizer(again, **options)
        saved.seek(0)
        state = torch.load(saved, weights_only=True, map_location=place)
        again.load_state_dict(state["model"])
        resumed.load_state_dict(state["opt"])
        trained(again, resumed, loss, x, y, 8)
        assert resumed.steps == steps + 8
        assert_same(copied(again), copied(model))


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


def test_rescaling_changes_the_step():
    """KFAC and EKFAC agree until squares were seen in a basis, and no longer."""
    ends = []
    for optimizer in (KFAC, EKFAC):
        model, loss, x, y = task("mlp")
        opt = optimizer(model)
        steps = []
        for _ in range(3):
            train(model, opt, loss, x, y, 1)
            steps.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone())
        ends.append(steps)
    torch.testing.assert_close(ends[0][0], ends[1][0], rtol=1e-3, atol=1e-5)
    assert (ends[0][2] - ends[1][2]).norm() > 1e-3 * ends[0][2].norm()


@pytest.mark.training_run
@pytest.mark.parametrize("optimizer, adaptive", [(KFAC, False), (EKFAC, True)])
def test_batch_size_and_reduction_change_little(optimizer: type[KFAC], adaptive: bool):
    """The same settings, batches of 64 and of 1,024, means and sums: losses over all data after 40 steps are alike.

    The median of orders for small batches: where one run ends is chance, from 0.07 to 0.14.
    """
    means = [trained_on_batches(optimizer, adaptive, 64, "mean", seed) for seed in ORDERS]
    large = [trained_on_batches(optimizer, adaptive, 1024, reduction, 0) for reduction in ("mean", "sum")]
    # 2.3 at the start; SGD(0.1, momentum=0.9) leaves 0.34, and 0.32 with large batches
    assert statistics.median(means) < 0.2 and max(large) < 0.02, (means, large)
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
            closure = closure_of(model, opt, loss, x[rows], y[rows])
            if adaptive:
                opt.step(closure)
            else:
                closure()
                opt.step()
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
