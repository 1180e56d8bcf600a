"""Keeps batches that are far out of scale out of running averages, but never two in a row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from curvature.linalg import moment_diagonal

OUTLIER_FACTOR = 1e3  # ratio to the trace of the running average


class OutlierFilter:
    """Decides for one running average whether new statistics count. Decisions stay on the device.

    Attributes:
        closed: whether the last statistics were left out, a flag (); None before the first.
        count: how often that was so, ().
    """

    def __init__(self) -> None:
        self.closed: Tensor | None = None
        self.count: Tensor | None = None

    def weight(self, sides: Sequence[tuple[Tensor | None, Tensor]], weight: float) -> Tensor | float:
        """`weight`, or zero if the trace of a new side is more than `OUTLIER_FACTOR` times that of the old one.

        Args:
            sides: pairs (old, new) of matrices, diagonals or sketches; old is None before the first update.
            weight: of the new sides in the average.
        """
        traces = [(moment_diagonal(old).sum(), moment_diagonal(new).sum()) for old, new in sides if old is not None]
        if not traces:
            return weight
        far = torch.stack([(new > OUTLIER_FACTOR * old) & (old > 0) for old, new in traces]).any()
        if self.closed is not None:
            far = far & ~self.closed
        self.count = far.int() if self.count is None else self.count + far
        self.closed = far
        return self.masked(weight, traces[0][0].dtype)

    def masked(self, weight: float, dtype: torch.dtype) -> Tensor | float:
        """`weight`, or zero if the last statistics were left out."""
        return weight if self.closed is None else (~self.closed).to(dtype) * weight

    def state(self) -> dict[str, Tensor]:
        return {name: flag for name, flag in vars(self).items() if flag is not None}

    @staticmethod
    def restored(state: dict[str, Tensor], device: torch.device) -> OutlierFilter:
        """From its `state`."""
        gate = OutlierFilter()
        vars(gate).update({name: flag.to(device, copy=True) for name, flag in state.items()})
        return gate
