"""Large sides are kept as triangles: the same matrices in less memory."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvature.kronecker.sides import PACKED_MIN_SIDE, STORAGES, DenseSide, PackedSide, storage_of
from optimizers import KFAC
from support.training import train

LARGE = PACKED_MIN_SIDE + 1


def symmetric(groups: int, d: int) -> Tensor:
    x = torch.randn(groups, d, d, dtype=torch.float64)
    return x + x.mT


def blocks_of(side: Tensor, cut: tuple[int, ...]) -> list[Tensor]:
    return [side[sum(cut[:k]) : sum(cut[: k + 1]), sum(cut[:k]) : sum(cut[: k + 1])] for k in range(len(cut))]


@pytest.mark.parametrize(("d", "blocks"), [(2, (2,)), (4, (2, 2)), (LARGE, (LARGE,))])
def test_large_sides_and_blocks_are_packed(d: int, blocks: tuple[int, ...]):
    matrix = symmetric(2, d)
    kind = STORAGES[storage_of(blocks, 2048, False, True)]
    side = kind.of(matrix, blocks)
    assert type(side) is (DenseSide if blocks == (2,) else PackedSide)
    assert storage_of(blocks, math.inf, False, True) == "dense"  # of sums over data
    assert side.entries.numel() + 2 * d**2 == kind.most_entries(2, blocks) and side.sizes == blocks
    assert torch.equal(side.dense(), torch.stack([torch.block_diag(*blocks_of(own, blocks)) for own in matrix]))


def test_bytes_are_those_of_triangles():
    model = nn.Sequential(nn.Linear(LARGE, LARGE, bias=False), nn.Tanh())
    opt = KFAC(model)
    train(model, opt, F.cross_entropy, torch.randn(4, LARGE), torch.randint(3, (4,)), 1)
    (block,) = opt.store.blocks
    kept = 2 * LARGE * (LARGE + 1) // 2 + 2 * LARGE**2
    assert block.expected_bytes == 4 * kept >= block.bytes >= 4 * (kept - LARGE**2)
