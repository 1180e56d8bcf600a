"""Convex quadratics without noise: steps converge, as those of Adam do, and do not stay at a bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optimizers import EKFAC, KFAC, NaturalGradient
from support.cases.case import Raw

pytestmark = pytest.mark.training_run

STEPS = 600


def scales(size: int, condition: float) -> Tensor:
    return torch.logspace(-math.log10(condition) / 2, math.log10(condition) / 2, size)


def rotated() -> nn.Module:
    axes = torch.linalg.qr(torch.randn(12, 12))[0]
    return Raw(lambda m: m.p @ m.matrix @ m.p, p=(12,), matrix=axes * scales(12, 30.0) @ axes.mT)


QUADRATICS: dict[str, Callable[[], nn.Module]] = {
    "condition 100": lambda: Raw(lambda m: (m.p.square() * m.scales).mean(), p=(16,), scales=scales(16, 100.0)),
    # the norm of the parameters stays, as does that of directions along which nothing changes
    "far from zero": lambda: Raw(lambda m: ((m.p - 5).square() * m.scales).mean(), p=(16,), scales=scales(16, 10.0)),
    "sums": lambda: Raw(lambda m: m.p.sum(-1).square().mean(), p=(50, 3)),
    "rotated": rotated,
}
TRAINED: list[tuple[str, Any]] = [
    ("condition 100", KFAC), ("far from zero", EKFAC), ("sums", KFAC), ("rotated", KFAC),
    ("far from zero", NaturalGradient),
]  # fmt: skip


@pytest.mark.parametrize(("name", "optimizer"), TRAINED, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_steps_converge(name: str, optimizer: Any) -> None:
    torch.manual_seed(0)
    model = QUADRATICS[name]()
    opt, losses = optimizer(model), []
    for _ in range(STEPS):
        opt.zero_grad()
        loss = model()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < 1e-9 * losses[0]
