"""Families whose loop is another one: two models against each other, and a policy that makes its own data."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from _networks import mlp
from _problems import Models, Problem, Update, Values
from torch import Tensor, nn


def gan() -> Problem:
    """Two MLPs; the data is normal about (1, 1)."""
    generator = torch.Generator().manual_seed(0)
    noise, real = torch.randn(4000, 4, generator=generator), 1 + 0.5 * torch.randn(1000, 2, generator=generator)
    net = functools.partial(mlp, activation=functools.partial(nn.LeakyReLU, 0.2))

    def batches(seed: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        own = torch.Generator().manual_seed(seed)
        while True:
            drawn = [torch.randn(256, size, generator=own) for size in (2, 4, 4)]
            yield 1 + 0.5 * drawn[0], drawn[1], drawn[2]

    def train(models: Models, batch: tuple[Tensor, Tensor, Tensor], update: Update) -> Tensor:
        forger, critic = models
        data, first, second = batch
        with torch.no_grad():
            fake = forger(first)

        def told_apart() -> Tensor:
            found, forged = critic(data), critic(fake)
            yes, no = torch.ones_like(found), torch.zeros_like(forged)
            return F.binary_cross_entropy_with_logits(found, yes) + F.binary_cross_entropy_with_logits(forged, no)

        def taken_for_real() -> Tensor:
            forged = critic(forger(second))
            return F.binary_cross_entropy_with_logits(forged, torch.ones_like(forged))

        update(1, told_apart)
        return update(0, taken_for_real)

    def evaluate(models: Models, whole: bool) -> Values:
        fake = models[0](noise)
        halves = torch.cdist(fake[:500], fake[500:1000]).mean() + torch.cdist(real[:500], real[500:]).mean()
        energy = 2 * torch.cdist(fake[:500], real[:500]).mean() - halves
        return (fake.mean(0) - 1).norm().item(), energy.item(), math.nan

    return Problem(
        "gan", "GAN of two MLPs of 128-128, a normal law about (1, 1), batch 256", "distance of the means",
        "energy distance", lambda: [net(4, 128, 128, 2), net(2, 128, 128, 1)], batches, train, evaluate, budget=4.0,
        growth=1.06, momenta=(0.9, 0.5),
    )  # fmt: skip


class Grid:
    """Go to the goal on a board of `side` x `side`; each step costs 1. States are (place, goal), moves four."""

    def __init__(self, side: int = 8, horizon: int = 20) -> None:
        self.side, self.horizon, self.cells = side, horizon, side * side
        self.moves = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])
        place = torch.arange(self.cells)
        rows = torch.stack([place // side, place % side], -1)
        self.next = ((rows[:, None] + self.moves).clamp(0, side - 1) * torch.tensor([side, 1])).sum(-1)  # (cells, 4)
        self.states = torch.cartesian_prod(place, place)
        apart = (rows[self.states[:, 0]] - rows[self.states[:, 1]]).abs().sum(-1)
        self.best = apart.clamp(max=horizon).float().mean().item()

    def features(self, states: Tensor) -> Tensor:
        return F.one_hot(states, self.cells).flatten(-2).float()

    @torch.no_grad()
    def play(self, policy: nn.Module, states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """States (T, N, 2), moves (T, N), cost to come (T, N), and whether the goal was still to be found (T, N)."""
        seen, moves, open_ = [], [], []
        for _ in range(self.horizon):
            seen.append(states)
            open_.append(states[:, 0] != states[:, 1])
            moves.append(torch.multinomial(policy(self.features(states)).softmax(-1), 1).squeeze(-1))
            place = torch.where(open_[-1], self.next[states[:, 0], moves[-1]], states[:, 0])
            states = torch.stack([place, states[:, 1]], -1)
        costs = torch.stack(open_).float()
        return torch.stack(seen), torch.stack(moves), costs.flip(0).cumsum(0).flip(0), torch.stack(open_)

    def excess(self, policy: nn.Module) -> float:
        """Mean cost over all states above the least possible one, exactly."""
        chances = policy(self.features(self.states)).softmax(-1)  # (cells^2, 4)
        place, goal = self.states.unbind(-1)
        after, still = self.next[place] * self.cells + goal[:, None], (place != goal).float()
        cost = torch.zeros(len(place))
        for _ in range(self.horizon):
            cost = still * (1 + (chances * cost[after]).sum(-1))
        return cost.mean().item() - self.best


def policy_gradient() -> Problem:
    """REINFORCE: moves that came out better than the mean of those at the same time become likelier."""
    grid = Grid()

    def batches(seed: int) -> Iterator[Tensor]:
        own = torch.Generator().manual_seed(seed)
        while True:
            yield torch.randint(grid.cells, (64, 2), generator=own)

    def train(models: Models, starts: Tensor, update: Update) -> Tensor:
        states, moves, costs, open_ = grid.play(models[0], starts)
        usual = costs.sum(1, keepdim=True) / open_.sum(1, keepdim=True).clamp(1)
        x, moves, gains = grid.features(states[open_]), moves[open_], (usual - costs)[open_]

        def surrogate() -> Tensor:
            chosen = models[0](x).log_softmax(-1).gather(-1, moves[:, None]).squeeze(-1)
            return -(chosen * gains).mean()

        return update(0, surrogate)

    def evaluate(models: Models, whole: bool) -> Values:
        excess = grid.excess(models[0])
        return excess, -excess - grid.best, math.nan

    return Problem(
        "policy", "policy gradient, MLP 128-64-64-4, a board of 8 x 8, 64 games", "steps above the fewest",
        "mean return", lambda: [mlp(2 * grid.cells, 64, 64, 4)], batches, train, evaluate, budget=3.0, growth=1.05,
    )  # fmt: skip
