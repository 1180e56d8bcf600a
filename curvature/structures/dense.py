"""The exact block."""

from __future__ import annotations

import torch
from torch import Tensor

from curvature.operators import Dense, Space
from curvature.structures.structure import Chunk, Structure


class DenseStructure(Structure):
    """All entries (P, P)."""

    name = "dense"

    def add(self, chunk: Chunk) -> None:
        size = self.space.size
        if "matrix" not in self.tensors:
            self.tensors["matrix"] = torch.zeros(size, size, dtype=self.space.dtype, device=self.space.device)
        for u, w in chunk.rows(self.space):
            self.tensors["matrix"].addmm_((u * chunk.weights.to(u)[:, None]).T, w)

    def operator(self) -> Dense:
        matrix = self.tensors["matrix"]
        return Dense(self.space, (matrix + matrix.T) / 2)

    def trace(self) -> Tensor:
        return self.tensors["matrix"].trace()

    @classmethod
    def most_entries(cls, space: Space) -> int:
        return space.size**2

    @classmethod
    def rank(cls, space: Space) -> int:
        return space.size

    @classmethod
    def describe(cls, space: Space) -> str:
        return f"{space.size}x{space.size}"
