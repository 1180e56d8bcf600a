"""A model to compile, its batches, and what compares runs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.cases.case import seeded
from support.training import backward


def draw(*shape: int, seed: int = 1) -> Tensor:
    with seeded(seed):
        return torch.randn(*shape, dtype=torch.float64)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).tanh()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.blocks, self.head = nn.Linear(4, 5), nn.ModuleList([Block(), Block()]), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().sum() > 1e9:  # never; a graph break, unless it is compiled in one graph
            return x
        return self.rest(x)

    def rest(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Whole(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.rest(x)


def net(kind: type[nn.Module] = Whole) -> nn.Module:
    with seeded(0):
        return kind().double()


def batch(k: int, size: int = 12) -> tuple[Tensor, Tensor]:
    return draw(size, 4, seed=k), torch.arange(size).roll(k) % 3


def values(model: nn.Module) -> dict[str, Tensor]:
    return {k.replace("_orig_mod.", ""): v.detach().clone() for k, v in model.state_dict().items()}


def assert_close(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-9, atol=1e-11)


def closure_of_loss(call: Any, opt: Any, k: int) -> Tensor:
    return backward(call, opt, F.cross_entropy, *batch(k))
