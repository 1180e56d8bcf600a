"""Inverses of Kronecker products, and sides too large to write down, against dense matrices and what they stand for."""

import io
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvature import capture
from curvature.kronecker import KroneckerInverse, Product
from curvature.kronecker.inverses import eigen_inverses, factored_inverses
from curvature.kronecker.sides import (
    MAX_SKETCH_ROWS,
    SKETCH_RANK,
    DenseSide,
    DiagonalSide,
    SketchSide,
    compress,
    sketch_spectrum,
)
from curvature.preconditioners import BatchFacts, BlockDiagonalCurvature
from curvature.preconditioners.kronecker import KroneckerBlock
from optimizers import EKFAC, KFAC
from support.cases.case import seeded
from support.running_blocks import columns_of, rows_of
from support.training import train

D = 600
LARGE = 550  # a limit for the tests, so that layers of D inputs or outputs have sketches


def rows(count: int, seed: int = 0, decay: float = 0.0) -> Tensor:
    """Normal vectors (count, D), entry k scaled by k^-decay."""
    with seeded(seed):
        return torch.randn(count, D, dtype=torch.float64) / torch.arange(1, D + 1) ** decay


def dense(sketch: Tensor) -> Tensor:
    """What it stands for, by the definition of the module."""
    return sketch[0, :-1].T @ sketch[0, :-1] + sketch[0, -1].square().mean() * torch.eye(D).double()


def test_few_rows_are_kept_exactly():
    a, b = rows(40), rows(50, seed=1)
    first = SketchSide.of_rows(a).scaled(1 / 40).averaged(None, 1.0)
    side = SketchSide.of_rows(b).scaled(1 / 50).averaged(first, 0.25)
    found = side.entries
    torch.testing.assert_close(dense(found), 0.75 * a.T @ a / 40 + 0.25 * b.T @ b / 50)
    gram = found[0, :-1] @ found[0, :-1].T
    torch.testing.assert_close(gram, torch.diag(gram.diagonal()), rtol=0, atol=1e-9 * gram.max().item())
    torch.testing.assert_close(side.diagonal().sum(), dense(found).trace())


def test_what_is_left_out_keeps_the_trace():
    a = rows(MAX_SKETCH_ROWS, decay=1.0)
    found = compress(SketchSide.of_rows(a).entries)
    assert found.shape == (1, SKETCH_RANK + 1, D)
    torch.testing.assert_close(dense(found).trace(), a.square().sum())
    values = torch.linalg.eigvalsh(a.T @ a).flip(0)
    _, kept, rest = sketch_spectrum(found)
    torch.testing.assert_close(kept.sort(descending=True).values - rest, values[:SKETCH_RANK])
    torch.testing.assert_close(rest, values[SKETCH_RANK:].sum() / D)


def test_many_rows_are_mixed():
    """4,000 rows as ROWS: the expected moment is theirs; the largest eigenvalue comes out within a tenth."""
    a = rows(4000, decay=1.0)
    found = SketchSide.of_rows(a).entries
    assert found.shape == (1, MAX_SKETCH_ROWS + 1, D)
    torch.testing.assert_close(found.square().sum(), a.square().sum(), rtol=0.1, atol=0)
    torch.testing.assert_close(
        sketch_spectrum(compress(found))[1].max(), torch.linalg.eigvalsh(a.T @ a)[-1], rtol=0.1, atol=0
    )


def test_sums_stay_small():
    side = SketchSide.of_rows(rows(MAX_SKETCH_ROWS))
    for k in range(1, 5):
        side = side.add_(SketchSide.of_rows(rows(MAX_SKETCH_ROWS, seed=k)))
    total = side.entries
    assert total.shape[1] <= 2 * MAX_SKETCH_ROWS + 1
    exact = sum(rows(MAX_SKETCH_ROWS, seed=k).square().sum() for k in range(5))
    torch.testing.assert_close(total.square().sum(), exact)


def whole_side(size: int) -> Tensor:
    with seeded(size):
        root = torch.randn(1, size, 2 * size, dtype=torch.float64)
    return root @ root.mT / size


@pytest.mark.parametrize("which", ["columns", "rows", "both", "beside a diagonal"])
@pytest.mark.parametrize("how", ["share", "damping"])
def test_inverses_of_sketches(which: str, how: str):
    """Against those of the matrices that the sketches stand for."""
    large = SketchSide.of_rows(rows(60, decay=0.5)).scaled(1 / 60).averaged(None, 1.0)
    other = SketchSide.of_rows(rows(30, seed=1)).scaled(1 / 30).averaged(None, 1.0)
    small = DenseSide(whole_side(20))
    diagonal = DiagonalSide(torch.tensor([[1.0, 2.0, 5.0]]).double())
    products: dict[str, Product] = {
        **{"columns": (small, large), "rows": (large, small), "both": (other, large)},
        "beside a diagonal": (diagonal, large),
    }
    product = products[which]
    b, a = (dense(side.entries) if isinstance(side, SketchSide) else side.dense()[0] for side in product)
    x = torch.sin(torch.arange(float(len(b) * len(a))).double()).reshape(1, len(b), len(a))
    if how == "share":
        shares = 0.05, 0.2
        (found,) = factored_inverses([product], [shares], [None], [True], [(True, True)])
        pairs = zip((b, a), shares, strict=True)
        one, two = (m + share * m.trace() / len(m) * torch.eye(len(m)).double() for m, share in pairs)
        expected = torch.linalg.solve(one, x[0]) @ torch.linalg.inv(two)
        spread = torch.linalg.cond(one) * torch.linalg.cond(two)
    else:
        found = eigen_inverses([product], 0.3)[0]
        (u, p), (v, q) = torch.linalg.eigh(b), torch.linalg.eigh(a)
        damped = u[:, None] * v + 0.3
        expected = p @ ((p.T @ x[0] @ q) / damped) @ q.T
        spread = damped.max() / damped.min()
    torch.testing.assert_close(found(x)[0], expected, rtol=1e-6, atol=1e-8 * expected.abs().max().item())
    assert found.condition() == pytest.approx(float(spread), rel=1e-6)


def wide_net() -> nn.Module:
    with seeded(0):
        return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 3))


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = rows(64, seed=step, decay=0.5).float()
    return x, x[:, :3].sign() * x[:, 3:6].abs().sqrt()


def mean_loss(model: nn.Module, opt: torch.optim.Optimizer, first: int, last: int) -> float:
    """Of the last twelve steps."""
    losses = [train(model, opt, F.mse_loss, *batch(step), 1)[0] for step in range(first, last)]
    return statistics.fmean(losses[-12:])


OPTIONS: list[tuple[type[KFAC], dict[str, Any]]] = [(KFAC, {}), (KFAC, {"damping": 1e-3}), (EKFAC, {})]


@pytest.mark.training_run
@pytest.mark.parametrize(("optimizer", "options"), OPTIONS)
def test_training(monkeypatch: pytest.MonkeyPatch, optimizer: type[KFAC], options: dict[str, Any]):
    """With sketches the loss falls about as with KFAC's whole sides; runs resume bitwise."""
    monkeypatch.setattr("curvature.preconditioners.block_diagonal.MAX_SIDE", LARGE)
    model = wide_net()
    opt = optimizer(model, **options)
    mean_loss(model, opt, 0, 12)
    state = io.BytesIO()
    torch.save((model.state_dict(), opt.state_dict()), state)
    found = mean_loss(model, opt, 12, 24)
    other = wide_net()
    resumed = optimizer(other, **options)
    state.seek(0)
    for part, saved in zip((other, resumed), torch.load(state, weights_only=True), strict=True):
        part.load_state_dict(saved)
    assert mean_loss(other, resumed, 12, 24) == found
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))
    assert ("too large for an eigenbasis" in opt.report()) == (optimizer is EKFAC)
    monkeypatch.setattr("curvature.preconditioners.block_diagonal.MAX_SIDE", 10 * D)
    whole = wide_net()
    expected = mean_loss(whole, KFAC(whole, **options), 0, 24)
    start = statistics.fmean((wide_net()(x) - y).square().mean().item() for x, y in map(batch, range(12, 24)))
    # the mean begins half-way
    assert found < 0.85 * start and found < 1.2 * expected, (start, expected, found)


def test_a_layer_of_fifty_thousand_inputs():
    """Memory is that of its directions; the report says so."""
    model = nn.Linear(50_000, 4)
    opt = KFAC(model)
    with seeded(0):
        x = torch.randn(32, 50_000)
    for _ in range(2):
        opt.zero_grad()
        (model(x) - 1).square().mean().backward()
        opt.step()
    assert "A 50001x50001 by" in opt.report()
    assert sum(block.bytes for block in opt.store.blocks) < 3 * SKETCH_RANK * 50_000 * 4


@pytest.mark.parametrize(
    ("count", "inputs", "stride", "sharing"), [(64, 2, 4, "expand"), (24, 2, 1, "expand"), (64, 8, 1, "reduce")]
)
def test_activations_of_some_samples_are_enough(count: int, inputs: int, stride: int, sharing: str):
    """Of 64 samples with 400 places each and 3 inputs, every fourth is looked at: 16 of them. Of 24 samples, all.

    Places that are averaged first are one sample: 64 rows for 9 inputs are all looked at.
    """
    with seeded(0):
        layer, x = nn.Conv1d(inputs, 4, 1), torch.randn(count, inputs, 400)
    factors = BlockDiagonalCurvature(sharing=sharing)
    with capture(layer) as tape:
        out = layer(x)
    factors.update_average(factors.measure(tape, [out], [out.detach()[None]], BatchFacts(count)), 0.9)
    (block,) = factors.blocks
    assert isinstance(block, KroneckerBlock)
    # in double precision: 25,600 places summed in single precision are off by 7e-6 themselves
    a, b = torch.cat([x, torch.ones(count, 1, 400)], 1)[::stride].double(), out.detach().double()
    a, b = (t.mean(2, keepdim=True) if sharing == "reduce" else t for t in (a, b))
    a, b = (t.mT.flatten(0, 1) for t in (a, b))
    torch.testing.assert_close(columns_of(block)[0], (a.T @ a / len(a)).float())
    if sharing == "expand":
        torch.testing.assert_close(rows_of(block)[0], (b.T @ b / count).float())


SHARE = 0.1


def spd(groups: int, size: int, rank: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    root = torch.randn(groups, size, rank or 2 * size, generator=generator, dtype=torch.float64)
    return root @ root.mT


def damped(side: Tensor, share: float) -> Tensor:
    """Each group's side plus a share of its mean eigenvalue."""
    whole = torch.diag_embed(side) if side.ndim == 2 else side
    return torch.stack([m + share * m.trace() / len(m) * torch.eye(len(m), dtype=m.dtype) for m in whole])


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


def fresh(
    pairs: list[tuple[Tensor, Tensor]], shares: Sequence[tuple[float, float]] | None = None
) -> list[KroneckerInverse]:
    products = [product(*pair) for pair in pairs]
    shares = shares or [(SHARE, SHARE)] * len(pairs)
    return factored_inverses(products, shares, [None] * len(pairs), [True] * len(pairs), [(True, True)] * len(pairs))


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_factored(name: str, together: bool):
    """Alone, or with all others at once, each side with a share of its own."""
    (rows, columns), number = PAIRS[name], list(PAIRS).index(name)
    shares = [(SHARE * (1 + k), SHARE / (2 + k)) for k in range(len(PAIRS))]
    found = fresh(list(PAIRS.values()), shares)[number] if together else fresh([(rows, columns)], [shares[number]])[0]
    b, a = damped(rows, shares[number][0]), damped(columns, shares[number][1])
    x = torch.sin(torch.arange(len(b) * b.shape[1] * a.shape[1]).double()).reshape(len(b), b.shape[1], a.shape[1])
    expected = torch.linalg.solve(b, torch.linalg.solve(a, x.mT).mT)
    torch.testing.assert_close(found(x), expected, rtol=1e-8, atol=1e-8 * expected.abs().max().item())
    spread = torch.stack([torch.linalg.cond(p) * torch.linalg.cond(q) for p, q in zip(b, a, strict=True)]).max()
    assert found.condition() == pytest.approx(float(spread), rel=1e-6)


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
