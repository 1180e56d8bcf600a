"""Keeps batches that are far out of scale out of running averages, but never two in a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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

    def weight(self, traces: Sequence[tuple[Tensor | None, Tensor]], weight: float) -> Tensor | float:
        """`weight`, or zero if the trace of a new matrix is more than `OUTLIER_FACTOR` times that of the old one.

        Args:
            traces: pairs (old, new) for one or more matrices; old is None before the first update.
            weight: of the new matrices in the average.
        """
        return OutlierFilter.weights([self], [traces], [weight])[0]

    @staticmethod
    def weights(
        filters: Sequence[OutlierFilter],
        traces: Sequence[Sequence[tuple[Tensor | None, Tensor]]],
        weights: Sequence[float],
    ) -> list[Tensor | float]:
        """The `weight` of each filter, given its traces, as many for each."""
        found: list[Tensor | float] = list(weights)
        old = [k for k, own in enumerate(traces) if all(before is not None for before, _ in own)]
        place = lambda k: (traces[k][0][1].dtype, traces[k][0][1].device)
        for where in dict.fromkeys(map(place, old)):
            alike = [k for k in old if place(k) == where]
            far = _are_far([filters[k] for k in alike], [traces[k] for k in alike])
            kept = torch._foreach_mul((~far).to(where[0]).unbind(), [weights[k] for k in alike])
            for k, is_far, weight in zip(alike, far.unbind(), kept, strict=True):
                own, found[k] = filters[k], weight
                own.closed, own.count = is_far, is_far.int() if own.count is None else own.count + is_far
        return found

    def masked(self, weight: float, dtype: torch.dtype) -> Tensor | float:
        """`weight`, or zero if the last statistics were left out."""
        return weight if self.closed is None else (~self.closed).to(dtype) * weight

    def state(self) -> dict[str, Tensor]:
        return {name: flag for name, flag in vars(self).items() if flag is not None}

    @staticmethod
    def restored(state: dict[str, Tensor], device: torch.device) -> OutlierFilter:
        """From its `state`."""
        gate = OutlierFilter()
        if foreign := sorted(set(state) - set(vars(gate))):
            raise ValueError(f"a filter of outliers has no {', '.join(map(repr, foreign))}")
        for name, flag in state.items():
            setattr(gate, name, flag.to(device, copy=True))
        return gate


def _are_far(filters: Sequence[OutlierFilter], traces: Sequence[Sequence[tuple[Any, Tensor]]]) -> Tensor:
    """Whether a matrix of each is out of scale, unless the last was so (n,)."""
    old, new = map(torch.stack, zip(*(pair for own in traces for pair in own), strict=True))
    far = ((new > OUTLIER_FACTOR * old) & (old > 0)).view(len(filters), -1).any(1)
    return far & ~torch.stack([torch.zeros_like(far[0]) if f.closed is None else f.closed for f in filters])
