"""Sides kept as triangles: the same numbers, and no more memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvature.kronecker.sides
from curvature.kronecker.sides import PACKED_MIN_SIDE, DenseSide, PackedSide
from optimizers import EKFAC, KFAC

LARGE = PACKED_MIN_SIDE + 1


def symmetric(groups: int, d: int) -> Tensor:
    x = torch.randn(groups, d, d, dtype=torch.float64)
    return x + x.mT


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("d", [1, 2, 3, 4, 7, 8])
def test_a_side_is_its_lower_triangle(d: int, groups: int):
    side = symmetric(groups, d)
    side[:, 0, -1] = torch.nan if d > 1 else 1.0  # above the diagonal
    packed = PackedSide.of(side, (d,))
    rows, columns = torch.tril_indices(d, d)
    lower = side[:, rows, columns]
    assert torch.equal(packed.entries.sort(1).values, lower.sort(1).values)
    assert torch.equal(packed.dense(), side.tril() + side.tril(-1).mT)
    assert torch.equal(packed.lower().tril(), side.tril())
    assert torch.equal(packed.diagonal(), side.diagonal(dim1=1, dim2=2)) and (len(packed), packed.size) == (groups, d)


@pytest.mark.parametrize("cut", [(2, 2, 1), (3, 3), (5,)])
def test_of_diagonal_blocks_nothing_else_is_kept(cut: tuple[int, ...]):
    side = symmetric(2, sum(cut))
    packed, expected = PackedSide.of(side, cut), torch.stack([torch.block_diag(*blocks_of(own, cut)) for own in side])
    assert torch.equal(packed.lower().tril(), expected.tril())
    assert torch.equal(packed.dense(), expected) and packed.entries.shape == (2, sum(n * (n + 1) // 2 for n in cut))
    assert torch.equal(packed.diagonal(), side.diagonal(dim1=1, dim2=2))


def blocks_of(side: Tensor, cut: tuple[int, ...]) -> list[Tensor]:
    return [side[sum(cut[:k]) : sum(cut[: k + 1]), sum(cut[:k]) : sum(cut[: k + 1])] for k in range(len(cut))]


@pytest.mark.parametrize(("d", "blocks"), [(2, (2,)), (4, (2, 2)), (LARGE, (LARGE,))])
def test_large_sides_and_blocks_are_packed(d: int, blocks: tuple[int, ...]):
    matrix = symmetric(2, d)
    side = DenseSide.of(matrix, blocks)
    assert type(side) is (DenseSide if blocks == (2,) else PackedSide)
    assert side.entries.numel() + 2 * d**2 == DenseSide.most_entries(2, blocks) and side.sizes == blocks
    assert torch.equal(side.dense(), torch.stack([torch.block_diag(*blocks_of(own, blocks)) for own in matrix]))


def step_on(model: nn.Module, opt: KFAC, x: Tensor, y: Tensor) -> None:
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    opt.step()


# renewed at every step: packed or not, averages change by about as much, but not by the same number
EVERY = {"factor_every": 1, "decompose_every": 1}


@pytest.mark.parametrize("options", [{}, {"block_size": 5}])
@pytest.mark.parametrize("make", [KFAC, EKFAC])
@pytest.mark.parametrize("tied", [False, True])
def test_training_is_the_same(make: Any, options: Any, tied: bool, monkeypatch: pytest.MonkeyPatch):
    """Packed and not, up to the rounding of sums; large sides alone or together."""
    found = []
    for size, alone in ((1, 1), (1, 512), (1000, 512)):
        monkeypatch.setattr(curvature.kronecker.sides, "PACKED_MIN_SIDE", size)
        monkeypatch.setattr("curvature.kronecker.inverses.JOINED_MAX_SIDE", alone)
        torch.manual_seed(0)
        first, last = nn.Linear(9, 9, bias=not tied), nn.Linear(9, 9, bias=not tied)
        last.weight = first.weight if tied else last.weight
        model = nn.Sequential(first, nn.Tanh(), last, nn.Tanh(), nn.Linear(9, 3)).double()
        opt = make(model, **EVERY, **options)
        for _ in range(6):
            step_on(model, opt, torch.randn(8, 9, dtype=torch.float64), torch.randint(3, (8,)))
        (kept,) = {type(block.sides[0]) for block in opt.store.blocks if block.names[0] == "0.weight"}
        assert (kept is PackedSide) == (size == 1 or bool(options))
        found.append([p.detach().clone() for p in model.parameters()])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-7, atol=1e-9)


def test_bytes_are_those_of_triangles():
    model = nn.Linear(LARGE, LARGE, bias=False)
    opt = KFAC(model)
    step_on(model, opt, torch.randn(4, LARGE), torch.randint(3, (4,)))
    (block,) = opt.store.blocks
    kept = 2 * LARGE * (LARGE + 1) // 2 + 2 * LARGE**2
    assert block.expected_bytes == 4 * kept >= block.bytes >= 4 * (kept - LARGE**2)
