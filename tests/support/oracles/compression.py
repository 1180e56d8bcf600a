"""Optimal brain surgeon with a dense matrix, one weight at a time."""

from __future__ import annotations

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
