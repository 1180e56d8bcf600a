"""A model's output for N samples, with the loss and the target there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvature.losses.per_sample import Loss


@dataclass(frozen=True)
class OutputBatch:
    """An output (N*m, ...), m consecutive rows for each of ``count`` = N samples; no graph, at least float32."""

    output: Tensor
    loss: Loss | None
    target: Any
    count: int
    generator: torch.Generator | None

    @staticmethod
    def of(
        output: Tensor, loss: Loss | None, target: Any, count: int | None, generator: torch.Generator | None
    ) -> OutputBatch:
        """Check the output; ``count`` None means one row per sample.

        Raises:
            ValueError: the output is not a floating point tensor, is empty, or its rows do not divide into N samples.
        """
        if not isinstance(output, Tensor) or not output.is_floating_point():
            found = output.dtype if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(f"output must be a floating point tensor of shape (N, ...), got {found}")
        if output.ndim == 0 or output.numel() == 0:
            raise ValueError(f"output must have at least one sample along dim 0, got shape {tuple(output.shape)}")
        count = len(output) if count is None else count
        if count < 1 or len(output) % count:
            raise ValueError(f"output must have rows for {count} samples along dim 0, got shape {tuple(output.shape)}")
        dtype = torch.promote_types(output.dtype, torch.float32)
        return OutputBatch(output.detach().to(dtype), loss, target, count, generator)

    def source(self, seed: int) -> torch.Generator:
        """The generator where the output is: the given one, one that it seeds, or one with this seed."""
        given, device = self.generator, self.output.device
        if given is not None and given.device == device:
            return given
        drawn = seed if given is None else torch.randint(2**62, (), generator=given, device=given.device)
        return torch.Generator(device).manual_seed(int(drawn))

    def flat(self, vectors: Tensor) -> Tensor:
        """(k, N*m, ...) to (k, N, D), with D the entries of one sample's output."""
        return vectors.reshape(len(vectors), self.count, -1)

    def basis(self, start: int, stop: int) -> Tensor:
        """`unit_vectors` of entries start..stop of a sample's output."""
        return unit_vectors(self.output, self.count, torch.arange(start, stop, device=self.output.device))


def unit_vectors(output: Tensor, count: int, entries: Tensor) -> Tensor:
    """Unit vectors of these entries (k,) of a sample's output, the same for every sample: (k, *output.shape)."""
    vectors = output.new_zeros(len(entries), 1, output.numel() // count)
    vectors[torch.arange(len(entries), device=output.device), 0, entries] = 1
    return vectors.expand(-1, count, -1).reshape(len(entries), *output.shape)
