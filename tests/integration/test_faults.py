"""Runs with random faults end where runs without them do, and nothing is ever not finite.

Faults: NaN or inf in the inputs, in the gradients after the backward pass; eigh and Cholesky that raise or return NaN,
for one step; inputs times 1e6 and 1e-12; empty batches; an exception or a KeyboardInterrupt in the forward pass.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optimizers import EKFAC, KFAC, NaturalGradient
from support.faults import Fault, fail, raising, silent
from support.training import curvature_of, digits, mlp, task

LOSS = nn.CrossEntropyLoss(label_smoothing=0.1)  # a loss that does not go to zero, so that 5 % of it mean something
OPTIMIZERS: dict[str, Callable[[nn.Module], KFAC]] = {
    "KFAC": KFAC, "EKFAC": EKFAC, "NaturalGradient": lambda m: NaturalGradient(m, solver="woodbury"),
}  # fmt: skip
STEPS, BATCH, LAST = 180, 64, 20
Batch = tuple[Tensor, Tensor]
inputs = lambda change: lambda model, opt, batch: plain(model, opt, (change(batch[0]), batch[1]))


@contextlib.contextmanager
def interrupted(model: nn.Module, error: BaseException) -> Iterator[None]:
    """The forward pass ends in the middle."""

    def hook(*args: Any) -> None:
        raise error

    handle = list(model.modules())[-1].register_forward_hook(hook)
    try:
        yield
    except (ValueError, KeyboardInterrupt):
        pass
    finally:
        handle.remove()


def plain(model: nn.Module, opt: KFAC, batch: Batch, spoil: Callable[[], None] = lambda: None) -> None:
    x, y = batch
    opt.zero_grad()
    LOSS(model(x), y).backward()
    spoil()
    opt.step()


def gradients(value: float) -> Callable[[nn.Module, KFAC, Batch], None]:
    def fault(model: nn.Module, opt: KFAC, batch: Batch) -> None:
        last = list(model.parameters())[-1]
        plain(model, opt, batch, lambda: last.grad.view(-1)[0].fill_(value))  # type: ignore[union-attr]

    return fault


def decompositions(how: Fault) -> Callable[[nn.Module, KFAC, Batch], None]:
    def fault(model: nn.Module, opt: KFAC, batch: Batch) -> None:
        with pytest.MonkeyPatch.context() as patch:
            fail(patch, how)
            plain(model, opt, batch)

    return fault


def breaking(error: BaseException) -> Callable[[nn.Module, KFAC, Batch], None]:
    def fault(model: nn.Module, opt: KFAC, batch: Batch) -> None:
        with interrupted(model, error):
            plain(model, opt, batch)

    return fault


FAULTS: dict[str, Callable[[nn.Module, KFAC, Batch], None]] = {
    "nan in inputs": inputs(lambda x: x.clone().index_fill_(0, torch.tensor([1]), math.nan)),
    "inf in inputs": inputs(lambda x: x.clone().index_fill_(0, torch.tensor([1]), math.inf)),
    "nan in gradients": gradients(math.nan), "inf in gradients": gradients(-math.inf),
    "decompositions raise": decompositions(raising), "decompositions return nan": decompositions(silent),
    "inputs times 1e6": inputs(lambda x: x * 1e6), "inputs times 1e-12": inputs(lambda x: x * 1e-12),
    "empty batch": lambda model, opt, batch: plain(model, opt, (batch[0][:0], batch[1][:0])),
    "exception": breaking(ValueError("injected")), "KeyboardInterrupt": breaking(KeyboardInterrupt()),
}  # fmt: skip


def not_finite(model: nn.Module, opt: KFAC) -> list[str]:
    own: dict[str, Tensor] = dict(model.named_parameters())
    own |= {f"state {k}": t for s in opt.state.values() for k, t in s.items() if isinstance(t, Tensor)}
    return [name for name, t in (own | curvature_of(opt)).items() if not t.isfinite().all()]


def loss_after(make: Callable[[nn.Module], KFAC], faults: int) -> float:
    """Of all digits, after a run over random batches, of which so many are faults: the mean over the last steps.

    A step without momentum changes it by up to a fifth, so that a single one says little.
    """
    torch.manual_seed(0)
    model = mlp()
    generator = torch.Generator().manual_seed(0)
    x, y = digits()
    opt = make(model)
    order = torch.randperm(STEPS - 20, generator=generator)[:faults] + 10
    picks = torch.randint(len(FAULTS), (faults,), generator=generator)
    when = dict(zip(order.tolist(), [list(FAULTS.values())[k] for k in picks.tolist()], strict=True))
    losses = []
    for step in range(STEPS):
        index = torch.randint(len(x), (BATCH,), generator=generator)
        when.get(step, plain)(model, opt, (x[index], y[index]))
        assert not not_finite(model, opt)
        if step >= STEPS - LAST:
            with torch.no_grad():
                losses.append(LOSS(model(x), y).item())
    return fmean(losses)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_with_faults(name: str):
    """5 % of a loss with label smoothing, at the rate of 50 faults in 2,000 steps."""
    clean, faulty = (loss_after(OPTIMIZERS[name], faults) for faults in (0, 5))
    assert faulty < 1.05 * clean


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
