"""A Poisson equation by networks: natural gradient, KFAC, Adam and L-BFGS for the same seconds, over seeds.

    python tests/benchmarks/poisson.py --seconds 120 --seeds 3

``-laplacian(u) = 2 pi^2 sin(pi x) sin(pi y)`` on the unit square, u = 0 on its boundary; 900 points inside and 120 on
the boundary, fixed; double precision, one thread. Printed: the root mean square error against the solution on 9,000
points when the processor's seconds are over. Adam's learning rate is the best of a grid, for each seed.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from _networks import mlp
from _report import options_of, printed
from torch import Tensor, nn

import curvature
from optimizers import KFAC, NaturalGradient

NETWORKS = ((2, 64, 1), (2, 64, 64, 48, 48, 1))
RATES = (1e-3, 3e-3, 1e-2)
solution = lambda x: torch.sin(math.pi * x[:, 0]) * torch.sin(math.pi * x[:, 1])
residual_method = lambda kind: lambda task: partial(kind(task.model).step, task.residuals)


@dataclass
class Poisson:
    """The network of one seed, its points, and how wrong it is."""

    model: nn.Sequential
    inside: Tensor
    edge: Tensor
    points: Tensor

    @staticmethod
    def of(seed: int, sizes: tuple[int, ...]) -> Poisson:
        torch.manual_seed(seed)
        model = mlp(*sizes, activation=nn.Tanh)
        inside, t, side = torch.rand(900, 2), torch.rand(120), torch.arange(120) % 4
        edge = torch.stack([torch.where(side < 2, t, side - 2.0), torch.where(side < 2, side.double(), t)], 1)
        return Poisson(model, inside, edge, torch.rand(9000, 2))

    def residuals(self) -> Tensor:
        bend = curvature.laplacian(self.model, self.inside)[2][:, 0]
        interior = bend + 2 * math.pi**2 * solution(self.inside)
        return torch.cat([interior / 900**0.5, self.model(self.edge)[:, 0] / 120**0.5])

    def error(self) -> float:
        with torch.no_grad():
            return float((self.model(self.points)[:, 0] - solution(self.points)).square().mean().sqrt())


Method = Callable[[Poisson], Callable[[], object]]


def loss_method(made: Callable[[Poisson], torch.optim.Optimizer]) -> Method:
    def start(task: Poisson) -> Callable[[], object]:
        opt = made(task)

        def closure() -> Tensor:
            opt.zero_grad()
            loss = task.residuals().square().sum() / 2
            loss.backward()
            return loss

        return partial(opt.step, closure)

    return start


METHODS: dict[str, list[Method]] = {
    "KFAC": [residual_method(KFAC)],
    "NaturalGradient": [residual_method(NaturalGradient)],
    "L-BFGS": [loss_method(lambda task: torch.optim.LBFGS(task.model.parameters(), line_search_fn="strong_wolfe"))],
    "Adam": [loss_method(lambda task, lr=lr: torch.optim.Adam(task.model.parameters(), lr=lr)) for lr in RATES],
}


def run(method: Method, seed: int, sizes: tuple[int, ...], seconds: float) -> tuple[float, int]:
    """The error after so many seconds of the processor, and the number of steps."""
    task = Poisson.of(seed, sizes)
    step, steps, start = method(task), 0, time.process_time()
    while time.process_time() - start < seconds:
        step()
        steps += 1
    return task.error(), steps


def main() -> None:
    options = options_of(__doc__, seconds=120.0, seeds=3)
    torch.set_default_dtype(torch.float64)
    print(f"root mean square error after {options.seconds:g} s (steps)\n")

    def rows() -> Iterator[list[str]]:
        for sizes, (name, settings) in itertools.product(NETWORKS, METHODS.items()):
            found = [min(run(way, seed, sizes, options.seconds) for way in settings) for seed in range(options.seeds)]
            yield ["-".join(map(str, sizes)), name, *(f"{error:.1e} ({steps})" for error, steps in found)]

    printed(["network", "method", *(f"seed {seed}" for seed in range(options.seeds))], rows())


if __name__ == "__main__":
    main()
