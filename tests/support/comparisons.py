"""What compares matrices, and rows with their definition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import curvature
from support.cases.case import seeded
from support.oracles import brute_force as oracle
from support.oracles.brute_force import split, trainable


def matches(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    """Equal up to rounding, in the scale of the largest entry."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    error, scale = (actual - expected).abs().max(), expected.abs().max()
    assert error <= tolerance * scale + 1e-14, f"{error:.3g} of {scale:.3g}"


def check_operator(model: nn.Module, found: Any) -> None:
    """What an operator says of itself is what its dense matrix says."""
    dense = found.to_dense()
    with seeded(3):
        vectors = torch.randn(len(dense), 2, dtype=dense.dtype)
    damped = dense + 0.1 * torch.eye(len(dense), dtype=dense.dtype)
    matches(found @ vectors, dense @ vectors)
    matches(found.diagonal(), dense.diagonal())
    matches(found.trace(), dense.trace())
    matches(found.eigenvalues().sort().values, torch.linalg.eigvalsh(dense))
    matches(found.solve(vectors, 0.1), torch.linalg.solve(damped, vectors))
    matches(found.logdet(0.1), torch.logdet(damped))
    solved = found.solve(split(model, vectors[:, 0]), 0.1)
    assert list(solved) == list(trainable(model))
    matches(torch.cat([part.flatten() for part in solved.values()]), torch.linalg.solve(damped, vectors[:, 0]))


def right_rows(model: nn.Module, loss: Any, x: Tensor, y: Tensor, calls: int = 2) -> dict[str, Tensor]:
    """Per-sample gradients by the definition, which `curvature` gives when it learns the shapes and at later calls."""
    expected = oracle.per_sample_gradients(model, loss, x, y)
    for _ in range(calls):
        torch.testing.assert_close(curvature.per_sample_gradients(model, loss, x, y), expected)
    return expected
