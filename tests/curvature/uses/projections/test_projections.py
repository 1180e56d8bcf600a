"""Projections against explicit matrices times the gradients of samples that run alone."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature
import curvature.terms.contractions
import curvature.uses.projections
from curvature.uses.projections import Projection
from support.cases.case import Raw, seeded
from support.memory import Largest
from support.oracles.brute_force import per_sample_gradients, trainable

LOSS = nn.MSELoss()
PROJECTIONS = [curvature.SignProjection(6), curvature.NormalProjection(6), curvature.KroneckerProjection(2)]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small layers have several."""
    monkeypatch.setattr(curvature.uses.projections, "BLOCK_ENTRIES", 50)
    monkeypatch.setattr(curvature.terms.contractions, "PIECE_ENTRIES", 70)


def matrix(projection: Projection, model: nn.Module) -> Tensor:
    """(P, K), from the projections of unit vectors."""
    parameters = trainable(model)
    sizes = [p.numel() for p in parameters.values()]
    units = torch.eye(sum(sizes), dtype=torch.float64).split(sizes, 1)
    shaped = {name: u.reshape(-1, *p.shape) for (name, p), u in zip(parameters.items(), units, strict=True)}
    return projection(shaped)


def rows(model: nn.Module, loss: Any, x: Any, y: Tensor) -> Tensor:
    return torch.cat([g.flatten(1) for g in per_sample_gradients(model, loss, x, y).values()], 1)


def network() -> tuple[nn.Module, Tensor, Tensor]:
    """Every form of term: places, one place, a bias, a grouped convolution, scales."""
    with seeded(0):
        inner = [nn.Conv2d(2, 4, 3, groups=2), nn.GroupNorm(2, 4), nn.Conv2d(4, 3, 2), nn.Tanh(), nn.Flatten()]
        model = nn.Sequential(*inner, nn.Linear(12, 5), nn.Linear(5, 3)).double()
        return model, torch.randn(9, 2, 5, 5).double(), torch.randn(9, 3).double()


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("second", [4, 2], ids=["apart", "overlapping"])
def test_rows_that_are_read_separately(second: int) -> None:
    def run(m: nn.Module, x: Tensor) -> Tensor:
        return F.linear(x, m.w[:4]).tanh() + F.linear(x, m.w[second : second + 4])

    with seeded(0):
        model, x = Raw(run, w=nn.Parameter(torch.randn(8, 5))).double(), torch.randn(6, 3, 5).double()
        y = torch.randn(6, 3, 4).double()
    wanted = rows(model, LOSS, x, y)
    for projection in PROJECTIONS:
        found = curvature.per_sample_projections(model, LOSS, x, y, projection)
        torch.testing.assert_close(found, wanted @ matrix(projection, model))


@pytest.mark.fast
@pytest.mark.parametrize("projection", PROJECTIONS, ids=lambda projection: type(projection).__name__)
def test_neither_batch_nor_pieces_matter(projection: Projection, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = network()
    wanted = rows(model, LOSS, x, y) @ matrix(projection, model)
    model, x, y = model.to(device), x.to(device), y.to(device)
    for entries in (60, 1 << 20):
        monkeypatch.setattr(curvature.terms.contractions, "PIECE_ENTRIES", entries)
        parts = [slice(0, 9), slice(0, 1), slice(2, 8), slice(4, 4)]
        for part in parts:
            found = curvature.per_sample_projections(model, LOSS, x[part], y[part], projection)
            assert found.device.type == torch.device(device).type
            torch.testing.assert_close(found.cpu(), wanted[part])


def test_maps_stay_what_they_are() -> None:
    """Files of projections outlive the program: these numbers must not change."""
    signs = lambda k, seed: (curvature.SignProjection(k, seed)({"a.weight": torch.eye(3)}) * k**0.5).round().int()
    assert signs(6, 0).tolist() == [[-1, 1, -1, -1, 1, -1], [-1, 1, 1, 1, -1, -1], [1, -1, 1, -1, 1, 1]]
    assert signs(1 << 17, 3)[2, :6].tolist() == [-1, -1, 1, 1, -1, -1]  # the first row of the second block
    kept = torch.zeros(1, 3, 3).index_put_((torch.tensor(0), torch.tensor(2), torch.tensor(1)), torch.tensor(4.0))
    assert curvature.KroneckerProjection(2)({"a.weight": kept * 0.5}).tolist() == [[-1, -1, 1, 1]]


def test_sides_of_a_kronecker_projection() -> None:
    """``P_B b a^T P_A^T`` by hand; short sides stay as they are."""
    model, x, y = nn.Linear(7, 3).double(), torch.randn(4, 2, 7).double(), torch.randn(4, 2, 3).double()
    projection = curvature.KroneckerProjection(4)
    unit = matrix(projection, model)
    right = unit[:7, :4]  # from the entries of the first output, which is kept
    assert projection.columns(model) == {"weight": slice(0, 12), "bias": slice(12, 15)}
    torch.testing.assert_close(unit[:21, :12], torch.kron(torch.eye(3).double(), right))
    torch.testing.assert_close(unit[21:, 12:], torch.eye(3).double())
    assert right.abs().unique().tolist() == [0.5] and not unit[:21, 12:].any() and not unit[21:, :12].any()
    b = 2 * (model(x) - y) / 6
    wanted = torch.einsum("nto,nti,ik->nok", b, x, right).flatten(1)
    found = curvature.per_sample_projections(model, LOSS, x, y, projection)
    torch.testing.assert_close(found[:, :12], wanted)


def test_inner_products_are_right_on_average() -> None:
    gradients = per_sample_gradients(*network()[:1], LOSS, *network()[1:])
    g = torch.cat([own.flatten(1) for own in gradients.values()], 1)
    for make in (curvature.SignProjection, curvature.NormalProjection, curvature.KroneckerProjection):
        found = torch.stack([p @ p.T for p in (make(4, seed)(gradients) for seed in range(100))])
        off = (found.mean(0) - g @ g.T) / (found.std(0) / 100**0.5)
        assert off.abs().max() < 4.5
        if make is not curvature.KroneckerProjection:
            norms = g.norm(dim=1)
            bound = ((norms[:, None] * norms) ** 2 + (g @ g.T) ** 2).div(4).sqrt()
            assert (found.std(0) < 1.3 * bound).all()


def test_neither_gradients_nor_map_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a layer of 14,400 weights at 30 samples, with a map to 64."""
    monkeypatch.setattr(curvature.uses.projections, "BLOCK_ENTRIES", 10_000)
    monkeypatch.setattr(curvature.terms.contractions, "PIECE_ENTRIES", 20_000)
    model, x, y = nn.Linear(120, 120), torch.randn(30, 2, 120), torch.randn(30, 2, 120)
    for projection, most in ((curvature.SignProjection(64), 20_000), (curvature.KroneckerProjection(8), 14_400)):
        curvature.per_sample_projections(model, LOSS, x, y, projection)
        with Largest() as seen:
            curvature.per_sample_projections(model, LOSS, x, y, projection)
        assert 7_200 <= seen.entries <= most


@pytest.mark.usefixtures("small_pieces")
def test_rows_that_are_not_looked_up_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    kept = curvature.uses.projections._signs
    monkeypatch.setattr(curvature.uses.projections, "_signs", lambda *a: drawn.append(a[0]) or kept(*a))
    model = Raw(lambda m, x: m.table(x).sum(1), table=nn.Embedding(1000, 5)).double()
    x, y = torch.tensor([[3, 7], [7, 999]]), torch.randn(2, 5).double()
    found = curvature.per_sample_projections(model, LOSS, x, y, curvature.SignProjection(10))
    assert sum(drawn) == 3 * 50
    torch.testing.assert_close(found, rows(model, LOSS, x, y) @ matrix(curvature.SignProjection(10), model))


def test_what_is_refused() -> None:
    model, x, y = network()
    with pytest.raises(TypeError, match=r"projection: expected a SignProjection.*found a int"):
        curvature.per_sample_projections(model, LOSS, x, y, 64)  # type: ignore[arg-type]
    for make, name in ((curvature.SignProjection, "k"), (curvature.KroneckerProjection, "side")):
        for size in (0, -1, 2.5, True):
            with pytest.raises(ValueError, match=rf"^{name}: expected a positive integer, found {size}"):
                make(size)
    with pytest.raises(ValueError, match="gradients: no parameter"):
        curvature.SignProjection(3)({})
    with pytest.raises(ValueError, match="BatchNorm"):
        curvature.per_sample_projections(nn.BatchNorm1d(3).double(), LOSS, y, y, curvature.SignProjection(3))
