"""Large matrices known by their products: few eigenvalues, and warnings of what takes a product for each row."""

from __future__ import annotations

import warnings

import pytest
import torch

from curvature.operators import BlockDiagonal, Diagonal, MatrixFree
from curvature.operators.space import MAX_DIRECT_SIZE
from support.structures import Source


def test_largest_eigenvalues_of_large_matrices(device):
    """A few products each, also of sums, multiples and blocks."""
    size = MAX_DIRECT_SIZE + 1
    source = Source(device)
    values = torch.linspace(-1, 1, size).to(source.positive(1))
    values[0], values[1], values[-2], values[-1] = -9, -7, 5, 8
    made = []
    space = source.space(a=(size,))
    op = MatrixFree(space, lambda V: made.append(V.shape[1]) or values[:, None] * V)
    shift = Diagonal(space, torch.full_like(values, 9.0))
    large = {op: values, op + shift: values + 9, -2 * op: -2 * values}
    rest = Diagonal(source.space(b=(2,)), torch.tensor([6.0, -1.0]).to(values))
    joint = source.space(a=(size,), b=(2,))
    large[BlockDiagonal(joint, [op, rest])] = torch.cat([values, rest.values])
    for matrix, exact in large.items():
        torch.testing.assert_close(matrix.eigenvalues(2), exact.sort().values[-2:], rtol=1e-7, atol=1e-7)
    assert torch.equal(shift.eigenvalues(2), shift.values[:2])
    assert 0 < sum(made) < 6 * size
    for k in (0, -1, size + 1, 2.0):
        with pytest.raises(ValueError, match=f"has no {k} largest"):
            op.eigenvalues(k)


def test_costly_calls_of_large_matrices_say_so():
    size = MAX_DIRECT_SIZE + 1
    space = Source().space(a=(size,))
    op = MatrixFree(space, lambda V: V)
    for call, instead in ((op.trace, "hutchpp_trace"), (op.diagonal, "xdiag"), ((op + op).trace, "xtrace")):
        with pytest.warns(UserWarning, match=f"{size} products.*{instead}"):
            call()
    known = MatrixFree(space, lambda V: V, dense=lambda: torch.eye(size).double(), diagonal=lambda: torch.ones(size))
    with pytest.warns(UserWarning, match=rf"decomposes a {size} x {size} matrix.*eigenvalues\(k\).*spectral_density"):
        known.eigenvalues()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        known.trace()
        known.eigenvalues(2)
        MatrixFree(Source().space(a=(8,)), lambda V: V).trace()
