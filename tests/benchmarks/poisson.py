"""A Poisson equation by networks: natural gradient, KFAC, Adam and L-BFGS for the same seconds.

    python tests/benchmarks/poisson.py

``-laplacian(u) = 2 pi^2 sin(pi x) sin(pi y)`` on the unit square, u = 0 on its boundary; 900 points inside and 120 on
the boundary, fixed; double precision, one thread. Printed: the root mean square error against the solution on 9,000
points when the processor's seconds are over, and steps. Adam's learning rate is the best of a grid.
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
SECONDS = 40.0
solution = lambda x: torch.sin(math.pi * x[:, 0]) * torch.sin(math.pi * x[:, 1])
residual_method = lambda kind: lambda task: partial(kind(task.model).step, task.residuals)


@dataclass
class Poisson:
    """The network, its points, and how wrong it is."""

    model: nn.Sequential
    inside: Tensor
    edge: Tensor
    points: Tensor

    @staticmethod
    def of(sizes: tuple[int, ...]) -> Poisson:
        torch.manual_seed(0)
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


def run(method: Method, sizes: tuple[int, ...]) -> tuple[float, int]:
    """The error after so many seconds of the processor, and the number of steps."""
    task = Poisson.of(sizes)
    step, steps, start = method(task), 0, time.process_time()
    while time.process_time() - start < SECONDS:
        step()
        steps += 1
    return task.error(), steps


def main() -> None:
    options_of(__doc__)
    torch.set_default_dtype(torch.float64)

    def rows() -> Iterator[list[str]]:
        for sizes, (name, settings) in itertools.product(NETWORKS, METHODS.items()):
            error, steps = min(run(way, sizes) for way in settings)
            yield ["-".join(map(str, sizes)), name, f"{error:.1e} ({steps})"]

    printed(["network", "method", "error ↓ (steps)"], rows())


if __name__ == "__main__":
    main()
