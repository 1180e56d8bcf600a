"""Solvers of the natural gradient in a training loop, beside KFAC and tuned AdamW and SGD, on scikit-learn's digits.

    python tests/benchmarks/natural_gradient.py --seeds 3 --epochs 10

MLP 64-24-10 (tanh), 1,437 images, batch 128. Printed: median over seeds of the mean training loss of the last epoch, of
the accuracy on the 360 images left out, and of the processor's milliseconds per step (one thread). AdamW and SGD have
the best of five learning rates each, by training loss; the others no setting at all.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from curvature import empirical, sampled
from optimizers import KFAC, NaturalGradient

LOSS = nn.CrossEntropyLoss()
Make = Callable[[nn.Module], torch.optim.Optimizer]
OURS: dict[str, Make] = {
    "NaturalGradient, exact": lambda model: NaturalGradient(model, loss=LOSS),
    "NaturalGradient, sampled": lambda model: NaturalGradient(model, loss=LOSS, inject=sampled()),
    "NaturalGradient, empirical": lambda model: NaturalGradient(model, loss=LOSS, inject=empirical()),
    "NaturalGradient, isotropic": NaturalGradient,
    "cg, sampled": lambda model: NaturalGradient(model, loss=LOSS, inject=sampled(), solver="cg"),
    "dense, sampled": lambda model: NaturalGradient(model, loss=LOSS, inject=sampled(), solver="dense"),
    "diagonal, sampled": lambda model: NaturalGradient(model, loss=LOSS, inject=sampled(), solver="diagonal"),
    "KFAC": KFAC,
}
RIVALS: dict[str, Callable[[float], Make]] = {
    "AdamW": lambda lr: lambda model: torch.optim.AdamW(model.parameters(), lr),
    "SGD, momentum 0.9": lambda lr: lambda model: torch.optim.SGD(model.parameters(), 30 * lr, momentum=0.9),
}
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
Row = tuple[float, float, float]


def run(make: Make, seed: int, epochs: int) -> Row:
    """Training loss of the last epoch, accuracy on what was left out, milliseconds per step."""
    data = load_digits()
    x, y = torch.tensor(data.data).float() / 16, torch.tensor(data.target)
    torch.manual_seed(seed)
    order = torch.randperm(len(x))
    train, test = order[:1437], order[1437:]
    model = nn.Sequential(nn.Linear(64, 24), nn.Tanh(), nn.Linear(24, 10))
    opt = make(model)
    start, steps, losses = time.process_time(), 0, list[Tensor]()
    for _ in range(epochs):
        losses = []
        for batch in train[torch.randperm(len(train))].split(128):
            opt.zero_grad()
            loss = F.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            opt.step()
            losses.append(loss.detach())
            steps += 1
    spent = 1e3 * (time.process_time() - start) / steps
    accuracy = (model(x[test]).argmax(1) == y[test]).float().mean()
    return float(torch.stack(losses).mean()), float(accuracy), spent


def rows(seeds: int, epochs: int) -> Iterator[tuple[str, Row]]:
    def median(make: Make) -> Row:
        found = [run(make, seed, epochs) for seed in range(seeds)]
        loss, accuracy, spent = (statistics.median(column) for column in zip(*found, strict=True))
        return loss, accuracy, spent

    for name, make in OURS.items():
        yield name, median(make)
    for name, family in RIVALS.items():
        found = {lr: median(family(lr)) for lr in RATES}
        best = min(found, key=lambda lr: found[lr][0])
        yield f"{name} (best of {len(RATES)} rates)", found[best]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=10)
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| optimizer | training loss | test accuracy | ms a step |\n| --- | ---: | ---: | ---: |")
    for name, (loss, accuracy, spent) in rows(given.seeds, given.epochs):
        print(f"| {name} | {loss:.2g} | {100 * accuracy:.1f} % | {spent:.2g} |", flush=True)


if __name__ == "__main__":
    main()
