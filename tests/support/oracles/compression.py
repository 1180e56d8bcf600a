"""Optimal brain surgeon with a dense matrix, one weight at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor


def saliency(H: Tensor, w: Tensor, q: int) -> Tensor:
    """By how much ``1/2 d^T H d`` rises at its minimum over steps d with ``d_q = -w_q``: by the system of equations
    for d and its multiplier."""
    size = len(w)
    system = torch.zeros(size + 1, size + 1, dtype=H.dtype)
    system[:size, :size] = H
    system[size, q] = system[q, size] = 1
    right = torch.zeros(size + 1, dtype=H.dtype)
    right[size] = -w[q]
    d = torch.linalg.solve(system, right)[:size]
    return d @ H @ d / 2


def surgeon(H: Tensor, w: Tensor, prunable: Sequence[int], count: int) -> tuple[Tensor, list[int]]:
    """Remove `count` weights in turn, each time the one with the least saliency, by Hassibi and Stork's update; the
    inverse is always that for the weights that are left. Returns the new weights, and which were removed."""
    w, left, removed = w.clone(), list(range(len(w))), []
    for _ in range(count):
        inverse = torch.linalg.inv(H[left][:, left])
        candidates = [k for k, q in enumerate(left) if q in prunable]
        k = min(candidates, key=lambda k: float(w[left[k]] ** 2 / inverse[k, k]))
        w[left] -= w[left[k]] / inverse[k, k] * inverse[:, k]
        removed.append(left.pop(k))
        w[removed] = 0
    return w, removed


def without(H: Tensor, w: Tensor, removed: Sequence[int]) -> Tensor:
    """The same updates for weights that are given, in their order."""
    w, left = w.clone(), list(range(len(w)))
    for q in removed:
        inverse, k = torch.linalg.inv(H[left][:, left]), left.index(q)
        w[left] -= w[q] / inverse[k, k] * inverse[:, k]
        w[left.pop(k)] = 0
    return w


def levels(row: Tensor, bits: int) -> Tensor:
    """Equal steps from the least to the largest entry, shifted so that zero is one of them."""
    low, high = min(float(row.min()), 0.0), max(float(row.max()), 0.0)
    step = (high - low) / (2**bits - 1)
    return step * (torch.arange(2**bits, dtype=row.dtype) - round(-low / step))


def rounded(H: Tensor, w: Tensor, order: Sequence[int], grids: Sequence[Tensor | None]) -> Tensor:
    """Weights rounded in turn, each error made up for by those to come (the surgeon's update); weights without levels
    are only updated, and zeros stay."""
    w, left, start = w.clone(), list(range(len(w))), w
    for q in order:
        grid = grids[q]
        if grid is None:
            continue
        inverse, k = torch.linalg.inv(H[left][:, left]), left.index(q)
        value = w.new_zeros(()) if start[q] == 0 else grid[(grid - w[q]).abs().argmin()]
        w[left] -= (w[q] - value) / inverse[k, k] * inverse[:, k]
        w[left.pop(k)] = value
    return w
