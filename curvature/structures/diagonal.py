"""The diagonal alone."""

from __future__ import annotations

import torch
from torch import Tensor

from curvature.linalg import stack
from curvature.operators import Diagonal, Space
from curvature.structures.structure import Chunk, Structure
from curvature.terms import sum_of_products


class DiagonalStructure(Structure):
    """The diagonal of each parameter, in its shape, by name."""

    name = "diagonal"

    def add(self, chunk: Chunk) -> None:
        for name in self.space.names:
            terms = chunk.of(name)
            if terms is not None:
                weights = chunk.on(self.space.devices[name]).weights
                squares = sum_of_products(*terms, weights, chunk.patches.setdefault(name, []))
                self.add_to(name, squares.to(self.space.dtype))

    def operator(self) -> Diagonal:
        return Diagonal(self.space, self.space.flatten(self.by_name()))

    def trace(self) -> Tensor:
        return stack(x.sum() for x in self.tensors.values()).sum()

    def by_name(self) -> dict[str, Tensor]:
        """The diagonal by parameter, in the memory of the numbers; ValueError if an entry is not finite."""
        space, tensors = self.space, dict[str, Tensor]()
        for name, shape in zip(space.names, space.shapes, strict=True):
            known = self.tensors.get(name)
            zeros = torch.zeros(shape, dtype=space.dtype, device=space.devices[name]) if known is None else known
            tensors[name] = zeros
        if not stack(torch._foreach_norm(list(tensors.values()))).sum().isfinite():  # norms may overflow
            for name, shape in zip(space.names, space.shapes, strict=True):
                space.kept(tensors[name], shape, "the diagonal", space.devices[name])
        return tensors

    @classmethod
    def describe(cls, space: Space) -> str:
        return ", ".join("x".join(map(str, shape)) or "1" for shape in space.shapes)
