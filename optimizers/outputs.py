"""How large the outputs of a model are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Extent:
    """How large the outputs of a batch are, summed up like the curvature of a block."""

    def __init__(self) -> None:
        self.scale: Tensor | None = None  # root mean square of an output entry
        self.size = 1.0  # output entries per sample
        self.discard()

    def discard(self) -> None:
        self.added: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, outputs: Sequence[Tensor], count: int) -> None:
        squares = torch.stack([x.detach().float().square().sum() for x in outputs]).sum()
        own = {"squares": squares, "numbers": squares.new_tensor([count, sum(x.numel() for x in outputs)])}
        self.join(own)

    def cut(self) -> dict[str, Tensor]:
        found = self.added
        self.discard()
        return found

    def join(self, found: dict[str, Tensor]) -> None:
        self.added = self.added | {k: self.added[k] + x if k in self.added else x for k, x in found.items()}

    def sums(self, rank: int, size: int) -> dict[str, Tensor]:
        return self.added

    def take_sums(self, sums: Mapping[str, Tensor]) -> None:
        self.added = dict(sums)

    def fold(self) -> None:
        """Look at what was added since the last time."""
        if self.added:
            count, entries = self.added["numbers"].tolist()
            scale = (self.added["squares"] / entries).sqrt()
            known = scale if self.scale is None else self.scale
            self.size, self.scale = entries / count, torch.where(scale.isfinite(), scale, known)
        self.discard()
