"""How large the outputs of a model are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Sums = Mapping[str, Tensor]


class Extent:
    """How large the outputs of the last batch were."""

    def __init__(self) -> None:
        self.scale: Tensor | None = None  # root mean square of an output entry
        self.size = 1.0  # output entries per sample

    @staticmethod
    @torch.no_grad()
    def of(outputs: Sequence[Tensor]) -> Sums:
        """What a pass with these outputs adds, samples along their first axis. What is not finite does not count."""
        found = [x.detach().float().square() for x in outputs]
        entries = torch.stack([x.isfinite().sum() for x in found]).sum()
        squares = torch.stack([x.nan_to_num_(0.0, 0.0, 0.0).sum() for x in found]).sum()
        return {"squares": squares, "numbers": torch.stack([squares.new_tensor(len(outputs[0])), entries])}

    def update(self, sums: Sums) -> None:
        """Take what the passes of a step have added, if there were any."""
        if sums:
            count, entries = sums["numbers"].tolist()
            scale = (sums["squares"] / max(entries, 1)).sqrt()
            known = scale if self.scale is None else self.scale
            self.scale = torch.where(scale.isfinite() & (entries > 0), scale, known)
            self.size = entries / count if entries else self.size
