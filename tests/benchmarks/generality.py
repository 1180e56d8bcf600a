"""Sixteen families of problems: ours, with one configuration and nothing to set, against rivals tuned on each.

    pip install -e ".[bench]"                                            (or `make generality`)
    python tests/benchmarks/generality.py --problem vit lstm --seeds 1  # two families, one seed
    python tests/benchmarks/generality.py --tune                         # tune all rivals anew: half an hour
    python tests/benchmarks/generality.py --only kfac --json FILE        # ours anew, beside the rivals of a file

Rivals have no weight decay, keep one learning rate or follow a cosine to zero over the budget, and are tuned for either
with seed 0: for the lowest training loss at the end of the family's budget of CPU seconds, over half decades of the
learning rate that go on while the best lies at their end. `generality_tuned.json` has the grids. SGD is tuned
first: all others, and races, have as many seconds as its steps take, so a slower machine runs longer. One thread; only
zero_grad, forward, backward and step are on the clock.
All contestants of a seed share the process and take turns. Where some are raced beside runs of another time, their
seconds are brought to the pace that the machine had then, by steps of SGD taken in between.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from _contest import (
    LEAD,
    OPTIONS,
    Attempt,
    Record,
    Run,
    Trial,
    chosen,
    contest,
    half_decade,
    kept,
    said,
    settings,
    take_turns,
    tune,
)
from _contest_report import FamilyResult, Targets, alike, crossing, ended, family_tables
from _generality_families import FAMILIES
from _problems import Problem
from _race_rivals import ANNEALED, ENTRIES, Entry, Setting
from _report import load, machine, options_of, words

TUNED = Path(__file__).with_name("generality_tuned.json")
HALF, END = (0.42, 0.46, 0.5), (0.8, 0.9, 1.0)  # of the budget: where a trial is evaluated
SELDOM = 10.0  # growth of the steps between its other evaluations
PACED = 100  # steps of SGD that tell how fast the machine is
PRUNE = 3.0  # a learning rate is abandoned if half-way its loss is this many times that of the best so far
RATES = (3e-4, 1e-3, 3e-3, 1e-2)
GRIDS = {"sgd": (1e-2, 3e-2, 1e-1, 3e-1), "adamw": RATES, "muon": RATES, "soap": RATES}  # to begin with
CONTESTANTS = [*GRIDS, *ANNEALED, "kfac", "ekfac"]


def trial_of(family: Problem, entry: Entry, budget: float) -> Attempt:
    """A trial is evaluated seldom, and abandoned half-way where its loss is above `PRUNE` times that of the best."""
    halves: dict[str, float] = {}

    def attempt(setting: Setting, best: Trial | None) -> Trial:
        hurdle = PRUNE * halves[words(best.setting)] if best else math.inf
        run = Run(replace(family, growth=SELDOM), entry, setting, seed=0, budget=budget)

        def loss_after(parts: Sequence[float]) -> float:
            for part in parts:
                run.advance(part * budget)
                run.look()
            return ended(entry.name, run.points, run.seconds)

        half = halves[words(setting)] = loss_after(HALF)
        loss = loss_after(END if half <= hurdle else ())
        end = run.end or ("abandoned" if half > hurdle else "stopped")
        return Trial(setting, end, run.steps, run.seconds, loss)

    return attempt


def grid(options: argparse.Namespace, family: Problem, entry: Entry) -> Iterator[Trial]:
    """SGD comes first: as many seconds as its steps take are the budget of all others.

    Under a cosine the best constant rate and the half decade above it come first.
    """
    budget = options.scale * family.budget if entry.name == "sgd" else budget_here(options, family)
    rates, extras = GRIDS.get(entry.name, ()), [{"momentum": momentum} for momentum in family.momenta] or [{}]
    if entry.name in ANNEALED:
        constant = settings(options.tuned, family.name, [ENTRIES[entry.family]])[ENTRIES[entry.family]]
        rates = constant["lr"], half_decade(constant["lr"], up=True)
        extras = [{name: value for name, value in constant.items() if name != "lr"}]
    for extra in extras:
        yield from tune(entry, rates, trial_of(family, entry, budget), extra)


def budget_here(options: argparse.Namespace, family: Problem) -> float:
    """The budget's seconds on this machine: rivals take about as many steps as they were tuned for.

    Raises:
        SystemExit: SGD was not tuned.
    """
    sgd = load(options.tuned).get(family.name, {}).get("sgd")
    if sgd is None:
        raise SystemExit(f"not tuned: --tune --problem {family.name} --only sgd")
    then = statistics.median([trial["seconds"] / trial["steps"] for trial in sgd["grid"]])
    run = Run(family, ENTRIES["sgd"], {"lr": 0.0}, seed=0)
    for _ in range(PACED):
        run.step()
    return options.scale * family.budget * statistics.median(run.durations) / then


def race(
    family: Problem, contestants: Mapping[Entry, Setting], seed: int, budget: float, rivals: Sequence[Record] = ()
) -> list[Record]:
    """Train with all of them in turns, steps of SGD of length zero in between, which tell how fast the machine is.

    Ours go on after the budget, for `LEAD` times as long at most, until they come to the targets that the rivals set:
    those among the contestants, and `rivals` of another time, to whose pace the budget is then brought.
    """
    usual = Run(family, ENTRIES["sgd"], {"lr": 0.0}, seed)
    usual.step()
    pace = lambda: 1e3 * statistics.median(usual.durations)
    limit = lambda times: lambda: times * budget * (pace() / rivals[0].pace if rivals else 1.0)
    runs = [Run(family, entry, setting, seed) for entry, setting in contestants.items()]

    def between() -> None:
        usual.step()
        for run in runs:
            run.budget = limit(1.0)()

    between()
    take_turns(runs, limit(1.0), between=between)
    for run in runs:
        run.look()
    if ours := [run for run in runs if not run.entry.lrs]:
        records = [*rivals, *(run.record(pace()) for run in runs if run.entry.lrs)]
        groups = [group for annealed in (False, True) if (group := alike(records, annealed))]
        targets = [Targets.of(group, budget) for group in groups]
        losses = [loss for target in targets for loss in (target.loss, target.adamw)]
        reached = lambda run: all(crossing(run.points, loss) for loss in losses)
        take_turns(ours, limit(LEAD), done=reached, between=usual.step)
        for run in ours:
            run.look()
    return [run.record(pace()) for run in runs]


def raced(
    options: argparse.Namespace, family: Problem, contestants: Mapping[Entry, Setting], before: FamilyResult | None
) -> FamilyResult:
    """Beside the earlier runs of all others."""
    records = kept(before, contestants)
    earlier = [record for record in records if record.setting]
    budget = before.budget if before and earlier else budget_here(options, family)
    for seed in range(options.seeds):
        rivals = [record for record in earlier if record.seed == seed]
        for record in race(family, contestants, seed, budget, rivals):
            last = record.last
            said(family.name, record.name, f"seed {seed}", record.end, last.loss, last.step, last.seconds)
            records.append(record)
    return FamilyResult(family.title, machine("cpu"), records, family.objective, family.metric, budget)


def main(args: Sequence[str] | None = None) -> None:
    options = options_of(__doc__, args, problem=list(FAMILIES), only=CONTESTANTS, tuned=TUNED, **OPTIONS)
    results = contest(options, FAMILIES, FamilyResult, chosen(options), partial(grid, options), partial(raced, options))
    if results:
        print(family_tables(results))


if __name__ == "__main__":
    main()
