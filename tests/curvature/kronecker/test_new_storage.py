"""Forms of storage: one that is a class and nothing else; sides kept as triangles, the same in less memory."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvature.kronecker import Side
from curvature.kronecker.applied import DiagonalMatrix, Matrix
from curvature.kronecker.sides import PACKED_MIN_SIDE, STORAGES, DenseSide, PackedSide, storage_of
from optimizers import EKFAC, KFAC
from support.training import train

SHARE = 0.05


@dataclass(frozen=True, eq=False)
class ScaledIdentity(Side):
    """Multiples of the identity, entries (g, 1)."""

    rows: int

    name = "scaled identity"
    is_diagonal = True

    @classmethod
    def of(cls, moment: Tensor, blocks: Sequence[int]) -> Side:
        return cls(moment.mean(1, keepdim=True), sum(blocks))

    @classmethod
    def of_entries(cls, entries: Tensor, blocks: Sequence[int]) -> Side:
        return cls(entries, sum(blocks))

    @property
    def size(self) -> int:
        return self.rows

    def diagonal(self) -> Tensor:
        return self.entries.expand(-1, self.rows)

    def dense(self) -> Tensor:
        return torch.diag_embed(self.diagonal())


class Multiple(Matrix):
    """The same as a matrix to multiply with."""

    name = "multiple"

    def left(self, x: Tensor, own: bool = False) -> Tensor:
        return self.entries[:, :, None] * x

    right = left

    def spectrum(self) -> Tensor:
        return self.entries


class QuickIdentity(ScaledIdentity):
    """With an inverse and a basis of its own."""

    name = "quick identity"

    def inverse(self, share: float) -> Matrix:
        return Multiple(1 / ((1 + share) * self.mean_eigenvalue()[:, None]))

    def eigenbasis(self) -> tuple[Tensor, Matrix]:
        return self.diagonal(), DiagonalMatrix(torch.ones_like(self.diagonal()))


def trained(kind: type[KFAC], steps: int = 3) -> tuple[nn.Module, KFAC]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    opt = kind(model, factor_every=1, decompose_every=1)
    go_on(model, opt, steps)
    return model, opt


def go_on(model: nn.Module, opt: KFAC, steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x, y = torch.randn(8, 5, generator=generator).double(), torch.randint(3, (8,), generator=generator)
        train(model, opt, F.cross_entropy, x, y, 1)


@pytest.fixture(params=[ScaledIdentity, QuickIdentity])
def storage(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Side]:
    """The form that all layers get for both sides."""
    monkeypatch.setattr("curvature.kronecker.factors.storage_of", lambda *_: request.param.name)
    return request.param


def test_blocks_solve_with_it(storage: type[Side]):
    _, opt = trained(KFAC)
    for block in opt.store.blocks:
        rows, columns = block.sides
        assert type(rows) is type(columns) is storage and rows.entries.shape == columns.entries.shape == (1, 1)
        shapes = {name: parameter.shape for name, parameter in opt.trained().items()}
        gradients = [torch.randn(shapes[name]).double() for name in block.names]
        scale = (1 + SHARE) ** 2 * rows.entries * columns.entries
        for found, g in zip(block.solve(gradients), gradients, strict=True):
            torch.testing.assert_close(found, g / scale.reshape([1] * g.ndim))
        assert block.condition() == pytest.approx(1) and block.bytes <= block.expected_bytes
    assert "B 4x4, A 6x6" in str(opt.report())


@pytest.mark.parametrize("kind", [KFAC, EKFAC])
def test_training_goes_on_from_a_checkpoint(kind: type[KFAC], storage: type[Side]):
    model, opt = trained(kind)
    again, other = trained(kind, 1)
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert {type(side) for block in other.store.blocks for side in block.sides} == {storage}
    for own, its in ((model, opt), (again, other)):
        go_on(own, its, 3)
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)


def test_sums_of_processes(storage: type[Side]):
    """Their entries add up."""
    moments = torch.rand(2, 1, 4).double()
    sides = [storage.of(moment, (4,)) for moment in moments]
    total = storage.of_sum(sum(side.to_sum(k, 2) for k, side in enumerate(sides)), (4,))
    torch.testing.assert_close(total.diagonal(), moments.sum(0).mean(1, keepdim=True).expand(1, 4))


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


# renewed at every step: packed or not, averages change by about as much, but not by the same number


def test_bytes_are_those_of_triangles():
    model = nn.Sequential(nn.Linear(LARGE, LARGE, bias=False), nn.Tanh())
    opt = KFAC(model)
    train(model, opt, F.cross_entropy, torch.randn(4, LARGE), torch.randint(3, (4,)), 1)
    (block,) = opt.store.blocks
    kept = 2 * LARGE * (LARGE + 1) // 2 + 2 * LARGE**2
    assert block.expected_bytes == 4 * kept >= block.bytes >= 4 * (kept - LARGE**2)
