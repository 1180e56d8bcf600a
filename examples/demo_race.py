"""Tuning of the rivals, and the race: training runs that are timed side by side."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from demo_problems import Problem
from torch import Tensor, nn
from tqdm import tqdm

from optimizers import KFAC

KINDS: dict[str, Callable[[nn.Module, float], torch.optim.Optimizer]] = {
    "KFAC": lambda model, lr: KFAC(model),
    "SGD": lambda model, lr: torch.optim.SGD(model.parameters(), lr, momentum=0.9),
    "AdamW": lambda model, lr: torch.optim.AdamW(model.parameters(), lr),
}
FINER = 1.12  # ratio of the numbers of steps of two evaluations
WIDEN = 3  # how often a grid may grow
WARM_UP = 3  # steps of every optimizer on a throwaway model before the race, so that no clock pays for first calls


@dataclass(frozen=True)
class Point:
    """Where a run stood after so many of its steps and so many seconds of its own clock."""

    step: int
    seconds: float
    train: float
    test: float
    accuracy: float  # on the test part; nan without labels


@dataclass
class Run:
    """One training run: its own model, optimizer and batches, all fixed by the seed, and its own clock."""

    problem: Problem
    kind: str
    lr: float
    seed: int
    steps: int = 0
    seconds: float = 0.0
    failed: bool = False  # the loss is no longer finite
    reached: float = math.inf  # seconds after the steps that the race goes over
    points: list[Point] = field(default_factory=list)
    snapshot: Tensor | None = None  # outputs on the test part at that moment

    def __post_init__(self) -> None:
        self.device = self.problem.train[0].device
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self.model = self.problem.make().to(self.device)
        self.optimizer = KINDS[self.kind](self.model, self.lr)
        self.batches = self._batches()

    @property
    def name(self) -> str:
        return self.kind if self.kind == "KFAC" else f"{self.kind}, lr {self.lr:g}"

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = self.problem.train
        generator = torch.Generator().manual_seed(self.seed + 1)
        while True:
            order = torch.randperm(len(x), generator=generator).to(self.device)
            for chosen in order.split(self.problem.batch)[: len(x) // self.problem.batch]:
                yield x[chosen], y[chosen]

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def advance(self) -> None:
        """One step. The clock runs for the training loop alone: not for drawing the batch, nor for evaluation."""
        x, y = next(self.batches)
        start = self._now()
        self.optimizer.zero_grad()
        loss = self.problem.loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.seconds += self._now() - start
        self.steps += 1
        self.failed = not math.isfinite(loss.item())

    @torch.no_grad()
    def evaluate(self) -> Point:
        """Losses over the whole training and test part, in evaluation mode, kept with the step and the clock."""
        self.model.eval()
        (x, y), (x_test, y_test) = self.problem.train, self.problem.test
        output = self.model(x_test)
        train, test = self.problem.loss(self.model(x), y).item(), self.problem.loss(output, y_test).item()
        self.model.train()
        accuracy = (output.argmax(1) == y_test).double().mean().item() if self.problem.labelled else math.nan
        train, test = (loss if math.isfinite(loss) else math.inf for loss in (train, test))
        self.failed = self.failed or math.inf in (train, test)
        self.points.append(Point(self.steps, self.seconds, train, test, accuracy))
        self.snapshot = output if self.reached == math.inf else self.snapshot
        return self.points[-1]

    def at_step(self, step: int, what: str) -> float:
        """A quantity after exactly `step` steps; inf (accuracy: nan) where the run did not come so far."""
        found = [getattr(point, what) for point in self.points if point.step == step]
        return found[0] if found else math.nan if what == "accuracy" else math.inf

    def at_time(self, seconds: float, what: str) -> float:
        """A quantity after `seconds` of the run's own clock, interpolated between the evaluations around it."""
        if self.failed and seconds > self.points[-1].seconds:
            return math.nan if what == "accuracy" else math.inf
        values = [getattr(point, what) for point in self.points]
        return float(np.interp(seconds, [point.seconds for point in self.points], values))


@dataclass(frozen=True)
class Tuning:
    """Training loss after the race's number of steps for every learning rate tried, in rising order."""

    kind: str
    losses: dict[float, float]
    seconds: float

    @property
    def best(self) -> float:
        return min(self.losses, key=lambda lr: self.losses[lr])


def half_decade(lr: float, up: bool) -> float:
    """The next of ..., 0.01, 0.03, 0.1, ... above or below."""
    power = math.floor(math.log10(lr) + 1e-6)
    one = lr < 2 * 10.0**power
    return float(f"{(3 if one else 10) if up else (0.3 if one else 1):g}e{power}")


def tune(problem: Problem, kind: str, grid: Sequence[float], steps: int, seed: int, widen: bool) -> Tuning:
    """Try every learning rate of the grid, and further ones while the best lies at its end."""
    losses: dict[float, float] = {}
    start = time.perf_counter()
    with tqdm(total=len(grid) * steps, desc=f"tuning {kind}", unit="step", disable=None, leave=False) as bar:

        def attempt(lr: float) -> None:
            run = Run(problem, kind, lr, seed)
            bar.set_postfix(lr=lr)
            for _ in range(steps):
                if not run.failed:
                    run.advance()
                bar.update()
            losses[lr] = math.inf if run.failed else run.evaluate().train

        for lr in grid:
            attempt(lr)
        for _ in range(WIDEN if widen else 0):
            best = min(losses, key=lambda lr: losses[lr])
            if min(losses) < best < max(losses) or losses[best] == math.inf:
                break
            bar.total += steps
            attempt(half_decade(best, up=best == max(losses)))
    return Tuning(kind, dict(sorted(losses.items())), time.perf_counter() - start)


def next_run(runs: Sequence[Run]) -> Run | None:
    """The run whose own clock is the least advanced, until every one has its steps and has run as long as the slowest.

    So all clocks advance together and whatever else the machine does hits all runs alike.
    """
    live = [run for run in runs if not run.failed]
    horizon = max((run.reached for run in live), default=0.0)
    return min((run for run in live if run.seconds < horizon), key=lambda run: run.seconds, default=None)


def race(problem: Problem, entries: dict[str, float], steps: int, marks: Sequence[int], seed: int) -> list[Run]:
    """Train with every optimizer of `entries` (name to learning rate), evaluating at `marks` and at a grid of steps."""
    for kind, lr in entries.items():
        throwaway = Run(problem, kind, lr, seed)
        for _ in range(WARM_UP):
            throwaway.advance()
    runs = [Run(problem, kind, lr, seed) for kind, lr in entries.items()]
    due = {*marks, steps, *(round(FINER**k) for k in range(100))}
    for entrant in runs:
        entrant.evaluate()
    with tqdm(total=steps * len(runs), desc="race", unit="step", disable=None, leave=False) as bar:
        while run := next_run(runs):
            run.advance()
            if run.steps <= steps:
                bar.update()
            if run.steps in due or run.failed:
                point = run.evaluate()
                bar.set_postfix({"of": run.kind, "step": run.steps, "training loss": f"{point.train:.4g}"})
            if run.steps == steps and not run.failed:
                run.reached = run.seconds
    for entrant in runs:
        if entrant.points[-1].step != entrant.steps:
            entrant.evaluate()
    return runs
