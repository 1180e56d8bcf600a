"""A race to a training loss: ours, which have nothing to tune, against rivals that were tuned over a grid.

    pip install -e ".[bench]"                                        (or `make race`)
    python tests/benchmarks/race.py --problem cnn --seeds 1          # one problem, one seed
    python tests/benchmarks/race.py --tune                           # tune all rivals anew: an hour or two
    python tests/benchmarks/race.py --tune --only muon --problem gpt # or one of them
    python tests/benchmarks/race.py --batches 64 500 --problem tanh  # ours alone, at several batch sizes

Rivals keep one learning rate throughout, have no weight decay, and are tuned with seed 0 for the fewest steps to the
target, over half decades of the learning rate that go on while the best lies at their end, and over other settings
with the best of them. `race_tuned.json` has the grids. All contestants of a seed share the process: the one whose own
clock is the least advanced goes next, and only zero_grad, forward, backward and step are on the clock. It shows CPU
seconds of one thread, so that other work on the machine does not count; on a GPU, seconds. What a step costs beside
SGD's is in `step_overhead.py --families`.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from _contest import LEAD, OPTIONS, Attempt, Record, Run, Trial, chosen, contest, said, take_turns, tune
from _contest_report import RaceResult, race_table
from _problems import PROBLEMS, Problem
from _race_rivals import ENTRIES, OURS, Entry, Setting
from _report import DEVICE, machine, markdown, options_of

TUNED = Path(__file__).with_name("race_tuned.json")
PRUNE = 1.3  # a point of a grid is abandoned after this many times the seconds of the best


def trial_of(problem: Problem, entry: Entry, cap: float) -> Attempt:
    """Runs end after `cap` seconds, and after `PRUNE` times those of the best so far."""

    def attempt(setting: Setting, best: Trial | None) -> Trial:
        limit = min(cap, PRUNE * best.seconds) if best and best.end == "reached" else cap
        run = Run(problem, entry, setting, seed=0)
        while not run.end and run.seconds < limit:
            run.advance(run.seconds + 0.02 * limit)
        run.look()
        last = (record := run.record()).last
        return Trial(setting, record.end, last.step, last.seconds, last.loss)

    return attempt


def race(problem: Problem, contestants: Mapping[Entry, Setting], seed: int, cap: float) -> list[Record]:
    """A run stops at the target, where it fails, or after `LEAD` times the winner's seconds, but not before `cap`."""
    runs = [Run(problem, entry, setting, seed) for entry, setting in contestants.items()]
    first = lambda: min((run.seconds for run in runs if run.reached), default=0.0)
    take_turns(runs, lambda: max(LEAD * first(), cap))
    for run in runs:
        run.look()
    return [run.record() for run in runs]


def raced(options: argparse.Namespace, problem: Problem, contestants: Mapping[Entry, Setting], _: Any) -> RaceResult:
    """All anew, as they share a process."""
    records = []
    for seed in range(options.seeds):
        for record in race(problem, contestants, seed, options.scale * problem.budget):
            last = record.last
            said(problem.name, record.name, f"seed {seed}", record.end, last.loss, last.step, last.seconds)
            records.append(record)
    clock = "seconds" if options.device.startswith("cuda") else "CPU seconds"
    return RaceResult(
        problem.title, machine(options.device), records, unit=problem.objective, target=problem.target, clock=clock
    )


def batch_table(options: argparse.Namespace) -> str:
    """Steps and seconds to the target at several batch sizes, the median of the seeds."""
    ours = {entry: {} for entry in OURS if entry.name in options.only}
    head = ["problem", "batch", *(f"{entry.label}, {what}" for entry in ours for what in ("steps", "s"))]
    rows = []
    for name, size in itertools.product(options.problem, options.batches):
        problem = PROBLEMS[name](options.device, batch=size)
        cap = options.scale * problem.budget
        found = [race(problem, ours, seed, cap) for seed in range(options.seeds)]
        cells = []
        for records in zip(*found, strict=True):
            steps, seconds = (
                statistics.median(getattr(one.reached, what) if one.reached else math.inf for one in records)
                for what in ("step", "seconds")
            )
            cells += [f"{steps:.0f}", f"{seconds:.2f}"] if math.isfinite(steps) else ["-", f"not in {cap:.0f}"]
        rows.append([name, str(size), *cells])
        print(*rows[-1], flush=True)
    seeds = "one seed" if options.seeds == 1 else f"median of {options.seeds} seeds"
    return markdown(head, rows) + f"\n\n{seeds[0].upper()}{seeds[1:]}; {machine(options.device)}.\n"


def main(args: Sequence[str] | None = None) -> None:
    options = options_of(
        __doc__, args, problem=list(PROBLEMS), only=list(ENTRIES), batches=[int], device=DEVICE, tuned=TUNED, **OPTIONS
    )  # fmt: skip
    if options.batches:
        return print(batch_table(options))
    problems = {name: partial(make, options.device) for name, make in PROBLEMS.items()}
    grid = lambda problem, entry: tune(entry, entry.lrs, trial_of(problem, entry, options.scale * problem.budget))
    results = contest(options, problems, RaceResult, chosen(options), grid, partial(raced, options))
    return print("\n" + "\n".join(map(race_table, results.values())))


if __name__ == "__main__":
    main()
