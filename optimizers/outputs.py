"""The tensors that a model returns: where vectors are sent back from, and how large they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def outputs_of(output: Any) -> list[Tensor]:
    """The tensors that vectors are injected at: the logits, or every tensor of a sequence or mapping."""
    output = getattr(output, "logits", output)
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return [x for value in values for x in outputs_of(value)]


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
        self.added = {k: self.added[k] + x if k in self.added else x for k, x in own.items()}

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
