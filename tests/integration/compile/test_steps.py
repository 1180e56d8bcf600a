"""``torch.compile(opt.step)``: the numbers of the uncompiled run, compiled once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from optimizers import EKFAC, KFAC, NaturalGradient
from support.compiled import assert_close, batch, closure_of_loss, net, values

OPTIMIZERS = [KFAC, EKFAC, NaturalGradient]


def in_a_train_function(opt: Any, **options: Any) -> Callable[[], Any]:
    """As torch's tutorial on compiled optimizers has it."""

    @torch.compile(**options)
    def function() -> None:
        opt.step()

    return function


def alone(opt: Any, **options: Any) -> Callable[[], Any]:
    return torch.compile(opt.step, **options)


STEPS = [*((o, alone, "eager") for o in OPTIMIZERS), (KFAC, in_a_train_function, "aot_eager")]


@pytest.mark.parametrize("optimizer, compiled, backend", STEPS)
def test_compiled_step(optimizer: Any, compiled: Any, backend: str, steps: int = 14):
    """Once, though renewals come and go and lr and weight decay change at every step."""
    counter, counts = CompileCounterWithBackend(backend), []
    ends = []
    for wrap in (lambda opt, **options: opt.step, compiled):
        model = net()
        opt = optimizer(model, weight_decay=0.1)
        step = wrap(opt, backend=counter)
        for k in range(steps):
            opt.param_groups[0]["lr"] = 1 / (k + 1)
            opt.zero_grad()
            F.cross_entropy(model(batch(k)[0]), batch(k)[1]).backward()
            step()
            counts.append(counter.frame_count)
        ends.append(values(model))
    assert_close(*ends)
    assert 0 < counts[-1] == counts[steps + 1] <= 2, counts


def test_compiled_model_step_and_closure():
    ends = []
    for backend in (None, "eager"):
        model = net()
        opt = KFAC(model)
        call = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
        step = opt.step if backend is None else torch.compile(opt.step, backend=backend)
        for k in range(14):
            step(functools.partial(closure_of_loss, call, opt, k))
        ends.append(values(model))
    assert_close(*ends)
