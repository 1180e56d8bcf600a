"""Singular and indefinite matrices are refused, and damping advised; large ones are known by their products."""

import warnings

import pytest
import torch

from curvature.operators import BlockDiagonal, Dense, Diagonal, Operator, Scaled, Sum
from curvature.operators.kronecker import Kronecker
from curvature.operators.matrix_free import MatrixFree
from curvature.operators.space import MAX_DIRECT_SIZE
from support.combinations import member
from support.structures import ARRANGEMENTS, Source

pytestmark = pytest.mark.fast

DTYPES = (torch.float64, torch.float32)


def singular(source: Source) -> dict[str, Operator]:
    """One of each structure that has the eigenvalue zero and no negative one."""
    matrix, arrangement = source.definite(d=12, rank=5), ARRANGEMENTS["matrix"]
    space = source.layer(arrangement)
    factors = source.definite(1, d=3, rank=2), source.definite(1, d=4)
    made = Kronecker(space, arrangement, *factors)
    zero = Diagonal(space, torch.cat([source.positive(11), source.positive(1) * 0]))
    return {
        "dense": Dense(space, matrix),
        "last pivot": Dense(space, source.definite(d=12, rank=11)),
        "diagonal": zero,
        "kronecker": made,
        "kronecker diagonal": Kronecker(space, arrangement, factors[0], factors[1].diagonal(dim1=1, dim2=2)),
        "eigen": made.eigen,
        "zero": 0 * made,
        "scaled": Scaled(Dense(space, matrix), 3.0),
        "sum": Sum([Dense(space, matrix), Dense(space, matrix)]),
        "matrix_free": MatrixFree(space, lambda V: matrix @ V),
        "blocks": BlockDiagonal(space, [zero]),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", singular(Source()))
def test_singular(name, dtype, device):
    for seed in range(5):
        with member(f"seed {seed}"):
            assert_singular(singular(Source(device, dtype, seed))[name], Source(device, dtype, 1).normal(12))


def assert_singular(op, v):
    for call in (lambda: op.solve(v), op.logdet, op.sample, op.inverse):
        with pytest.raises(ValueError, match=r"singular|indefinite.*least eigenvalue.*Use a damping above"):
            call()
    assert op.det().abs() <= 1e-5 * op.frobenius_norm() ** 12
    expected = torch.linalg.solve(op.to_dense().double() + 0.01 * torch.eye(12).to(v).double(), v.double())
    tolerance = 1e-9 if v.dtype == torch.float64 else 1e-2
    torch.testing.assert_close(op.solve(v, 0.01).double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", singular(Source()))
def test_indefinite(name, device):
    op = singular(Source(device))[name].damped(-0.01)
    for call in (lambda: op.solve(op.diagonal()), op.logdet, op.sample, op.inverse):
        with pytest.raises(
            ValueError, match=r"indefinite: its least eigenvalue is -0.01 without damping\. Use a damping above 0.02"
        ):
            call()
    assert op.logdet(0.02).isfinite()


@pytest.mark.parametrize("size", (50, 400))
def test_singular_of_any_size(size, device):
    source = Source(device, torch.float32)
    for rank in (size // 2, size - 1):
        op = Dense(source.space(a=(size,)), source.definite(d=size, rank=rank))
        with pytest.raises(ValueError, match="singular|indefinite"):
            op.solve(source.normal(size))


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
    for k in (0, -1, size + 1):
        with pytest.raises(ValueError, match=f"k: expected a whole number from 1 to .*, found {k}"):
            op.eigenvalues(k)
    with pytest.raises(TypeError, match=r"k: expected a whole number, found 2\.0"):
        op.eigenvalues(2.0)


def test_costly_calls_of_large_matrices_say_so():
    size = MAX_DIRECT_SIZE + 1
    space = Source().space(a=(size,))
    op = MatrixFree(space, lambda V: V)
    for call, instead in ((op.trace, "xtrace"), (op.diagonal, "xdiag"), ((op + op).trace, "xtrace")):
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
