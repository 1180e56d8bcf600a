"""A form of storage that is a class and nothing else: inverted as all, or with matrices of its own."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvature.kronecker import Side
from curvature.kronecker.applied import DiagonalMatrix, Matrix
from optimizers import EKFAC, KFAC

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


class Tied(nn.Module):
    """A decoder that is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.words(x).tanh(), self.words.weight).mean(1)


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
        opt.zero_grad()
        F.cross_entropy(model(x), y).backward()
        opt.step()


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


@pytest.mark.parametrize("make", [lambda: nn.Sequential(nn.Linear(5, 3)).double(), lambda: Tied().double()])
def test_the_mean_of_a_factor_is_kept(make: Any, storage: type[Side], monkeypatch: pytest.MonkeyPatch):
    """What it stores is the mean eigenvalue of the dense factor, also of a weight that is read in two ways."""
    found = []
    for name in (storage.name, "dense"):
        monkeypatch.setattr("curvature.kronecker.factors.storage_of", lambda *_, name=name: name)
        torch.manual_seed(0)
        model = make()
        opt, x = KFAC(model), torch.randint(5, (8, 5)) if isinstance(model, Tied) else torch.randn(8, 5).double()
        F.cross_entropy(model(x), torch.randint(3, (8,))).backward()
        opt.step()
        (block,) = opt.store.blocks
        found.append([float(side.diagonal().mean()) for side in block.sides])
    assert found[0] == pytest.approx(found[1], rel=1e-12)


def test_sums_of_processes(storage: type[Side]):
    """Their entries add up."""
    moments = torch.rand(2, 1, 4).double()
    sides = [storage.of(moment, (4,)) for moment in moments]
    total = storage.of_sum(sum(side.to_sum(k, 2) for k, side in enumerate(sides)), (4,))
    torch.testing.assert_close(total.diagonal(), moments.sum(0).mean(1, keepdim=True).expand(1, 4))
