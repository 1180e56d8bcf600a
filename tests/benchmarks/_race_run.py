"""Runs with a clock of their own: one at a time to tune, in turns to race and to compare the cost of steps."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from _race_problems import NEAR, Problem
from _race_rivals import Entry, Setting, Steps
from torch import Tensor

FAR, FINE = 0.1, 0.02  # steps between two evaluations as a fraction of the steps so far, and near the target
PRUNE = 1.3  # a point of a grid is abandoned after this many times the seconds of the best
WIDEN = 6  # how often a grid may grow
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


class Run:
    """One training run: its own model, optimizer, batches and random state, all fixed by the seed, and its own clock.

    Attributes:
        points: the evaluations.
        end: "" while it goes on; then "reached", "diverged" or "stopped".
        reached: where the target was met.
        durations: seconds of each step.
    """

    def __init__(self, problem: Problem, entry: Entry, setting: Setting, seed: int) -> None:
        self.problem, self.entry, self.setting, self.seed = problem, entry, setting, seed
        self.device = problem.train[0].device
        self.end = ""
        self.reached: Point | None = None
        self.seconds, self.due = 0.0, 1
        self.durations: list[float] = []
        self.points: list[Point] = []
        self.random = torch.Generator().manual_seed(seed).get_state()
        with self._own_randomness():
            self.model = problem.make().to(self.device)
            self.optimizer: Steps = entry.make(self.model, problem, **setting)
        self.batches = problem.batches(seed + 1)
        self.evaluate()

    @property
    def steps(self) -> int:
        return len(self.durations)

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """So that what a run draws does not depend on whose turn came before."""
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.random)
            yield
            self.random = torch.get_rng_state()

    def _now(self) -> float:
        if self.device.type != "cuda":
            return time.process_time()  # other work on the machine does not count
        torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def step(self) -> None:
        """The clock runs for the training loop alone: not for drawing the batch, nor for evaluation."""
        with self._own_randomness():
            self._step()

    def _step(self) -> None:
        x, y = next(self.batches)
        losses: list[Tensor] = []

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.problem.loss(self.model(x), y)
            loss.backward()
            losses.append(loss.detach())
            return loss

        start = self._now()
        try:
            if self.entry.closure:
                self.optimizer.step(closure)
            else:
                closure()
                self.optimizer.step()
        except torch.linalg.LinAlgError:  # what decompositions make of numbers that are not finite
            self.end = "diverged"
        self.durations.append(self._now() - start)
        self.seconds += self.durations[-1]
        if not math.isfinite(losses[0].item()):
            self.end = "diverged"

    def evaluate(self, whole: bool = False) -> None:
        train, test, accuracy = self.problem.evaluate(self.model, whole)
        point = Point(self.steps, self.seconds, train, test, accuracy)
        if not math.isfinite(train):
            self.end = "diverged"
        elif self.points and train <= self.problem.target:
            self.end, self.reached = "reached", crossing(self.points[-1], point, self.problem.target)
        self.points.append(point)
        near = train < NEAR * self.problem.target
        self.due = self.steps + max(1, int((FINE if near else FAR) * self.steps))

    def advance(self, seconds: float) -> None:
        """Go on for at least so many seconds of its own clock, or to its end, evaluating in between."""
        until = self.seconds + seconds
        while not self.end and self.seconds < until:
            self.step()
            if self.steps >= self.due and not self.end:
                self.evaluate()

    def stop(self) -> None:
        """Evaluate where it stands; nothing if it has come to its end."""
        if not self.end:
            self.evaluate(whole=True)
            self.end = self.end or "stopped"


@dataclass(frozen=True)
class Trial:
    """One point of a grid; steps and seconds to the target or, where it was not reached, to the end of the run."""

    setting: Setting
    end: str
    steps: float
    seconds: float
    loss: float

    @property
    def rank(self) -> tuple[bool, float, float]:
        """Fewest steps to the target are best; short of it, the lowest loss."""
        reached = self.end == "reached"
        return not reached, self.steps if reached else 0.0, self.loss if math.isfinite(self.loss) else math.inf


def attempt(problem: Problem, entry: Entry, setting: Setting, limit: float) -> Trial:
    run = Run(problem, entry, setting, seed=0)
    while not run.end and run.seconds < limit:
        run.advance(0.02 * limit)
    run.stop()
    last = run.reached or run.points[-1]
    return Trial(setting, run.end, last.step, last.seconds, last.train)


def half_decade(lr: float, up: bool) -> float:
    """The next of ..., 0.01, 0.03, 0.1, ... above or below."""
    power = math.floor(math.log10(lr) + 1e-6)
    one = lr < 2 * 10.0**power
    return float(f"{(3 if one else 10) if up else (0.3 if one else 1):g}e{power}")


def tune(problem: Problem, entry: Entry, cap: float) -> Iterator[Trial]:
    """The learning rates, other settings with the best of them, and further rates while the best lies at their end.

    Runs end after `cap` seconds, and after `PRUNE` times those of the best so far.
    """
    trials: list[Trial] = []

    def tried(setting: Setting) -> Trial:
        best = min((trial for trial in trials if trial.end == "reached"), key=lambda trial: trial.rank, default=None)
        limit = cap if best is None else min(cap, PRUNE * best.seconds)
        trials.append(attempt(problem, entry, setting, limit))
        return trials[-1]

    def found() -> Setting:
        return min(trials, key=lambda trial: trial.rank).setting

    for setting in entry.rates():
        yield tried(setting)
    for name, values in entry.axes.items():
        best = found()
        for value in values[1:]:
            yield tried({**best, name: value})
    for _ in range(WIDEN):
        best = found()
        lrs = [trial.setting["lr"] for trial in trials if {**trial.setting, "lr": 0} == {**best, "lr": 0}]
        if min(lrs) < best["lr"] < max(lrs):
            break
        failed = all(trial.end == "diverged" for trial in trials)
        up = best["lr"] == max(lrs) and not failed
        yield tried({**best, "lr": half_decade(max(lrs) if up else min(lrs), up)})


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
        min(live, key=lambda run: run.seconds).advance(turn)
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
