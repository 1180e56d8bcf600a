"""A race to a training loss: ours, which have nothing to tune, against rivals that were tuned over a grid.

    pip install -e ".[bench]"                                        (or `make race`)
    python tests/benchmarks/race.py --problem cnn --seeds 1          # one problem, one seed
    python tests/benchmarks/race.py --tune                           # tune all rivals anew: an hour or two
    python tests/benchmarks/race.py --tune --only muon --problem gpt # or one of them
    python tests/benchmarks/race.py --cost                           # milliseconds of our steps beside SGD's
    python tests/benchmarks/race.py --batches 64 500 --problem tanh  # ours alone, at several batch sizes
    python tests/benchmarks/race.py --report --json race.json --table race.md --figure race.png    # nothing is run

Rivals keep one learning rate throughout, have no weight decay, and are tuned with seed 0 for the fewest steps to the
target, over half decades of the learning rate that go on while the best lies at their end, and over other settings
with the best of them. `race_tuned.json` has the grids. All contestants of a seed share the process: the one whose own
clock is the least advanced goes next, and only zero_grad, forward, backward and step are on the clock. It shows CPU
seconds of one thread, so that other work on the machine does not count; on a GPU, seconds.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from _contest import save_tuned, settings
from _race_problems import PROBLEMS, Problem
from _race_report import Record, Result, figure, grid_lines, table
from _race_rivals import ENTRIES, OURS
from _race_run import cost, race, rank, tune, warm_up
from _report import load, machine, markdown, save, words

TUNED = Path(__file__).with_name("race_tuned.json")


def arguments(args: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--problem", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--only", nargs="+", choices=ENTRIES, default=list(ENTRIES), help="these contestants alone")
    parser.add_argument("--seeds", type=int, default=3)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--tune", action="store_true", help="tune the rivals, save what was found, and stop")
    what.add_argument("--cost", action="store_true", help="compare the steps of ours with SGD's, and stop")
    what.add_argument("--batches", type=int, nargs="+", help="race ours at these batch sizes, and stop")
    what.add_argument("--report", action="store_true", help="run nothing: table and figure of what --json holds")
    parser.add_argument("--tuned", type=Path, default=TUNED, help="file of the tuned settings")
    parser.add_argument("--cap-scale", type=float, default=1.0, help="multiplies the seconds that a run may take")
    parser.add_argument("--turn", type=float, default=0.1, help="seconds of one turn in the race")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default=os.environ.get("DEVICE", "cpu"))
    parser.add_argument("--json", type=Path, help="file of all points; problems that it has already are replaced")
    parser.add_argument("--table", type=Path, help="write the tables and grids, in Markdown")
    parser.add_argument("--figure", type=Path, help="draw training loss over seconds")
    return parser.parse_args(args)


def tell(problem: Problem, what: str, end: str, loss: float, steps: float, seconds: float) -> None:
    print(f"{problem.name:12s} {what} {end:9s} loss {loss:<10.4g} steps {steps:<6.0f} {seconds:.2f} s", flush=True)


def tune_all(options: argparse.Namespace, problem: Problem) -> None:
    for entry in (ENTRIES[name] for name in ENTRIES if name in options.only and ENTRIES[name].lrs):
        trials = []
        for trial in tune(problem, entry, options.cap_scale * problem.cap):
            trials.append(trial)
            what = f"{entry.name:10s} {words(trial.setting):24s}"
            tell(problem, what, trial.end, trial.loss, trial.steps, trial.seconds)
        best = min(trials, key=rank)
        save_tuned(options.tuned, problem.name, entry, best, trials, options.device)
        print(f"{problem.name}: {entry.label}: {words(best.setting)}", flush=True)


def race_all(options: argparse.Namespace, problem: Problem) -> Result:
    chosen = [ENTRIES[name] for name in ENTRIES if name in options.only]
    contestants = settings(options.tuned, problem.name, chosen, f"race.py --tune --problem {problem.name} --only")
    warm_up(problem, contestants)
    records = []
    for seed in range(options.seeds):
        runs = race(problem, contestants, seed, options.cap_scale * problem.cap, options.turn)
        for run in runs:
            last = run.reached or run.points[-1]
            tell(problem, f"{run.entry.name:10s} seed {seed}", run.end, last.train, last.step, last.seconds)
        records += [Record.of(run) for run in runs]
    clock = "seconds" if options.device.startswith("cuda") else "CPU seconds"
    return Result(problem.title, problem.unit, problem.target, clock, machine(options.device), records)


def cost_table(options: argparse.Namespace, problems: Sequence[Problem]) -> str:
    ours = [entry for entry in OURS if entry.name in options.only]
    head, rows = ["problem", "optimizer", "median, ms", "to SGD's", "mean, ms", "to SGD's", "longest, ms"], []
    for problem in problems:
        costs = cost(problem, [ENTRIES["sgd"], *ours], steps=100, skipped=30)
        base = costs[ENTRIES["sgd"]]
        for entry, found in costs.items():
            numbers = [found.median, found.median / base.median, found.mean, found.mean / base.mean, found.longest]
            rows.append([problem.name, entry.label, *(f"{x:.3g}" for x in numbers)])
            print(*rows[-1], flush=True)
    return markdown(head, "llr", rows) + f"\n\n100 steps after 30, of all in turn; {machine(options.device)}.\n"


def batch_table(options: argparse.Namespace, names: Sequence[str]) -> str:
    """Steps and seconds to the target at several batch sizes, the median of the seeds."""
    ours = {entry: {} for entry in OURS if entry.name in options.only}
    head = ["problem", "batch", *(f"{entry.label}, {what}" for entry in ours for what in ("steps", "s"))]
    rows = []
    for name, size in itertools.product(names, options.batches):
        problem = PROBLEMS[name](options.device, batch=size)
        cap = options.cap_scale * problem.cap
        found = [race(problem, ours, seed, cap, options.turn) for seed in range(options.seeds)]
        cells = []
        for runs in zip(*found, strict=True):
            reached = [run.reached for run in runs if run.reached]
            steps, seconds = (
                statistics.median([getattr(point, what) for point in reached] + [math.inf] * (len(runs) - len(reached)))
                for what in ("step", "seconds")
            )
            cells += [f"{steps:.0f}", f"{seconds:.2f}"] if math.isfinite(steps) else ["-", f"not in {cap:.0f}"]
        rows.append([name, str(size), *cells])
        print(*rows[-1], flush=True)
    seeds = "one seed" if options.seeds == 1 else f"median of {options.seeds} seeds"
    return markdown(head, "lr", rows) + f"\n\n{seeds[0].upper()}{seeds[1:]}; {machine(options.device)}.\n"


def report(options: argparse.Namespace, results: dict[str, Result]) -> None:
    tuned = load(options.tuned)
    text = "\n".join(table(result) for result in results.values())
    print(f"\n{text}")
    if options.table:
        lines = [line for name in results for line in grid_lines(tuned.get(name, {}), results[name].title)]
        options.table.write_text(f"{text}\n### Grids\n\n" + "\n".join(lines))
    if options.figure and results:
        figure(results, options.figure)


def main(args: Sequence[str] | None = None) -> None:
    options = arguments(args)
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    saved = load(options.json) if options.json else {}
    results = {name: Result.read(result) for name, result in saved.items()}
    if options.report:
        return report(options, results)
    problems = [PROBLEMS[name](options.device) for name in PROBLEMS if name in options.problem]
    if options.cost or options.batches:
        text = cost_table(options, problems) if options.cost else batch_table(options, options.problem)
        print(f"\n{text}")
        if options.table:
            options.table.write_text(text)
        return None
    for problem in problems:
        if options.tune:
            tune_all(options, problem)
            continue
        results[problem.name] = race_all(options, problem)
        if options.json:
            save(options.json, {name: result.plain() for name, result in results.items()})
    if not options.tune:
        report(options, results)
    return None


if __name__ == "__main__":
    main()
