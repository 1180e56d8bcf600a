"""A second task learnt without forgetting the first: elastic weight consolidation with three kinds of curvature.

    python tests/benchmarks/forgetting.py

scikit-learn's digits of 8 x 8 pixels; the second task has the same digits with their pixels in another order. A small
MLP learns the first, then the second with `curvature.quadratic_penalty` around where the first has ended, times a
strength. Shares of 597 unseen digits that are right in each task, medians over seeds. Nothing is timed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from _networks import mlp
from _problems import fit, sklearn_digits
from _report import medians, options_of, printed
from torch import Tensor, nn

import curvature
from curvature import Diagonal, Operator, Space

LOSS = nn.CrossEntropyLoss()
STRENGTHS = (1, 10, 100)
SEEDS = 5
Data = tuple[Tensor, Tensor]
Penalty = Callable[[nn.Module], Tensor]


def digits(seed: int) -> tuple[Data, Data]:
    """Those to learn, and the unseen."""
    images, labels = sklearn_digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    images, labels = images[order], labels[order]
    return (images[:1200], labels[:1200]), (images[1200:], labels[1200:])


def trained(model: nn.Module, data: Data, steps: int, penalty: Penalty = lambda model: torch.zeros(())) -> nn.Module:
    """A copy of the model, trained by Adam."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    batches = (torch.randint(len(data[0]), (100,), generator=generator) for _ in range(steps))
    loss = lambda batch: LOSS(model(data[0][batch]), data[1][batch]) + penalty(model)
    return fit(model, torch.optim.Adam(model.parameters(), lr=3e-3), loss, batches)


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
    start = trained(mlp(64, 16, 10, activation=nn.Tanh), first, 200)
    models = {("the first task alone", "-"): start, ("no penalty", "-"): trained(start, second, 100)}
    for name, K in matrices(start, first).items():
        for strength in STRENGTHS:
            models[name, str(strength)] = trained(start, second, 100, curvature.quadratic_penalty(strength * K, start))
    return {name: (right(model, tasks[0]), right(model, tasks[1])) for name, model in models.items()}


def main() -> None:
    options_of(__doc__)
    found = [outcomes(seed) for seed in range(SEEDS)]
    rows = {name: [own[name] for own in found] for name in found[0]}
    head = ["penalty", "strength", "accuracy, first task, % ↑", "accuracy, second task, % ↑"]
    printed(head, medians(rows, ".1f", ".1f"))


if __name__ == "__main__":
    main()
