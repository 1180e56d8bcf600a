"""What only Kronecker-factored matrices have; their algebra is in test_operators.py."""

import pytest
import torch

from curvature.operators import Diagonal
from curvature.operators.kronecker import EigenKronecker, Kronecker
from support.structures import ARRANGEMENTS, Source, blocks, eigen, kronecker

pytestmark = pytest.mark.fast

D = 0.3


def test_bias_is_the_last_input(device):
    """One sample with backprop b and input (a, 1): its gradient's outer product is the matrix."""
    source, arrangement = Source(device), ARRANGEMENTS["bias"]
    b, a = source.normal(3), torch.cat([source.normal(4), torch.ones(1).to(source.normal(1))])
    op = Kronecker(source.layer(arrangement), arrangement, b.outer(b)[None], a.outer(a)[None])
    gradient = op.space.flatten({"weight": b.outer(a[:4]), "bias": b})
    torch.testing.assert_close(op.to_dense(), gradient.outer(gradient))


@pytest.mark.parametrize("name", ARRANGEMENTS)
@pytest.mark.parametrize("sides", [(False, False), (True, False), (False, True)])
def test_factored_damping(name, sides, device):
    op, _ = kronecker(ARRANGEMENTS[name], *sides)(Source(device))
    damped = op.factored_damping(D)
    pairs = []
    for B, A in zip(op.B, op.A, strict=True):
        B, A = (side.diag() if side.ndim == 1 else side for side in (B, A))
        pi = ((A.trace() / len(A)) / (B.trace() / len(B))).sqrt()
        pairs.append((B + D**0.5 / pi * torch.eye(len(B)).to(B), A + D**0.5 * pi * torch.eye(len(A)).to(A)))
    full = Kronecker(op.space, op.arrangement, *(torch.stack(side) for side in zip(*pairs, strict=True)))
    torch.testing.assert_close(damped.to_dense(), full.to_dense())
    # Twice the same scale moved from one factor to the other changes nothing.
    moved = Kronecker(op.space, op.arrangement, 7 * op.B, op.A / 7).factored_damping(D)
    torch.testing.assert_close(moved.to_dense(), damped.to_dense())


def test_factored_damping_of_a_dead_layer(device):
    op, _ = kronecker(ARRANGEMENTS["bias"])(Source(device))
    dead = Kronecker(op.space, op.arrangement, 0 * op.B, op.A).factored_damping(D)
    expected = torch.kron(D**0.5 * torch.eye(3).to(op.A), op.A[0] + D**0.5 * torch.eye(5).to(op.A))
    torch.testing.assert_close(dead.eigenvalues(), torch.linalg.eigvalsh(expected))
    with pytest.raises(ValueError, match="cannot be negative, found -1"):
        op.factored_damping(-1)


def test_factored_damping_of_blocks(device):
    op, _ = blocks(Source(device))
    damped = op.factored_damping(D)
    torch.testing.assert_close(damped.blocks["w"].to_dense(), op.blocks["w"].factored_damping(D).to_dense())
    for name in ("shift", "rest"):
        torch.testing.assert_close(damped.blocks[name].to_dense(), op.blocks[name].damped(D).to_dense())
    assert isinstance(damped.blocks["rest"], Diagonal)


def test_eigenbasis_of_the_factors(device):
    op, matrix = kronecker(ARRANGEMENTS["grouped"])(Source(device))
    assert op.eigen is op.eigen
    torch.testing.assert_close(op.eigen.to_dense(), matrix)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_negative_by_rounding_counts_as_zero(dtype, device):
    """A singular factor whose computed eigenvalues fall below zero, next to a damping of the size of that rounding."""
    source, arrangement = Source(device, dtype), ARRANGEMENTS["matrix"]
    rounding = 3 * torch.finfo(dtype).eps
    rows = torch.tensor([1.0, 1.0, -rounding], dtype=dtype, device=device).diag()[None]
    op = Kronecker(source.layer(arrangement), arrangement, rows, torch.eye(4).to(rows)[None])
    damping = 2 * rounding
    v = torch.ones(12).to(rows)
    torch.testing.assert_close(op.solve(v, damping)[8:], v[8:] / damping)
    with pytest.raises(ValueError, match="singular to working precision"):
        op.solve(v)
    with pytest.raises(ValueError, match="singular to working precision with damping"):
        op.solve(v, rounding / 100)


def test_a_small_product_of_sound_factors_is_no_singularity(device):
    """Each factor has the condition 1e4, the product 1e8: beyond single precision, but not by factors."""
    source, arrangement = Source(device, torch.float32), ARRANGEMENTS["transposed"]
    U, V = source.orthogonal(1, d=3), source.orthogonal(1, d=5)
    rows, columns = (Q * torch.logspace(-4, 0, Q.shape[1]).to(Q) @ Q.mT for Q in (U, V))
    op = Kronecker(source.layer(arrangement), arrangement, rows, columns)
    v = op @ source.normal(op.space.size)
    assert (op @ op.solve(v) - v).norm() / v.norm() < 1e-3


def test_groups_and_diagonal_sides_have_their_own_scale(device):
    """Rare tokens: the diagonal side of an embedding may span any range."""
    source, arrangement = Source(device, torch.float32), ARRANGEMENTS["matrix"]
    counts = torch.tensor([[1.0, 1e-6, 1e-12, 1e-18]]).to(device)
    op = Kronecker(source.layer(arrangement), arrangement, source.definite(1, d=3), counts)
    v = source.normal(12)
    expected = torch.linalg.inv(op.B[0]) @ v.reshape(3, 4) / counts
    torch.testing.assert_close(op.solve(v).reshape(3, 4), expected, rtol=1e-3, atol=0.0)


def test_parts_that_do_not_fit(device):
    op, _ = kronecker(ARRANGEMENTS["grouped"])(Source(device))
    other = ARRANGEMENTS["bias"]
    with pytest.raises(ValueError, match="the arrangement is of shapes"):
        Kronecker(op.space, other, op.B, op.A)
    with pytest.raises(ValueError, match=r"rows should have shape \(2, 2, 2\)"):
        Kronecker(op.space, op.arrangement, op.A, op.B)
    with pytest.raises(ValueError, match=r"columns should have shape \(2, 7\)"):
        Kronecker(op.space, op.arrangement, op.B, op.A[:, 0, :3])
    with pytest.raises(ValueError, match="rows is not symmetric"):
        Kronecker(op.space, op.arrangement, op.B.triu(), op.A)
    made, _ = eigen(ARRANGEMENTS["grouped"])(Source(device))
    parts = (made.space, made.arrangement)
    with pytest.raises(ValueError, match="row_vectors .* are not orthogonal"):
        EigenKronecker(*parts, 2 * made.row_vectors, made.column_vectors, made.values)
    with pytest.raises(ValueError, match=r"values should have shape \(2, 2, 7\)"):
        EigenKronecker(*parts, made.row_vectors, made.column_vectors, made.values[0])


def test_repr():
    op, _ = kronecker(ARRANGEMENTS["grouped"], diagonal_columns=True)(Source())
    assert repr(op) == "Kronecker(28 x 28, 2 groups, B 2 x 2, A diagonal, float64, cpu; weight, bias)"


@pytest.mark.parametrize("name", ARRANGEMENTS)
@pytest.mark.parametrize("sides", [(False, False), (True, False)])
def test_sound_factors_are_inverted_without_eigenvalues(name, sides, device, monkeypatch):
    op, dense = kronecker(ARRANGEMENTS[name], *sides)(Source(device))
    wanted = torch.linalg.inv(dense)
    monkeypatch.setattr("curvature.linalg.symmetric_eigh", None)
    torch.testing.assert_close(op.inverse().to_dense(), wanted)
    torch.testing.assert_close(op.solve(dense), torch.eye(len(dense)).to(dense))


def test_singular_factors_are_named_although_cholesky_succeeds(device):
    """Rounding leaves the least eigenvalue above zero."""
    source, arrangement = Source(device), ARRANGEMENTS["matrix"]
    one = source.normal(4)
    side = (one.outer(one) + 1e-15 * torch.eye(4).to(one))[None]
    assert torch.linalg.cholesky_ex(side)[1].item() == 0
    op = Kronecker(source.layer(arrangement), arrangement, source.definite(1, d=3), side)
    with pytest.raises(ValueError, match="singular to working precision"):
        op.inverse()
