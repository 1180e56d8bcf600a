"""What only Kronecker-factored matrices have; their algebra is in test_operators.py."""

import pytest
import torch

from curvature.operators.kronecker import EigenKronecker, Kronecker
from support.structures import ARRANGEMENTS, Source, eigen, kronecker

pytestmark = pytest.mark.fast

D = 0.3


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


@pytest.mark.parametrize("name", ARRANGEMENTS)
@pytest.mark.parametrize("sides", [(False, False), (True, False)])
def test_sound_factors_are_inverted_without_eigenvalues(name, sides, device, monkeypatch):
    op, dense = kronecker(ARRANGEMENTS[name], *sides)(Source(device))
    wanted = torch.linalg.inv(dense)
    monkeypatch.setattr("curvature.linalg.symmetric_eigh", None)
    torch.testing.assert_close(op.inverse().to_dense(), wanted)
    torch.testing.assert_close(op.solve(dense), torch.eye(len(dense)).to(dense))
