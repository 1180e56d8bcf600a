"""A second task learnt without forgetting the first: elastic weight consolidation with three kinds of curvature.

    python tests/benchmarks/forgetting.py [--seeds 5]

scikit-learn's digits of 8 x 8 pixels; the second task has the same digits with their pixels in another order. A small
MLP learns the first, then the second with `curvature.quadratic_penalty` around where the first has ended, times a
strength. Shares of 597 unseen digits that are right in each task, medians over seeds. Nothing is timed.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable

import torch
from _networks import mlp
from _report import printed
from sklearn.datasets import load_digits
from torch import Tensor, nn

import curvature
from curvature import Diagonal, Operator, Space

LOSS = nn.CrossEntropyLoss()
STRENGTHS = (1, 10, 100)
Data = tuple[Tensor, Tensor]
Penalty = Callable[[nn.Module], Tensor]


def digits(seed: int) -> tuple[Data, Data]:
    """Those to learn, and the unseen."""
    images, labels = map(torch.as_tensor, load_digits(return_X_y=True))
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    images, labels = images[order].float() / 16, labels[order]
    return (images[:1200], labels[:1200]), (images[1200:], labels[1200:])


def fit(model: nn.Module, data: Data, steps: int, penalty: Penalty | None = None) -> nn.Module:
    """A copy of the model, trained by Adam."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = torch.randint(len(data[0]), (100,), generator=generator)
        optimizer.zero_grad()
        loss = LOSS(model(data[0][batch]), data[1][batch])
        (loss + penalty(model) if penalty else loss).backward()
        optimizer.step()
    return model


def matrices(model: nn.Module, data: Data) -> dict[str, Operator]:
    diagonal = curvature.fisher_diagonal(model, LOSS, data)
    space = Space.of(diagonal)
    return {"diagonal": Diagonal(space, space.flatten(diagonal)), "kfac": curvature.kfac(model, LOSS, data)}


@torch.no_grad()
def right(model: nn.Module, data: Data) -> float:
    return 100 * (model(data[0]).argmax(1) == data[1]).float().mean().item()


def outcomes(seed: int) -> dict[tuple[str, str], tuple[float, float]]:
    """What is right in the first and in the second task, by curvature and strength of the penalty."""
    torch.manual_seed(seed)
    mixed = torch.randperm(64)
    first, unseen = digits(seed)
    second = first[0][:, mixed], first[1]
    tasks = unseen, (unseen[0][:, mixed], unseen[1])
    start = fit(mlp(64, 16, 10, activation=nn.Tanh), first, 200)
    models = {("the first task alone", "-"): start, ("no penalty", "-"): fit(start, second, 100)}
    for name, K in matrices(start, first).items():
        for strength in STRENGTHS:
            models[name, str(strength)] = fit(start, second, 100, curvature.quadratic_penalty(strength * K, start))
    return {name: (right(model, tasks[0]), right(model, tasks[1])) for name, model in models.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = [outcomes(seed) for seed in range(options.seeds)]
    cells = lambda name: (f"{statistics.median(own[name][task] for own in found):.1f}" for task in (0, 1))
    head = ["penalty", "strength", "right of the first task, %", "right of the second, %"]
    printed(head, "lr", ([*name, *cells(name)] for name in found[0]))


if __name__ == "__main__":
    main()
