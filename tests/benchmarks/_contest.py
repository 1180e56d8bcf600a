"""What all races share: runs with clocks of their own, turns, grids of learning rates, options and files."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from _problems import Problem
from _race_rivals import ANNEALED, ENTRIES, Entry, Setting, constant
from _report import load, machine, save, words
from torch import Tensor, nn

FIRST = 4  # steps before the second evaluation
NEAR = 1.5  # times the target: from there on evaluations are whole
FINE = 1.02  # growth of the steps between them
TURN = 0.1  # seconds of one turn
LEAD = 2.0  # a race goes on for this many times the seconds of its winner, or of its budget
WARM_UP = 3  # steps of every optimizer on a throwaway model, so that no clock pays for first calls
WIDEN = 6  # how often a grid may grow
OPTIONS = {"seeds": 3, "scale": 1.0, "tune": False, "json": Path}


@dataclass(frozen=True)
class Point:
    """Where a run stood after so many steps and seconds of its own clock; the loss is infinite where it is not finite.

    The metric and the accuracy are nan where they were not asked for.
    """

    step: float
    seconds: float
    loss: float
    metric: float = math.nan
    accuracy: float = math.nan

    @classmethod
    def read(cls, saved: Sequence[float | None]) -> Point:
        step, seconds, loss, *rest = saved
        return cls(step, seconds, math.inf if loss is None else loss, *(math.nan if v is None else v for v in rest))

    def plain(self) -> list[float | None]:
        """For JSON, which has neither infinity nor nan."""
        return [float(f"{value:.7g}") if math.isfinite(value) else None for value in astuple(self)]


def met(first: Point, second: Point, target: float) -> tuple[float, float]:
    """Steps and seconds at the target, between two evaluations; the logarithm of the loss is linear there."""
    span = math.log(first.loss / max(second.loss, 1e-300))
    part = min(max(math.log(first.loss / target) / span, 0.0), 1.0) if span > 0 else 1.0
    step = first.step + part * (second.step - first.step)
    return step, first.seconds + part * (second.seconds - first.seconds)


@dataclass(frozen=True)
class Record:
    """A run that is over.

    Attributes:
        end: "reached", "stopped", "diverged" or the exception.
        pace: milliseconds of a step of SGD on the same models meanwhile: how fast the machine was.
        reached: where the target was met.
    """

    name: str
    setting: Setting
    seed: int
    end: str
    steps: int
    seconds: float
    points: list[Point]
    pace: float = math.nan
    reached: Point | None = None

    @property
    def last(self) -> Point:
        """At the target, or else at the end."""
        return self.reached or self.points[-1]

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> Record:
        points, reached = [Point.read(values) for values in saved["points"]], saved.get("reached")
        return cls(**{**saved, "points": points, "reached": reached and Point.read(reached)})

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        kept = {name: value for name, value in vars(self).items() if value is not None and value == value}
        reached = {"reached": self.reached.plain()} if self.reached else {}
        return {**kept, **reached, "points": [point.plain() for point in self.points]}

    def at_pace(self, pace: float) -> Record:
        """With the seconds that a machine of that pace would have taken."""
        factor = pace / self.pace
        points = [replace(point, seconds=factor * point.seconds) for point in self.points]
        return replace(self, seconds=factor * self.seconds, pace=pace, points=points)


@dataclass(frozen=True)
class Result:
    """The runs of one problem, over all seeds."""

    title: str
    machine: str
    records: list[Record]

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> Any:
        return cls(**{**saved, "records": [Record.read(record) for record in saved["records"]]})

    def plain(self) -> dict[str, Any]:
        return {**vars(self), "records": [record.plain() for record in self.records]}


def built(entry: Entry, model: nn.Module, problem: Problem, setting: Setting) -> Any:
    """The optimizer of a setting, which may name a momentum other than the usual one."""
    rest = {name: value for name, value in setting.items() if name != "momentum"}
    optimizer = entry.make(model, problem, **rest)
    if "momentum" in setting:
        for group in (group for part in getattr(optimizer, "parts", [optimizer]) for group in part.param_groups):
            if "betas" in group:
                group["betas"] = setting["momentum"], group["betas"][1]
            else:
                group["momentum"] = setting["momentum"]
    return optimizer


class Run:
    """One training run: its models, optimizers, batches and random state, all fixed by the seed, and its own clock.

    It shows CPU seconds, as other work on the machine does not count, and seconds on a GPU.

    Attributes:
        end: "" while it goes on, then why it ended; its last loss is infinite where that is a failure.
        points: the evaluations, of which `due` is the step of the next.
        durations: seconds of each step.
        budget: seconds over which the learning rate follows the schedule of the entry.
        reached: where the target was met.
    """

    def __init__(self, problem: Problem, entry: Entry, setting: Setting, seed: int, budget: float = math.inf) -> None:
        self.problem, self.entry, self.setting, self.seed, self.budget = problem, entry, setting, seed, budget
        self.device = torch.device(problem.device)
        self.end, self.due, self.seconds = "", 1, 0.0
        self.durations: list[float] = []
        self.points: list[Point] = []
        self.reached: Point | None = None
        self.random = torch.Generator().manual_seed(seed).get_state()
        with self._own_randomness():
            self.models: Sequence[nn.Module] = [model.to(self.device) for model in problem.make()]
            self.optimizers = [built(entry, model, problem, setting) for model in self.models]
        parts = [part for optimizer in self.optimizers for part in getattr(optimizer, "parts", [optimizer])]
        self.groups = [(group, group["lr"]) for part in parts for group in part.param_groups]
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
            return time.process_time()
        torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def update(self, index: int, loss: Callable[[], Tensor]) -> Tensor:
        """Train the model of that index on a loss, which is returned."""
        optimizer = self.optimizers[index]
        losses: list[Tensor] = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            losses.append(loss())
            losses[-1].backward()
            return losses[-1]

        if self.entry.closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        return losses[0].detach()

    def step(self) -> None:
        """The clock runs for the training loop alone: not for drawing the batch, nor for evaluation."""
        batch, loss, raised = next(self.batches), math.nan, None
        if self.entry.schedule is not constant:
            factor = self.entry.schedule(min(self.seconds / self.budget, 1.0))
            for group, lr in self.groups:
                group["lr"] = lr * factor
        with self._own_randomness():
            start = self._now()
            try:
                loss = self.problem.train(self.models, batch, self.update).item()
            except Exception as error:
                raised = error
            self.durations.append(self._now() - start)
        self.seconds += self.durations[-1]
        if not math.isfinite(loss):
            self._fail(raised)

    def _fail(self, error: Exception | None) -> None:
        """Its row of the table says so, and the other rows are made."""
        numbers = error is None or isinstance(error, torch.linalg.LinAlgError)  # of numbers that are not finite
        self.end = "diverged" if numbers else f"{type(error).__name__}: {error}"[:200]
        self.points.append(Point(self.steps, self.seconds, math.inf, math.inf))

    @torch.no_grad()
    def evaluate(self, whole: bool = False) -> None:
        """Add a point; say when the next is due, and whether the run has ended."""
        target = self.problem.target
        for model in self.models:
            model.eval()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same draws at every evaluation
            values = self.problem.evaluate(self.models, whole)
            is_near = target is not None and values[0] < NEAR * target
            if is_near and not whole:
                values = self.problem.evaluate(self.models, True)
        for model in self.models:
            model.train()
        self.due = max(self.steps + 1, int((FINE if is_near else self.problem.growth) * self.steps), FIRST)
        if not math.isfinite(values[0]):
            return self._fail(None)
        point = Point(self.steps, self.seconds, *values)
        if target is not None and self.points and point.loss <= target:
            self.end, self.reached = "reached", Point(*met(self.points[-1], point, target), target, *values[1:])
        self.points.append(point)
        return None

    def advance(self, seconds: float) -> None:
        """Go on until its clock stands at `seconds`, or to its end, evaluating in between."""
        while not self.end and self.seconds < seconds:
            self.step()
            if self.steps >= self.due and not self.end:
                self.evaluate()

    def look(self) -> None:
        """Evaluate where it stands, if it goes on and that was not done."""
        if not self.end and (self.points[-1].step < self.steps or math.isnan(self.points[-1].metric)):
            self.evaluate(whole=True)

    def record(self, pace: float = math.nan) -> Record:
        self.end = self.end or "stopped"
        return Record(
            self.entry.name, self.setting, self.seed, self.end, self.steps, self.seconds, self.points, pace,
            self.reached,
        )  # fmt: skip


def take_turns(
    runs: Sequence[Run], limit: Callable[[], float], turn: float = TURN,
    done: Callable[[Run], bool] = lambda run: False, between: Callable[[], object] = lambda: None,
) -> None:  # fmt: skip
    """Always go on for `turn` seconds with the run whose own clock is the least advanced, up to the limit.

    So whatever else the machine does hits all alike.
    """
    while True:
        most = limit()
        live = [run for run in runs if not run.end and run.seconds < most and not done(run)]
        if not live:
            return
        run = min(live, key=lambda run: run.seconds)
        run.advance(min(run.seconds + turn, most))
        between()


@dataclass(frozen=True)
class Trial:
    """One point of a grid; steps and seconds to the target or, where it was not reached, to the end of the run."""

    setting: Setting
    end: str
    steps: float
    seconds: float
    loss: float

    @property
    def rank(self) -> tuple[bool, float, bool, float]:
        """Fewest steps to the target are best; else the lowest loss at the end."""
        reached = self.end == "reached"
        loss = self.loss if math.isfinite(self.loss) else math.inf
        return not reached, self.steps if reached else 0.0, self.end == "abandoned", loss


Attempt = Callable[[Setting, Trial | None], Trial]


def tune(entry: Entry, rates: Sequence[float], attempt: Attempt, extra: Setting | None = None) -> Iterator[Trial]:
    """The learning rates, other settings with the best of them, and further rates while the best lies at their end.

    `attempt` has the best trial so far, too. The middle rate comes first: the others are measured against a good one.
    """
    trials: list[Trial] = []

    def found() -> Trial | None:
        return min(trials, key=lambda trial: trial.rank, default=None)

    def tried(setting: Setting) -> Trial:
        trials.append(attempt(setting, found()))
        return trials[-1]

    middle, usual = len(rates) // 2, {name: values[0] for name, values in entry.axes.items()}
    for lr in (rates[middle], *rates[:middle], *rates[middle + 1 :]):
        yield tried({"lr": lr, **usual, **(extra or {})})
    for name, values in entry.axes.items():
        best = found().setting
        for value in values[1:]:
            yield tried({**best, name: value})
    for _ in range(WIDEN):
        best = found().setting
        lrs = [trial.setting["lr"] for trial in trials if {**trial.setting, "lr": 0} == {**best, "lr": 0}]
        failed = not any(math.isfinite(trial.loss) for trial in trials)  # then a lower one
        if not failed and min(lrs) < best["lr"] < max(lrs):
            break
        up = not failed and best["lr"] == max(lrs)
        yield tried({**best, "lr": half_decade(max(lrs) if up else min(lrs), up)})


def half_decade(lr: float, up: bool) -> float:
    """The next of ..., 0.01, 0.03, 0.1, ... above or below."""
    power = math.floor(math.log10(lr) + 1e-6)
    one = lr < 2 * 10.0**power
    return float(f"{(3 if one else 10) if up else (0.3 if one else 1):g}e{power}")


def kept(before: Result | None, contestants: Mapping[Entry, Setting]) -> list[Record]:
    """The earlier runs of all others."""
    names = {entry.name for entry in contestants}
    return [record for record in before.records if record.name not in names] if before else []


def chosen(options: argparse.Namespace) -> Callable[[str], list[Entry]]:
    """Those of --only, on every problem."""
    return lambda problem: [entry for name, entry in (ENTRIES | ANNEALED).items() if name in options.only]


def said(problem: str, name: str, what: str, end: str, loss: float, steps: float, seconds: float) -> None:
    found = f"{end:9s} loss {loss:<10.4g} steps {steps:<6.0f} {seconds:.2f} s"
    print(f"{problem:12s} {name:10s} {what:24s} {found}", flush=True)


def save_tuned(path: Path, problem: Problem, entry: Entry, trials: Iterator[Trial]) -> None:
    """Each trial into the file of tuned settings, which is read anew: another problem may be tuned meanwhile."""
    grid, best = [], None
    for trial in trials:
        said(problem.name, entry.name, words(trial.setting), trial.end, trial.loss, trial.steps, trial.seconds)
        rounded = {name: round(v, 4) if isinstance(v, float) else v for name, v in asdict(trial).items()}
        grid.append({**rounded, "loss": float(f"{trial.loss:.4g}") if math.isfinite(trial.loss) else None})
        best = min(best or trial, trial, key=lambda trial: trial.rank)
        tuned = load(path)
        chosen = {"chosen": best.setting, "machine": machine(problem.device), "grid": grid}
        tuned.setdefault(problem.name, {})[entry.name] = chosen
        save(path, tuned)


def contest(
    options: argparse.Namespace, problems: Mapping[str, Callable[..., Problem]], kind: type[Result],
    entries_of: Callable[[str], Sequence[Entry]], grid: Callable[[Problem, Entry], Iterator[Trial]],
    raced: Callable[[Problem, dict[Entry, Setting], Any], Result],
) -> dict[str, Any]:  # fmt: skip
    """Tune the rivals on the problems, or race; the results are those of this call and those that --json had.

    `raced` has the earlier result of the problem, too.
    """
    results = {name: kind.read(saved) for name, saved in load(options.json).items()}
    for name in options.problem:
        problem, entries = problems[name](), entries_of(name)
        for entry in [entry for entry in entries if entry.lrs] if options.tune else ():
            save_tuned(options.tuned, problem, entry, grid(problem, entry))
        if options.tune:
            continue
        contestants = settings(options.tuned, problem.name, entries)
        for entry, setting in contestants.items():
            run = Run(problem, entry, setting, seed=0)
            for _ in range(WARM_UP):
                run.step()
        result = raced(problem, contestants, results.get(name))
        results[name] = kind.read(result.plain())  # shown as it is stored
        if options.json:
            save(options.json, {name: result.plain() for name, result in results.items()})
    return {} if options.tune else {name: results[name] for name in problems if name in results}


def settings(path: Path, problem: str, entries: Sequence[Entry]) -> dict[Entry, Setting]:
    """Those who take part, with what they were tuned to.

    Raises:
        SystemExit: a rival was not tuned yet.
    """
    tuned = load(path).get(problem, {})
    missing = [entry.name for entry in entries if entry.lrs and entry.name not in tuned]
    if missing:
        raise SystemExit(f"not tuned: --tune --problem {problem} --only {' '.join(missing)}")
    return {entry: tuned[entry.name]["chosen"] if entry.lrs else {} for entry in entries}
