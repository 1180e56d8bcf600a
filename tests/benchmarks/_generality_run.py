"""Training runs with a clock of their own: CPU seconds of zero_grad, forward, backward and step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from _contest import WIDEN, Training, Trial, next_rate
from _generality_family import Family
from _generality_scores import LEAD, Point, Record, Targets, crossing, level
from _race_rivals import ENTRIES, Entry, Setting
from torch import Tensor, nn

FIRST = 4  # steps before the second evaluation
TURN = 0.1  # seconds of one turn
HALF, END = (0.42, 0.46, 0.5), (0.8, 0.9, 1.0)  # of the budget: where a trial is evaluated
SELDOM = 10.0  # growth of the steps between its other evaluations
PRUNE = 3.0  # a learning rate is abandoned if half-way its loss is this many times that of the best so far
RATES = (3e-4, 1e-3, 3e-3, 1e-2)
GRIDS = {"sgd": (1e-2, 3e-2, 1e-1, 3e-1), "adamw": RATES, "muon": RATES, "soap": RATES}  # to begin with


class Run(Training):
    """A run that ends "diverged", "stopped" or with an exception; its last loss is then infinite unless it stopped."""

    def __init__(self, family: Family, entry: Entry, setting: Setting, seed: int) -> None:
        super().__init__(family, entry, setting, seed, torch.device("cpu"))

    def make(self) -> Sequence[nn.Module]:
        return self.problem.make()

    def train(self, batch: Any) -> Tensor:
        return self.problem.train(self.models, batch, self.update)

    def fail(self, error: Exception | None) -> None:
        """Its row of the table says so, and the other rows are made."""
        self.end = f"{type(error).__name__}: {error}"[:200] if error else "diverged"
        self.points.append(Point(self.steps, self.seconds, math.inf, math.inf))

    @torch.no_grad()
    def evaluate(self) -> None:
        for model in self.models:
            model.eval()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same draws at every evaluation
            loss, metric = self.problem.evaluate(self.models)
        for model in self.models:
            model.train()
        self.due = max(self.steps + 1, int(self.problem.growth * self.steps), FIRST)
        if math.isfinite(loss):
            self.points.append(Point(self.steps, self.seconds, loss, metric))
        else:
            self.fail(None)

    def look(self) -> None:
        """Evaluate where it stands, if it goes on."""
        if not self.end and self.points[-1].step < self.steps:
            self.evaluate()

    def record(self, pace: float) -> Record:
        self.end = self.end or "stopped"
        return Record(
            self.entry.name, self.setting, self.seed, self.end, self.steps, self.seconds, pace, self.points
        )  # fmt: skip


def attempt(family: Family, entry: Entry, setting: Setting, budget: float, hurdle: float) -> tuple[Trial, float]:
    """A trial of a setting, and its loss half-way, where it is abandoned if that is above the hurdle."""
    run = Run(replace(family, growth=SELDOM), entry, setting, seed=0)
    for part in HALF:
        run.advance(part * budget)
        run.look()
    half = level(run.points, run.seconds)
    for part in END if half <= hurdle else ():
        run.advance(part * budget)
        run.look()
    end = run.end or ("abandoned" if half > hurdle else "stopped")
    return Trial(setting, end, run.steps, run.seconds, level(run.points, run.seconds)), half


def rank(trial: Trial) -> tuple[bool, float]:
    """The lowest loss at the end of the budget is best."""
    return trial.end == "abandoned", trial.loss


def tune(family: Family, entry: Entry, budget: float) -> Iterator[Trial]:
    """The learning rates of the grid, and further ones while the best lies at its end; of each momentum."""
    for extra in [{"momentum": momentum} for momentum in family.momenta] or [{}]:
        yield from tune_rate(family, entry, budget, extra)


def tune_rate(family: Family, entry: Entry, budget: float, extra: Setting) -> Iterator[Trial]:
    trials: dict[float, Trial] = {}
    halves: dict[float, float] = {}

    def best() -> float:
        return min(trials, key=lambda lr: rank(trials[lr]))

    def tried(lr: float) -> Trial:
        hurdle = PRUNE * halves[best()] if trials else math.inf
        trials[lr], halves[lr] = attempt(family, entry, {"lr": lr, **extra}, budget, hurdle)
        return trials[lr]

    grid = GRIDS[entry.name]
    for lr in (*grid[1:3], grid[0], *grid[3:]):
        yield tried(lr)
    for _ in range(WIDEN):
        rate = next_rate(list(trials), best(), all(math.isinf(trial.loss) for trial in trials.values()))
        if rate is None:
            break
        yield tried(rate)


class Pace:
    """How fast the machine is meanwhile: steps of SGD, of length zero, on models of their own."""

    def __init__(self, family: Family, seed: int) -> None:
        self.run = Run(family, ENTRIES["sgd"], {"lr": 0.0}, seed)

    def step(self) -> None:
        self.run.step()

    @property
    def milliseconds(self) -> float:
        return 1e3 * statistics.median(self.run.durations)


def race(
    family: Family, contestants: Mapping[Entry, Setting], seed: int, budget: float, rivals: Sequence[Record] = ()
) -> list[Record]:
    """Train with all of them in turns; the one whose own clock is the least advanced goes next.

    Ours go on after the budget, for `LEAD` times as long at most, until they come to the targets that the rivals set:
    those among the contestants, or `rivals` of another time, to whose pace the budget is then brought.
    """
    pace = Pace(family, seed)
    pace.step()
    runs = [Run(family, entry, setting, seed) for entry, setting in contestants.items()]

    def take_turns(live: Sequence[Run], budget: float, done: Callable[[Run], bool] = lambda run: False) -> None:
        while True:
            limit = budget * (pace.milliseconds / rivals[0].pace if rivals else 1.0)
            live = [run for run in live if not run.end and run.seconds < limit and not done(run)]
            if not live:
                break
            run = min(live, key=lambda run: run.seconds)
            run.advance(min(run.seconds + TURN, limit))
            pace.step()

    take_turns(runs, budget)
    for run in runs:
        run.look()
    records = [run.record(pace.milliseconds) for run in runs if run.entry.lrs]
    ours = [run for run in runs if not run.entry.lrs]
    if ours:
        targets = Targets.of(rivals or records, budget)

        def reached(run: Run) -> bool:
            return all(crossing(run.points, target) for target in (targets.loss, targets.adamw))

        take_turns(ours, LEAD * budget, reached)
        for run in ours:
            run.look()
    return [run.record(pace.milliseconds) for run in runs]
