"""How large the outputs of a model are: sums of each forward pass in, their root mean square out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from curvature.linalg import stack

Sums = Mapping[str, Tensor]


class OutputScale:
    """Root mean square and number of the output entries of the last batch.

    Attributes:
        rms: root mean square of an output entry.
        entries_per_sample: their number.
        along: `CurvatureStatistics.along` of the last renewal, means over samples; empty if nothing was measured.
    """

    def __init__(self) -> None:
        self.rms: Tensor | None = None
        self.entries_per_sample: Tensor | float = 1.0
        self.along: Sums = {}

    @staticmethod
    @torch.no_grad()
    def of(outputs: Sequence[Tensor]) -> Sums:
        """The sums of one pass, given its outputs (N, ...). Entries that are not finite do not count."""
        each = [_sums(x.detach()) for x in outputs]
        squares, entries = (stack(column).sum() for column in zip(*each, strict=True))
        # to fill a tensor needs no wait, as a copy to the device does
        count = torch.full_like(squares, len(outputs[0]))
        return {"squares": squares, "numbers": torch.stack([count, entries])}

    def update(self, sums: Sums, along: Sums, home: torch.device) -> None:
        """Replace all by those of a step's passes, if it had any; all numbers are on the device `home`."""
        self.along = {}
        if sums:
            count, entries = sums["numbers"].to(home).unbind()
            scale = (sums["squares"].to(home) / entries.clamp(min=1)).sqrt()
            known = scale if self.rms is None else self.rms
            self.rms = torch.where(scale.isfinite() & (entries > 0), scale, known)
            self.entries_per_sample = torch.where(entries > 0, entries / count, self.entries_per_sample)
            self.along = {name: square.to(home) / count for name, square in along.items()}


def _sums(x: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of squares, and the number of finite entries."""
    squares = x.float().square()  # a copy, and the only one of the size of x
    entries = (squares < torch.inf).count_nonzero()  # isfinite, and a sum of its truths, would make copies
    return squares.nan_to_num_(0.0, 0.0, 0.0).sum(), entries
