"""What a renewal takes at its peak, in all allocations: bounds that break if something is kept whole or all at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from optimizers import EKFAC, KFAC
from support.memory import peak_bytes

WIDTH, LAYERS = 32, 6
SIDE = 9 * WIDTH  # rows of the factor of a layer's inputs
WHOLE = 4 * SIDE**2  # bytes of such a side


class Stepping:
    """A net of convolutions whose factors are much larger than all else.

    Pictures are nearly constant and their borders meet, so a few eigenvalues of each factor stand far above the others.
    These are what inverses keep, on every processor. Of noise they would keep all that are not zero. Then rounding says
    whether the mean of the rest is below zero, which takes the whole inverse.
    """

    def __init__(self, make: Any, width: int = WIDTH) -> None:
        torch.manual_seed(0)
        layer = lambda: nn.Conv2d(width, width, 3, padding=1, padding_mode="circular", bias=False)
        self.model = nn.Sequential(*(layer() for _ in range(LAYERS)))
        self.x = torch.randn(2, width, 1, 1) + 0.05 * torch.randn(2, width, 4, 4)
        self.opt, self.loss = make(self.model), torch.zeros(())

    def forward(self) -> None:
        self.opt.zero_grad()
        self.loss = self.model(self.x).square().mean()

    def finish(self) -> None:
        self.loss.backward()
        self.opt.step()
        self.loss = torch.zeros(())


@pytest.mark.parametrize(
    ("make", "kept", "forward", "finish"),
    [
        (KFAC, 3.5, 4.5, 7.0),  # of 6 averages as triangles, inverses by few eigenvalues
        # and of squares in the basis; all blocks are inverted in one step, one by one
        (EKFAC, 10.6, 5.0, 11.5),
    ],
    ids=["KFAC", "EKFAC"],
)
def test_renewals(make: Any, kept: float, forward: float, finish: float):
    """In sides: what stays, what a recorded pass takes (statistics of all layers, as triangles), and a step.

    The profiler takes off what is released only if an earlier profile has seen it allocated: all steps are profiled.
    """
    run = Stepping(make)
    for _ in range(4):
        peak_bytes(run.forward)
        peak_bytes(run.finish)
    assert sum(block.bytes for block in run.opt.store.blocks) <= kept * WHOLE
    assert peak_bytes(run.forward) <= forward * WHOLE
    assert peak_bytes(run.finish) <= finish * WHOLE
