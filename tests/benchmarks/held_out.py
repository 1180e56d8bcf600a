"""Twelve problems judged by data that no step has seen, at equal CPU time, and five tables with early stopping.

    pip install -e ".[bench]"                                              (or `make held-out`)
    python tests/benchmarks/held_out.py --problem vit gpt --seeds 1       # two problems, one seed
    python tests/benchmarks/held_out.py --tune                            # tune the rivals: hours; goes on where it was
    python tests/benchmarks/held_out.py --only kfac ekfac --json FILE     # ours anew, into a file that has rivals

AdamW, SGD, Muon and SOAP have learning rate and weight decay tuned with seed 0 for the lowest held-out loss at the end
of the budget, each trial under the cosine schedule to zero that they race with; `held_out_tuned.json` has the grids.
Schedule-free AdamW has its defaults. Ours have nothing set, and run at a constant rate, under a cosine schedule and
under a linear one. Schedules follow the share of the budget that is used, `lr = f(seconds / budget)`, for rivals and
ours alike: nobody has to know how many steps fit. Tables are trained at a constant rate until the held-out loss has
not fallen for some epochs, AdamW with its usual rate of 1e-3.

The clock shows CPU seconds of zero_grad, forward, backward and step, one thread, brought to the pace of the machine
that PACES were measured on by steps of SGD taken in between, so that other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _contest import OPTIONS, WARM_UP, Attempt, Record, Run, Trial, contest, kept, said, tune
from _held_out_problems import PATIENCE, PROBLEMS, TABLES, Table
from _held_out_report import HeldOutResult, held_out_tables, loss_of
from _problems import Problem
from _race_rivals import ENTRIES, Entry, Setting, cosine, linear
from _report import load, machine, options_of, words
from torch import nn

TUNED = Path(__file__).with_name("held_out_tuned.json")
PACES = {  # milliseconds of a step of SGD on one core of an AMD EPYC that does little else
    "cnn": 10.5, "vit": 12.8, "dropout": 2.7, "gpt": 9.0, "ratings": 1.3, "table": 0.7,
    "lstm": 16.5, "photograph": 1.8, "vae": 8.5, "resnet": 21.0, "labels": 8.0, "text": 20.0,
}  # fmt: skip
LOOKS = 12  # evaluations of a run, evenly over its budget
SELDOM = 1e9  # growth of the steps between further ones
PARTS, HURDLES = (0.25, 0.5), (1.6, 1.25)  # a trial is given up there, at so many times the best one's held-out loss
SHARE = 8  # steps of SGD are an eighth of the work
RECENT = 15  # of which so many say how fast the machine is
RENEWED = 20  # batches for the statistics of BatchNorm at averaged parameters
EPOCHS = 300  # of a table at most
RATES, DECAYS = (1e-3, 3e-3, 1e-2), {"decay": (0.1, 0.0, 0.01, 1.0)}


def free(model: nn.Module, problem: Problem) -> Any:
    from schedulefree import AdamWScheduleFree

    return AdamWScheduleFree(model.parameters())


def tuned(name: str, lrs: tuple[float, ...] = RATES, **axes: tuple[float, ...]) -> Entry:
    return replace(ENTRIES[name], lrs=lrs, axes=axes or DECAYS, schedule=cosine)


def scheduled(name: str) -> Iterator[Entry]:
    entry = ENTRIES[name]
    yield from (entry, entry.under(cosine, "cosine"), entry.under(linear, "linear"))


CONTESTANTS = (
    tuned("adamw"), tuned("sgd", (1e-2, 3e-2, 1e-1), decay=(5e-4, 0.0, 1e-4, 5e-3)), tuned("muon"), tuned("soap"),
    Entry("schedulefree", "schedule-free AdamW", free), *scheduled("kfac"), *scheduled("ekfac"),
)  # fmt: skip
STOPPED = (  # the contestants of tables
    Entry("adamw", "AdamW, 1e-3", lambda model, problem: torch.optim.AdamW(model.parameters(), 1e-3)),
    *(contestant for contestant in CONTESTANTS if contestant.name in ("kfac", "ekfac")),
)


class Pace:
    """Brings seconds of this moment to those of the machine of PACES, by steps of SGD whose length is zero."""

    def __init__(self, problem: Problem) -> None:
        quiet = replace(problem, evaluate=lambda models, whole: (0.0, 0.0, 0.0))
        self.usual, self.owed = Run(quiet, ENTRIES["sgd"], {"lr": 0.0}, seed=0), 0.0
        for _ in range(WARM_UP + RECENT):
            self.usual.step()
        self.reference = PACES.get(problem.name, 1e3 * self.now()) / 1e3

    def now(self) -> float:
        return statistics.median(self.usual.durations[-RECENT:])

    def scaled(self, seconds: float) -> float:
        self.owed += seconds
        if self.owed > SHARE * self.now():
            self.usual.step()
            self.owed = 0.0
        return seconds * self.reference / self.now()


class PacedRun(Run):
    """A run whose clock shows the seconds of the machine of PACES."""

    def __init__(
        self, problem: Problem, entry: Entry, setting: Setting, seed: int, pace: Pace, budget: float = math.inf
    ) -> None:
        self.pace = pace
        super().__init__(problem, entry, setting, seed, budget)

    def step(self) -> None:
        before = self.seconds
        super().step()
        self.seconds = before + self.pace.scaled(self.durations[-1])

    def evaluate(self, whole: bool = False) -> None:
        with self._averaged():
            super().evaluate(whole)

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """Schedule-free optimizers are evaluated where they say, with BatchNorm's statistics of that place."""
        if not hasattr(self.optimizers[0], "eval"):
            yield
            return
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            optimizer.eval()
            buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
            norms = [layer for layer in model.modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm)]
            if norms:
                self._renew(model, norms)
            yield
            model.load_state_dict(buffers, strict=False)
            optimizer.train()

    def _renew(self, model: nn.Module, norms: Sequence[Any]) -> None:
        """Their means over some batches, as the package advises."""
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for _, (x, _) in zip(range(RENEWED), self.problem.batches(0), strict=False):
                model(x)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


@dataclass(frozen=True)
class HeldOutTrial(Trial):
    """Its loss is the held-out one; `looks` are those at PARTS."""

    looks: tuple[float, ...] = ()

    @classmethod
    def read(cls, saved: dict[str, Any]) -> HeldOutTrial:
        return cls(**{**saved, "loss": math.inf if saved["loss"] is None else saved["loss"]})


def trial_of(problem: Problem, entry: Entry, budget: float, pace: Pace, earlier: Sequence[Any] = ()) -> Attempt:
    """Trials that were made before are not made again."""
    known = {words(saved["setting"]): HeldOutTrial.read(saved) for saved in earlier}

    def attempt(setting: Setting, best: Trial | None) -> Trial:
        if words(setting) in known:
            return known[words(setting)]
        run = PacedRun(replace(problem, growth=SELDOM), entry, setting, 0, pace, budget)
        looks: list[float] = []
        others = getattr(best, "looks", ())
        for part in (*PARTS, 1.0):
            run.advance(part * budget)
            run.look()
            now = loss_of(run.points[-1])
            if run.end or part == 1.0:
                return HeldOutTrial(setting, run.end or "stopped", run.steps, run.seconds, now, tuple(looks))
            looks.append(float(f"{now:.4g}"))
            if len(others) >= len(looks) and now > HURDLES[len(looks) - 1] * others[len(looks) - 1]:
                break
        return HeldOutTrial(setting, "abandoned", run.steps, run.seconds, now, tuple(looks))

    return attempt


def trained(problem: Problem, entry: Entry, setting: Setting, seed: int, pace: Pace, budget: float) -> Record:
    """To the end of the budget; a table, until it has not become better for PATIENCE epochs."""
    run = PacedRun(replace(problem, growth=SELDOM), entry, setting, seed, pace, budget)
    if isinstance(problem, Table):
        best = 0
        while not run.end and len(run.points) - best <= PATIENCE and len(run.points) <= EPOCHS:
            for _ in range(problem.epoch):
                if not run.end:
                    run.step()
            run.look()
            best = min(range(len(run.points)), key=lambda i: loss_of(run.points[i]))
    for part in range(LOOKS) if budget < math.inf else ():
        run.advance((part + 1) / LOOKS * budget)
        run.look()
    return run.record(1e3 * pace.now())


def raced(
    options: argparse.Namespace, problem: Problem, contestants: Mapping[Entry, Setting], before: HeldOutResult | None
) -> HeldOutResult:
    """Beside the earlier runs of all others."""
    pace, budget = Pace(problem), budget_of(options, problem)
    records = kept(before, contestants)
    for seed in range(options.seeds):
        for entry, setting in contestants.items():
            record = trained(problem, entry, setting, seed, pace, budget)
            last = record.points[-1]
            said(problem.name, entry.name, f"seed {seed}", record.end, loss_of(last), last.step, last.seconds)
            records.append(record)
    limit = 0.0 if math.isinf(budget) else budget
    return HeldOutResult(problem.title, machine("cpu"), records, problem.objective, problem.metric, limit)


def budget_of(options: argparse.Namespace, problem: Problem) -> float:
    return math.inf if isinstance(problem, Table) else options.scale * problem.budget


def grid(options: argparse.Namespace, problem: Problem, entry: Entry) -> Iterator[Trial]:
    earlier = load(options.tuned).get(problem.name, {}).get(entry.name, {}).get("grid", [])
    return tune(entry, entry.lrs, trial_of(problem, entry, budget_of(options, problem), Pace(problem), earlier))


def main(args: Sequence[str] | None = None) -> None:
    families = list(dict.fromkeys(entry.family for entry in CONTESTANTS))
    options = options_of(__doc__, args, problem=[*PROBLEMS, *TABLES], only=families, tuned=TUNED, **OPTIONS)
    entries = lambda name: [one for one in (STOPPED if name in TABLES else CONTESTANTS) if one.family in options.only]
    problems = PROBLEMS | TABLES
    results = contest(options, problems, HeldOutResult, entries, partial(grid, options), partial(raced, options))
    if results:
        print(held_out_tables(results))


if __name__ == "__main__":
    main()
