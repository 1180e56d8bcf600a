"""The diagonal in an eigenbasis of Kronecker products (arXiv:1806.03884, equation 11)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvature.kronecker import Basis, Scheme, by_length
from curvature.operators import EigenKronecker, Operator, Space
from curvature.structures.kronecker import KroneckerStructure
from curvature.structures.structure import Chunk

MIN_SAMPLES = 16  # whose squares stand for those of a batch, where gradients of samples have to be built


class EigenStructure(KroneckerStructure):
    """``Q diag(values) Q^T`` per group with ``Q = kron(U_B, U_A)``: squared per-sample gradients in that basis.

    Builders add up these alone, optimizers moments, too. The samples of the squares are counted apart.

    Args:
        space, scheme: as of `KroneckerStructure`.
        basis: U_B and U_A; None: there are moments only.
    """

    def __init__(self, space: Space, scheme: Scheme, basis: Basis | None) -> None:
        super().__init__(space, scheme)
        self.basis = basis
        self.counts = [*self.counts, 0.0]

    def add(self, chunk: Chunk) -> None:
        vectors = chunk.by_sample(self.space.names[0])
        if vectors is not None and self.basis is not None:
            self.add_to("values", self.basis.products(*vectors, chunk.weights))

    def estimate(self, terms: Mapping[str, Sequence[Any]], samples: float, rank: int, world_size: int) -> None:
        """With the squares of fewer of many samples, as in `subsample_samples`."""
        super().estimate(terms, samples, rank, world_size)
        if self.basis is None:
            return
        self.counts[3] += samples
        for alike in by_length(terms[self.space.names[0]]):  # those with the same number of samples belong together
            count = len(alike[0])
            total = world_size * count
            stride = 1 if max(term.places for term in alike) == 1 else max(1, min(total // MIN_SAMPLES, count))
            chosen = slice(-rank * count % stride, None, stride)
            vectors = [[term.samples(chosen) for term in alike] if stride > 1 else alike]
            each = total / max(1, -(-total // stride))
            weights = torch.full((len(vectors[0][0]),), each, dtype=self.space.dtype, device=alike[0].device)
            self.add_to("values", self.basis.products(vectors, vectors, weights))

    def add_(self, other: Any) -> None:
        """The sum is in the basis of the other."""
        if self.basis is not None and other.basis is not None and "values" in self.tensors:
            self.tensors["values"] = other.basis.carried(self.values, self.basis)
        self.basis = other.basis or self.basis
        super().add_(other)

    def scaled(self, factor: float) -> EigenStructure:
        new: EigenStructure = super().scaled(factor)
        if "values" in new.tensors:
            new.tensors["values"] = new.tensors["values"] * factor
        return new

    def joined(self, others: Sequence[Any]) -> EigenStructure:
        whole, basis = super().joined(others), None
        if self.basis is not None:
            sides = zip(*((x.basis.rows, x.basis.columns) for x in (self, *others)), strict=True)
            basis = Basis(whole.scheme, *(None if side[0] is None else torch.cat(side) for side in sides))
        return EigenStructure(whole.space, whole.scheme, basis)

    @property
    def values(self) -> Tensor:
        """The squares, (g, o, i)."""
        if "values" in self.tensors:
            return self.tensors["values"]
        return torch.zeros(self.scheme.arrangement.sides, dtype=self.space.dtype, device=self.space.device)

    def result(self, scale: float) -> Operator:
        return self.scaled(scale).operator()

    def operator(self) -> Operator:
        assert self.basis is not None
        rows, columns = self.basis.rows, self.basis.columns
        return EigenKronecker(self.space, self.scheme.arrangement, rows, columns, self.values)

    def trace(self) -> Tensor:
        return self.values.sum()
