"""Inverses of Kronecker products against dense ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from curvature.kronecker import EigenInverse, KroneckerInverse, Product, Side
from curvature.kronecker.applied import DenseMatrix
from curvature.kronecker.inverses import eigen_inverses, factored_inverses
from curvature.kronecker.sides import DenseSide, DiagonalSide, SketchSide, compress

pytestmark = pytest.mark.fast

SHARE = 0.1


def spd(groups: int, size: int, rank: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    root = torch.randn(groups, size, rank or 2 * size, generator=generator, dtype=torch.float64)
    return root @ root.mT


def damped(side: Tensor) -> Tensor:
    """Each group's side plus SHARE of its mean eigenvalue."""
    whole = torch.diag_embed(side) if side.ndim == 2 else side
    return torch.stack([m + SHARE * m.trace() / len(m) * torch.eye(len(m), dtype=m.dtype) for m in whole])


# from square to thin in both directions , a diagonal, rank deficient, tiny
PAIRS = {
    "square": (spd(2, 5), spd(2, 4)),
    "wide": (spd(1, 2), spd(1, 40)),
    "tall": (spd(2, 33), spd(2, 2)),
    "diagonal": (spd(1, 3), spd(1, 50).diagonal(dim1=1, dim2=2)),
    "deficient": (spd(1, 1), spd(1, 40, rank=3)),
    "tiny": (1e-100 * spd(1, 2), 1e-120 * spd(1, 40)),
}


def product(*sides: Tensor) -> Product:
    rows, columns = (DiagonalSide(side) if side.ndim == 2 else DenseSide(side) for side in sides)
    return rows, columns


def fresh(pairs: list[tuple[Tensor, Tensor]]) -> list[KroneckerInverse]:
    products = [product(*pair) for pair in pairs]
    return factored_inverses(products, SHARE, [None] * len(pairs), [True] * len(pairs), [(True, True)] * len(pairs))


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_factored(name: str, together: bool):
    """Alone, or with all others at once."""
    rows, columns = PAIRS[name]
    found = fresh(list(PAIRS.values()))[list(PAIRS).index(name)] if together else fresh([(rows, columns)])[0]
    b, a = damped(rows), damped(columns)
    x = torch.sin(torch.arange(len(b) * b.shape[1] * a.shape[1]).double()).reshape(len(b), b.shape[1], a.shape[1])
    expected = torch.linalg.solve(b, torch.linalg.solve(a, x.mT).mT)
    torch.testing.assert_close(found(x), expected, rtol=1e-8, atol=1e-8 * expected.abs().max().item())
    spread = torch.stack([torch.linalg.cond(p) * torch.linalg.cond(q) for p, q in zip(b, a, strict=True)]).max()
    assert found.condition() == pytest.approx(float(spread), rel=1e-6)


def test_a_layer_that_nothing_reaches_has_a_finite_inverse():
    zero = torch.zeros(1, 3, 3)
    found = fresh([(zero, torch.eye(4)[None])])[0](torch.zeros(1, 3, 4))
    assert isinstance(found, Tensor) and torch.equal(found, torch.zeros(1, 3, 4))


def test_in_a_basis():
    values = torch.arange(1.0, 7.0).reshape(1, 2, 3)
    left, right = torch.linalg.qr(torch.randn(1, 2, 2))[0], torch.linalg.qr(torch.randn(1, 3, 3))[0]
    x = torch.ones(1, 2, 3)
    expected = (
        torch.kron(left[0], right[0]) @ torch.diag(values.flatten()) @ torch.kron(left[0], right[0]).T @ x.flatten()
    )
    torch.testing.assert_close(EigenInverse(DenseMatrix(left), DenseMatrix(right), values)(x).flatten(), expected)


def test_singular_factors_without_damping():
    """The pseudo-inverse: what no sample reaches does not move."""
    rows, columns = spd(1, 3).float(), spd(1, 6, rank=2).float()
    x = rows @ torch.ones(1, 3, 6) @ columns  # within what the factors reach
    torch.testing.assert_close(
        eigen_inverses([product(rows, columns)], 0.0)[0](x), torch.ones(1, 3, 6) @ projector(columns)
    )
    zero = eigen_inverses([product(torch.zeros(1, 3, 3), columns)], 0.0)[0](torch.ones(1, 3, 6))
    assert isinstance(zero, Tensor) and torch.equal(zero, torch.zeros(1, 3, 6))


def projector(side: Tensor) -> Tensor:
    return side @ torch.linalg.pinv(side, rtol=1e-5)


def test_a_diagonal_beside_a_sketch():
    """One side is its diagonal, the other is too large to write down."""
    root = torch.sin(torch.arange(4 * 600.0).double()).reshape(4, 600)
    diagonal = torch.tensor([[1.0, 2.0, 5.0]]).double()
    x = torch.cos(torch.arange(3 * 600.0).double()).reshape(1, 3, 600)
    sides: tuple[Side, Side] = DiagonalSide(diagonal), SketchSide(compress(SketchSide.of_rows(root).entries))
    found = eigen_inverses([sides], 0.3)[0](x)
    dense = torch.kron(diagonal[0].diag(), root.T @ root) + 0.3 * torch.eye(1800).double()
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found.flatten(), torch.linalg.solve(dense, x.flatten()))


def test_sides_that_are_not_due_stay_as_they_are():
    """Each product is of one side of before and one of now; without a previous inverse both are made."""
    old, new = (spd(1, 5), spd(1, 4)), (spd(1, 5, 7), spd(1, 4, 6))
    both = [product(*new)] * 3
    before, now = fresh([old, new])
    due = [(False, True), (True, False), (False, False)]
    found = factored_inverses(both, SHARE, [before, before, None], [True] * 3, due)
    expected = [(before.rows, now.columns), (now.rows, before.columns), (now.rows, now.columns)]
    for own, (rows, columns) in zip(found, expected, strict=True):
        close = torch.testing.assert_close
        close(own.rows.entries, rows.entries), close(own.columns.entries, columns.entries)
    assert found[0].rows is before.rows and found[1].columns is before.columns
