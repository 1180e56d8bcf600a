"""Inverses by the largest eigenvalues against those by all of them."""

import pytest
import torch
from torch import Tensor

from curvature.kronecker import KroneckerInverse, LowRankMatrix
from curvature.kronecker.inverses import factored_inverses
from curvature.kronecker.sides import DenseSide
from curvature.linalg import ByDevice
from curvature.linalg.low_rank import KEEP_FACTOR, LOW_RANK_MIN_SIZE, MAX_RANK_DIVISOR, low_rank_inverses
from optimizers import KFAC
from support.cases.case import seeded

pytestmark = pytest.mark.fast

SIZE, DAMPING, BOTH = 300, 0.05, [(True, True)]


def with_values(values: Tensor, seed: int = 0) -> Tensor:
    """A symmetric matrix of these eigenvalues, scaled to a mean of one."""
    with seeded(seed):
        basis = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64)).Q
    return (basis * values / values.mean()) @ basis.mT


def power_law(exponent: float) -> Tensor:
    return torch.arange(1, SIZE + 1, dtype=torch.float64) ** -exponent


def sampled_identity() -> Tensor:
    """The spectrum of the mean of 6 SIZE outer products of normal vectors, from 0.35 to 1.98."""
    with seeded(1):
        x = torch.randn(SIZE, 6 * SIZE, dtype=torch.float64)
    return torch.linalg.eigvalsh(x @ x.mT)


def relative(found: tuple[Tensor, Tensor], matrix: Tensor) -> Tensor:
    """Eigenvalues of the inverse found, in units of the one looked for."""
    vectors, shift = found
    root = torch.linalg.cholesky(matrix + DAMPING * torch.eye(len(matrix)).double())
    return torch.linalg.eigvalsh(root.mT @ (shift * (torch.eye(len(matrix)).double() - vectors @ vectors.mT)) @ root)


def low_rank_inverse(matrix: Tensor, damping: float, start: Tensor | None) -> tuple[Tensor, Tensor] | None:
    return low_rank_inverses([lambda: matrix], [damping], [start])[0]


@pytest.mark.parametrize("values", [power_law(1), power_law(2), sampled_identity()], ids=["1/k", "1/k^2", "identity"])
def test_within_a_factor_of_the_inverse(values: Tensor):
    matrix = with_values(values)
    found = low_rank_inverse(matrix, DAMPING, None)
    assert found is not None and found[0].shape[1] <= SIZE / MAX_RANK_DIVISOR
    assert relative(found, matrix).min() > 0.3 and relative(found, matrix).max() < 1.1 * KEEP_FACTOR


def test_follows_a_matrix_that_turns():
    """One pass from the last basis is enough after a small turn, and what it misses counts in the rest."""
    one, other = with_values(power_law(1.5)), with_values(power_law(1.5), seed=1)
    first = low_rank_inverse(one, DAMPING, None)
    assert first is not None
    moved = 0.9 * one + 0.1 * other
    for matrix in (moved, other):
        found = low_rank_inverse(matrix, DAMPING, first[0])
        assert found is not None
        assert relative(found, matrix).min() > 0.3 and relative(found, matrix).max() < 1.1 * KEEP_FACTOR


def test_sides_of_an_inverse():
    """Rows by their largest eigenvalues, columns by Cholesky; again, from the last; condition."""
    rows, columns = with_values(power_law(1.5))[None], with_values(torch.arange(1.0, 21.0).double())[None]
    product = DenseSide(rows), DenseSide(columns)
    (first,) = factored_inverses([product], [(DAMPING, DAMPING)], [None], [True], BOTH)
    (found,) = factored_inverses([product], [(DAMPING, DAMPING)], [first], [False], BOTH)
    (whole,) = factored_inverses([product], [(DAMPING, DAMPING)], [None], [False], BOTH)
    assert isinstance(found.rows, LowRankMatrix) and first.rows.entries.shape == found.rows.entries.shape
    assert not any(isinstance(x, LowRankMatrix) for x in (found.columns, whole.rows, whole.columns))
    x = torch.sin(torch.arange(20.0 * SIZE).double()).reshape(1, SIZE, 20)
    columns = columns + DAMPING * columns[0].trace() / 20 * torch.eye(20)
    vectors, shift = low_rank_inverse(rows[0], DAMPING, None) or (x, x)
    expected = (shift * (torch.eye(SIZE).double() - vectors @ vectors.mT)) @ x[0] @ torch.linalg.inv(columns[0])
    torch.testing.assert_close(first(x)[0], expected)
    mirrored = KroneckerInverse(first.columns, first.rows)
    torch.testing.assert_close(mirrored(x.mT), first(x).mT)
    spread = torch.linalg.eigvalsh(shift * (torch.eye(SIZE).double() - vectors @ vectors.mT))
    cond = float(spread.max() / spread.min()) * float(torch.linalg.cond(columns[0]))
    assert first.condition() == pytest.approx(cond, rel=1e-6)


@pytest.mark.training_run
def test_in_training(monkeypatch: pytest.MonkeyPatch):
    """Wide layers: the loss falls as with whole inverses, and the report says what was done."""
    found, ends, reports = [], [], []
    for large in (LOW_RANK_MIN_SIZE, ByDevice(SIZE * 100, SIZE * 100)):
        monkeypatch.setattr("curvature.linalg.LOW_RANK_MIN_SIZE", large)
        with seeded(0):
            model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Tanh(), torch.nn.Linear(300, 1))
            x = torch.randn(64, 300) / torch.arange(1, 301)
        opt = KFAC(model)
        losses = []
        for _ in range(30):
            opt.zero_grad()
            loss = (model(x) - x[:, :1]).square().mean()
            loss.backward()
            opt.step()
            losses.append(loss.item())
        found.append(sum(losses) / 30)  # where single steps end is chance
        ends.append(sum(losses[-10:]) / 10)
        reports.append(opt.report())
    assert found[0] < 1.3 * found[1] and max(ends) < 0.05 * losses[0], (found, ends)
    assert "A 301x301 by" in reports[0] and " eigenvalues" in reports[0] and " eigenvalues" not in reports[1]
