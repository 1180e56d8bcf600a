"""Data that nobody shuffled: some batches of one kind in a row, then some of the next. The mean of gradients is out of
phase with them, and within a block the loss falls straight, so that steps grow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optimizers import EKFAC, KFAC

STEPS = 400
GENERATOR = torch.Generator().manual_seed(1)
X = torch.randn(512, 10, generator=GENERATOR)
LABELS = (X[:, :3] + 0.3 * X[:, 3:6]).argmax(1)
LABELS = torch.where(torch.rand(512, generator=GENERATOR) < 0.2, torch.randint(3, (512,), generator=GENERATOR), LABELS)
TASKS = [(X @ torch.randn(10, 3, generator=GENERATOR)).argmax(1) for _ in range(4)]
TARGETS = (X[:, 0] * X[:, 1] + X[:, 2]).sort().values[:, None]
ORDER = (X[:, 0] * X[:, 1] + X[:, 2]).argsort()


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 32), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(32, 3) for _ in range(4))

    def forward(self, x: Tensor, task: int) -> Tensor:
        return self.heads[task](self.body(x))


Losses = tuple[Callable[[], nn.Module], Callable[[Any, int, torch.Generator], Tensor], Callable[[Any], Tensor]]


def classes(block: int) -> Losses:
    """Batches of one class; all of the data."""

    def of_batch(model: nn.Module, step: int, generator: torch.Generator) -> Tensor:
        rows = torch.where((step // block) % 3 == LABELS)[0]
        rows = rows[torch.randint(len(rows), (32,), generator=generator)]
        return F.cross_entropy(model(X[rows]), LABELS[rows])

    make = lambda: nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 3))
    return make, of_batch, lambda model: F.cross_entropy(model(X), LABELS)


def heads(block: int) -> Losses:
    """Batches of one task, each with a head of its own."""

    def of_batch(model: Heads, step: int, generator: torch.Generator) -> Tensor:
        task, rows = (step // block) % 4, torch.randint(512, (64,), generator=generator)
        return F.cross_entropy(model(X[rows], task), TASKS[task][rows])

    whole = lambda model: torch.stack([F.cross_entropy(model(X, t), TASKS[t]) for t in range(4)]).mean()
    return Heads, of_batch, whole


def sorted_targets(block: int) -> Losses:
    """A regression whose rows are sorted by their targets."""

    def of_batch(model: nn.Module, step: int, generator: torch.Generator) -> Tensor:
        first = 128 * ((step // block) % 4)
        rows = first + torch.randint(128, (32,), generator=generator)
        return F.mse_loss(model(X[ORDER[rows]]), TARGETS[rows])

    make = lambda: nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))
    return make, of_batch, lambda model: F.mse_loss(model(X[ORDER]), TARGETS)


def final_loss(problem: Losses, optimizer: Callable[[nn.Module], Any], seed: int, schedule: bool) -> float:
    torch.manual_seed(seed)
    make, of_batch, whole = problem
    model, generator = make(), torch.Generator().manual_seed(seed)
    opt = optimizer(model)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS) if schedule else None
    for step in range(STEPS):
        opt.zero_grad()
        of_batch(model, step, generator).backward()
        opt.step()
        if decay is not None:
            decay.step()
    with torch.no_grad():
        return float(whole(model))


@pytest.mark.parametrize(
    ("problem", "optimizer", "schedule"),
    [(classes(20), EKFAC, False), (heads(5), KFAC, False), (sorted_targets(10), KFAC, True)],
    ids=["classes", "heads", "sorted"],
)
def test_learns_as_adamw_does(problem: Losses, schedule: bool, optimizer: Callable[[nn.Module], Any]) -> None:
    adamw = lambda model: torch.optim.AdamW(model.parameters(), 1e-2)
    ours, usual = (sum(final_loss(problem, make, seed, schedule) for seed in (0, 1)) for make in (optimizer, adamw))
    assert ours < 1.5 * usual
