"""What compares matrices, and rows with their definition."""

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


def check_operator(model: nn.Module, found: Any, expected: Tensor | None = None) -> None:
    """What an operator says of itself is what its dense matrix says, which is `expected`."""
    dense = found.to_dense()
    matches(dense, dense.T if expected is None else expected, 1e-13 if expected is None else 1e-8)
    with seeded(3):
        vectors = torch.randn(len(dense), 3, dtype=dense.dtype)
    vector, values, eye = vectors[:, 0], torch.linalg.eigvalsh(dense), torch.eye(len(dense), dtype=dense.dtype)
    damping = 0.1 + 2 * max(0.0, -values.min().item())
    damped = dense + damping * eye
    assert found.shape == dense.shape
    for one, other in (
        (found @ vectors, dense @ vectors),
        (found @ vector, dense @ vector),
        (found.diagonal(), dense.diagonal()),
        (found.trace(), dense.trace()),
        (found.eigenvalues().sort().values, values),
        (found.solve(vectors, damping), torch.linalg.solve(damped, vectors)),
        (found.inverse(damping).to_dense(), damped.inverse()),
        (found.logdet(damping), torch.logdet(damped)),
    ):
        matches(one, other)
    for named, flat in (
        (found @ split(model, vector), dense @ vector),
        (found.solve(split(model, vector), damping), torch.linalg.solve(damped, vector)),
    ):
        assert {name: part.shape for name, part in named.items()} == {n: p.shape for n, p in trainable(model).items()}
        matches(torch.cat([part.flatten() for part in named.values()]), flat)


def right_rows(model: nn.Module, loss: Any, x: Tensor, y: Tensor, calls: int = 2) -> dict[str, Tensor]:
    """Per-sample gradients by the definition, which `curvature` gives when it learns the shapes and at later calls."""
    expected = oracle.per_sample_gradients(model, loss, x, y)
    for _ in range(calls):
        torch.testing.assert_close(curvature.per_sample_gradients(model, loss, x, y), expected)
    return expected
