"""Parameters that meet the batch only after arithmetic of their own: a learnt step size, initial state or time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import Raw, seeded
from support.combinations import in_pairs
from support.comparisons import right_rows
from support.oracles import brute_force as oracle
from support.training import train

pytestmark = pytest.mark.fast
N, LOSS = 6, nn.MSELoss()


def by_time(m: Any, x: Tensor) -> Tensor:
    """The step of an ODE solver is also the time at which the field is evaluated."""
    h = m.t.exp().reshape(1, 1)
    return m.field(torch.cat([x, (h + h).expand(len(x), 1)], 1)) * h


def by_steps(m: Any, x: Tensor) -> Tensor:
    a, b = m.t.exp(), m.t.sin()
    for _ in range(2):
        x = x + a * m.field(torch.cat([x, (a + b).repeat(len(x), 1)], 1)) * b
    return x


def by_embedding(m: Any, x: Tensor) -> Tensor:
    """A network of the time alone, and of the time with each sample."""
    time = m.t.exp().reshape(1, 1)
    first = m.inner(time)
    return m.field(torch.cat([x, time.expand(len(x), 1)], 1)) * first + m.inner(time * x[:, :1])


def by_hidden_state(m: Any, x: Tensor) -> Tensor:
    """A learnt state, which every sample starts from and a sum without samples reads."""
    state = m.state.tanh()
    mixed = state + 2 * state
    return m.field(torch.cat([x, mixed[:, :1].expand(len(x), 1)], 1)) + state + mixed


MODELS = [by_time, by_steps, by_embedding, by_hidden_state]
Forward = Callable[[Any, Tensor], Tensor]


def problem(forward: Forward) -> tuple[nn.Module, Tensor, Tensor]:
    with seeded(0):
        own: dict[str, Any] = {"state": (1, 2)} if forward is by_hidden_state else {"t": (1,)}
        own |= {"inner": nn.Linear(1, 2)} if forward is by_embedding else {}
        model = Raw(forward, field=nn.Linear(3, 2), **own).double()
        return model, torch.randn(N, 2).double(), torch.randn(N, 2).double()


@in_pairs(
    forward=MODELS,
    inject=[None, curvature.exact(), curvature.sampled(1), curvature.empirical()],
    make=[KFAC, EKFAC, NaturalGradient],
)
def test_training_goes_on(forward: Forward, inject: Any, make: Any) -> None:
    model, x, y = problem(forward)
    opt = make(model, **({} if inject is None else {"loss": LOSS, "inject": inject}))
    losses = train(model, opt, LOSS, x, y, 6)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("forward", MODELS)
def test_rows_and_diagonals_are_exact(forward: Forward) -> None:
    model, x, y = problem(forward)
    right_rows(model, LOSS, x, y)
    found = curvature.fisher_diagonal(model, LOSS, [(x[:2], y[:2]), (x[2:], y[2:])])
    diagonal = torch.diagonal(oracle.Matrices(model, LOSS, [(x, y)]).gauss_newton)
    torch.testing.assert_close(torch.cat([v.flatten() for v in found.values()]), diagonal)


@pytest.mark.parametrize("make", [KFAC, EKFAC, NaturalGradient])
def test_a_weight_of_which_a_function_takes_the_shape_has_no_warning(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The norms of a cosine classifier's weights are expanded as these."""
    with seeded(0):
        model = Raw(lambda m, x: F.linear(x, F.normalize(m.w)), w=(3, 4)).double()
        x, y = torch.randn(N, 4).double(), torch.randn(N, 3).double()
    losses = train(model, make(model), LOSS, x, y, 3)
    assert losses[-1] < losses[0] and "rule failed" not in caplog.text
