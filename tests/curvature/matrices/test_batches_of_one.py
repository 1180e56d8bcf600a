"""Loaders with a batch of one sample, wherever it is, give the matrix of all samples as one batch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import curvature
from support.cases.case import seeded
from support.combinations import in_pairs

pytestmark = pytest.mark.fast


class Folded(nn.Module):
    """Layers with one output, called with tokens folded into the batch axis: (N, T, 3) to (N, T)."""

    def __init__(self, head: Callable[[], nn.Module], sequence_first: bool = False) -> None:
        super().__init__()
        self.body, self.head, self.sequence_first = nn.Linear(3, 4), head(), sequence_first

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if self.sequence_first else x
        h = self.head(self.body(x.flatten(0, 1)).tanh()).view(x.shape[:2])
        return h.T if self.sequence_first else h


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 1), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


class Sum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().sum(-1, keepdim=True)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x[:, None]).sum((1, 2))


HEADS: dict[str, Callable[[], nn.Module]] = {
    "value head": lambda: nn.Linear(4, 1),
    "two layers": lambda: nn.Sequential(nn.Linear(4, 1), nn.Tanh(), nn.Linear(1, 1)),
    "norm of one feature": lambda: nn.Sequential(nn.Linear(4, 1), nn.LayerNorm(1), nn.Linear(1, 1)),
    "group norm": lambda: nn.Sequential(nn.GroupNorm(1, 4), nn.Linear(4, 1)),
    "norm of two groups": lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.Linear(4, 1)),
    "norm last": lambda: nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4), Sum()),
    "norms": lambda: nn.Sequential(nn.GroupNorm(4, 4), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.Linear(4, 1)),
    "scale": Scaled,
    "product": Product,
    "convolution": Convolved,
}


@in_pairs(
    head=HEADS, builder=[curvature.kfac, curvature.ekfac], sequence_first=[False, True], sizes=[[3, 3, 1], [1, 3, 3]]
)
def test_batches_of_one_sample_are_read_as_others(
    builder: Callable[..., curvature.BlockDiagonal], head: str, sequence_first: bool, sizes: list[int]
) -> None:
    with seeded(0):
        model = Folded(HEADS[head], sequence_first).double()
        x, y = torch.randn(7, 5, 3).double(), torch.randn(7, 5).double()
    batches = list(zip(x.split(sizes), y.split(sizes), strict=True))
    for sharing in ("expand", "reduce"):
        expected = builder(copy.deepcopy(model), nn.MSELoss(), (x, y), sharing=sharing)
        found = builder(copy.deepcopy(model), nn.MSELoss(), batches, sharing=sharing)
        assert list(map(type, found.blocks.values())) == list(map(type, expected.blocks.values()))
        torch.testing.assert_close(found.to_dense(), expected.to_dense(), rtol=1e-7, atol=1e-10)


def test_a_batch_of_one_sample_goes_through_the_rules(caplog: pytest.LogCaptureFixture) -> None:
    model = Folded(HEADS["value head"])
    curvature.kfac(model, nn.MSELoss(), (torch.randn(1, 5, 3), torch.randn(1, 5)))
    assert "no layer rule" not in caplog.text
