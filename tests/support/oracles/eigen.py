"""Brute-force references for matrices that are diagonal in a basis of Kronecker products, one matrix for each group."""

from collections.abc import Sequence

import torch
from torch import Tensor


def products(rows: Tensor, columns: Tensor) -> list[Tensor]:
    """``kron(U_B, U_A)`` of each group, for sides (g, d, d), or (g, d) where they are diagonal."""
    sides = ((torch.diag_embed(side) if side.ndim == 2 else side).contiguous() for side in (rows, columns))
    return [torch.kron(b, a) for b, a in zip(*sides, strict=True)]


def diagonals(gradients: Tensor, count: int, basis: Sequence[Tensor]) -> Tensor:
    """``diag(Q^T (sum of g g^T / count) Q)``, (g, o, i), for gradients (n, g, o, i)."""
    flat = gradients.flatten(2)
    found = [(q.T @ (flat[:, g].T @ flat[:, g] / count) @ q).diagonal() for g, q in enumerate(basis)]
    return torch.stack(found).view(gradients.shape[1:])


def carried(values: Tensor, old: Sequence[Tensor], new: Sequence[Tensor]) -> Tensor:
    """The diagonal in a new basis of what is diagonal, with `values` (g, o, i), in an old one."""
    found = zip(old, new, values.flatten(1), strict=True)
    return torch.stack([(q.T @ p @ v.diag() @ p.T @ q).diagonal() for p, q, v in found]).view(values.shape)


def solution(values: Tensor, basis: Sequence[Tensor], right: Tensor) -> Tensor:
    """``(Q diag(values) Q^T)^-1 right`` of each group, (g, o, i)."""
    found = zip(basis, values.flatten(1), right.flatten(1), strict=True)
    return torch.stack([torch.linalg.solve(q @ v.diag() @ q.T, r) for q, v, r in found]).view(right.shape)
