"""Gradients of queries that are kept as matrices of low rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvature.linalg import matmul, psd_eigh, qr

EXTRA, POWERS = 8, 1  # directions beyond the rank, and iterations, for singular values that fall slowly
ENTRIES = 1 << 24  # that are built at a time


@dataclass(frozen=True)
class LowRank:
    """Tensors (Q, *shape), each as a product of two matrices (shape[0], r) and (r, all other axes)."""

    left: Tensor
    right: Tensor
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.left)

    def __getitem__(self, some: int | slice) -> Tensor:
        built = matmul(self.left[some], self.right[some])
        return built.reshape(*built.shape[:-2], *self.shape)


Queries = Tensor | LowRank


def compress(queries: Tensor, rank: int | None) -> Queries:
    """The nearest matrices of this rank (Q, *shape), nearly; the queries themselves where that takes no less memory.

    By subspace iteration (Halko, Martinsson and Tropp 2011, arXiv:0909.4061, algorithm 4.4).
    """
    shape = tuple(queries.shape[1:])
    rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, 1)
    if rank is None or rank * (rows + columns) >= rows * columns:
        return queries
    matrices = queries.reshape(len(queries), rows, columns)
    generator = torch.Generator().manual_seed(0)
    width = min(rank + EXTRA, rows, columns)
    start = torch.randn(columns, width, generator=generator, dtype=torch.float64, device="cpu").to(queries)
    basis = qr(matmul(matrices, start))[0]
    for _ in range(POWERS):
        basis = qr(matmul(matrices, matmul(matrices.mT, basis)))[0]
    within = matmul(basis.mT, matrices)
    largest = psd_eigh(matmul(within, within.mT))[1][:, :, -rank:]
    return LowRank(matmul(basis, largest), matmul(largest.mT, within), shape)


def joined(parts: Sequence[Queries]) -> Queries:
    """The queries of several batches, all kept alike."""
    low = [part for part in parts if isinstance(part, LowRank)]
    if not low:
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    return LowRank(torch.cat([part.left for part in low]), torch.cat([part.right for part in low]), low[0].shape)


def pieces(queries: Queries) -> Iterator[Tensor]:
    """The queries (Q, *shape), a bounded number of entries at a time if they are built here."""
    if isinstance(queries, Tensor):
        yield queries
        return
    step = max(1, ENTRIES // math.prod(queries.shape))
    for start in range(0, len(queries), step):
        yield queries[start : start + step]
