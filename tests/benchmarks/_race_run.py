"""Runs with a clock of their own: one at a time to tune, in turns to race and to compare the cost of steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from _contest import WIDEN, Training, Trial, next_rate
from _race_problems import NEAR, Problem
from _race_rivals import Entry, Setting
from torch import Tensor, nn

FAR, FINE = 0.1, 0.02  # steps between two evaluations as a fraction of the steps so far, and near the target
PRUNE = 1.3  # a point of a grid is abandoned after this many times the seconds of the best
WARM_UP = 3  # steps of every optimizer on a throwaway model, so that no clock pays for first calls
LEAD = 2.0  # a race goes on for this many times the seconds of its winner


@dataclass(frozen=True)
class Point:
    """Where a run stood after so many of its steps and so many seconds of its own clock."""

    step: float
    seconds: float
    train: float
    test: float  # this and the accuracy on the test part are nan far from the target
    accuracy: float


def crossing(before: Point, after: Point, target: float) -> Point:
    """Where the target was met between two evaluations, the logarithm of the loss being linear there."""
    part = math.log(before.train / target) / math.log(before.train / max(after.train, 1e-300))
    step = before.step + part * (after.step - before.step)
    seconds = before.seconds + part * (after.seconds - before.seconds)
    return Point(step, seconds, target, after.test, after.accuracy)


class Run(Training):
    """A run that ends "reached", "diverged" or "stopped"; `reached` is where the target was met."""

    def __init__(self, problem: Problem, entry: Entry, setting: Setting, seed: int) -> None:
        self.reached: Point | None = None
        super().__init__(problem, entry, setting, seed, problem.train[0].device)

    def make(self) -> Sequence[nn.Module]:
        return [self.problem.make()]

    def train(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return self.update(0, lambda: self.problem.loss(self.models[0](x), y))

    def fail(self, error: Exception | None) -> None:
        if error and not isinstance(error, torch.linalg.LinAlgError):  # of numbers that are not finite
            raise error
        self.end = "diverged"

    def evaluate(self, whole: bool = False) -> None:
        train, test, accuracy = self.problem.evaluate(self.models[0], whole)
        point = Point(self.steps, self.seconds, train, test, accuracy)
        if not math.isfinite(train):
            self.end = "diverged"
        elif self.points and train <= self.problem.target:
            self.end, self.reached = "reached", crossing(self.points[-1], point, self.problem.target)
        self.points.append(point)
        near = train < NEAR * self.problem.target
        self.due = self.steps + max(1, int((FINE if near else FAR) * self.steps))

    def stop(self) -> None:
        """Evaluate where it stands; nothing if it has come to its end."""
        if not self.end:
            self.evaluate(whole=True)
            self.end = self.end or "stopped"


def rank(trial: Trial) -> tuple[bool, float, float]:
    """Fewest steps to the target are best; short of it, the lowest loss."""
    reached = trial.end == "reached"
    return not reached, trial.steps if reached else 0.0, trial.loss if math.isfinite(trial.loss) else math.inf


def attempt(problem: Problem, entry: Entry, setting: Setting, limit: float) -> Trial:
    run = Run(problem, entry, setting, seed=0)
    while not run.end and run.seconds < limit:
        run.advance(run.seconds + 0.02 * limit)
    run.stop()
    last = run.reached or run.points[-1]
    return Trial(setting, run.end, last.step, last.seconds, last.train)


def tune(problem: Problem, entry: Entry, cap: float) -> Iterator[Trial]:
    """The learning rates, other settings with the best of them, and further rates while the best lies at their end.

    Runs end after `cap` seconds, and after `PRUNE` times those of the best so far.
    """
    trials: list[Trial] = []

    def tried(setting: Setting) -> Trial:
        best = min((trial for trial in trials if trial.end == "reached"), key=rank, default=None)
        limit = cap if best is None else min(cap, PRUNE * best.seconds)
        trials.append(attempt(problem, entry, setting, limit))
        return trials[-1]

    def found() -> Setting:
        return min(trials, key=rank).setting

    for setting in entry.rates():
        yield tried(setting)
    for name, values in entry.axes.items():
        best = found()
        for value in values[1:]:
            yield tried({**best, name: value})
    for _ in range(WIDEN):
        best = found()
        lrs = [trial.setting["lr"] for trial in trials if {**trial.setting, "lr": 0} == {**best, "lr": 0}]
        rate = next_rate(lrs, best["lr"], all(trial.end == "diverged" for trial in trials))
        if rate is None:
            break
        yield tried({**best, "lr": rate})


def warm_up(problem: Problem, contestants: Mapping[Entry, Setting]) -> None:
    for entry, setting in contestants.items():
        run = Run(problem, entry, setting, seed=0)
        for _ in range(WARM_UP):
            run.step()


def race(problem: Problem, contestants: Mapping[Entry, Setting], seed: int, cap: float, turn: float) -> list[Run]:
    """Train with all of them, always going on for `turn` seconds with the run whose own clock is the least advanced.

    So whatever else the machine does hits all alike. A run stops at the target, where it diverges, or after
    `LEAD` times the seconds of the winner, but not before `cap` seconds.
    """
    runs = [Run(problem, entry, setting, seed) for entry, setting in contestants.items()]
    while True:
        winner = min((run.seconds for run in runs if run.reached), default=0.0)
        limit = max(LEAD * winner, cap)
        live = [run for run in runs if not run.end and run.seconds < limit]
        if not live:
            break
        run = min(live, key=lambda run: run.seconds)
        run.advance(run.seconds + turn)
    for run in runs:
        run.stop()
    return runs


@dataclass(frozen=True)
class Cost:
    """Milliseconds of a step."""

    median: float
    mean: float
    longest: float


def cost(problem: Problem, contestants: Sequence[Entry], steps: int, skipped: int) -> dict[Entry, Cost]:
    """Steps of all in turn, the first of them `skipped`; rates of learning do not matter here."""
    runs = [Run(problem, entry, {"lr": 1e-3} if entry.lrs else {}, seed=0) for entry in contestants]
    for turn in range(skipped + steps):
        shift = turn % len(runs)
        for run in runs[shift:] + runs[:shift]:
            run.step()
    found = {}
    for run in runs:
        times = [1e3 * seconds for seconds in run.durations[skipped:]]
        found[run.entry] = Cost(statistics.median(times), statistics.fmean(times), max(times))
    return found
