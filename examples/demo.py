"""KFAC with its defaults against tuned SGD and AdamW on 1,797 real digits: tables and a picture.

Usage:
    python examples/demo.py            # under three minutes on two cores; writes out/demo.png
    python examples/demo.py --quick    # a few steps, to see that everything runs
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from demo_picture import draw
from demo_problems import Problem, problems
from demo_race import Run, Tuning, race, tune

INTRODUCTION = """\
KFAC(model) with its defaults, untouched, against SGD with momentum 0.9 and AdamW (weight decay 0.01, torch's default).
The learning rate of each rival is tuned over the grid printed with its results, on the very loss that is compared
(training loss after the same {steps} steps, same seed, same batches). That is in the rivals' favour, and the time it
takes is counted separately. A grid grows by half-decades while its best lies at its end. KFAC is not tuned.
The race: the run whose own clock is the least advanced makes the next step, so that whatever else the machine does hits
all alike; clocks count the training loop alone, not the evaluation. All go on until the slowest has made {steps} steps.
Data: 1,437 digits for training, 360 held out. Seed {seed}, {threads} thread(s), {device}, torch {torch}."""
QUANTITIES = {"train": "training loss", "test": "test loss", "accuracy": "test accuracy"}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="steps of the comparison (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of initial weights and batches (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch; the models are tiny (%(default)s)")
    parser.add_argument("--device", default=os.environ.get("DEVICE") or "cpu", help="($DEVICE, or cpu)")
    parser.add_argument("--out", type=Path, default=Path("out/demo.png"), help="the picture (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="at most 4 steps and two learning rates: a test run")
    options = parser.parse_args(argv)
    if options.steps < 4 or options.threads < 1:
        parser.error("--steps must be at least 4 and --threads at least 1")
    if options.quick:
        options.steps = min(options.steps, 4)
    return options


def say(text: str = "") -> None:
    print(text, flush=True)


def show(value: float, what: str = "train") -> str:
    if what == "accuracy":
        return "-" if math.isnan(value) else f"{100 * value:.1f} %"
    return "diverged" if value == math.inf else f"{value:.4g}"


def quantities(problem: Problem) -> list[str]:
    return [what for what in QUANTITIES if what != "accuracy" or problem.labelled]


def describe_tuning(tuning: Tuning, unit: str) -> str:
    cells = ", ".join(f"{lr:g}: {show(loss)}" for lr, loss in tuning.losses.items())
    edge = " (at the end of the grid)" if tuning.best in (min(tuning.losses), max(tuning.losses)) else ""
    return f"  {tuning.kind:5} lr {tuning.best:g}{edge}, tuned in {tuning.seconds:.1f} s over {{{cells}}} {unit}"


def milestones(runs: Sequence[Run], marks: Sequence[int]) -> list[tuple[str, int | float]]:
    """Columns of the tables: numbers of steps (int), then seconds (float) of the fastest and of the slowest run."""
    times = sorted({run.reached for run in runs if run.reached < math.inf})
    ends = [times[0], times[-1]] if len(times) > 1 else times
    return [(f"{mark} steps", mark) for mark in marks] + [(f"{seconds:.3g} s", seconds) for seconds in ends]


def value_at(run: Run, mark: int | float, what: str) -> float:
    return run.at_step(mark, what) if isinstance(mark, int) else run.at_time(mark, what)


def table(runs: Sequence[Run], marks: Sequence[int], what: str) -> str:
    columns = milestones(runs, marks)
    unit = "" if what == "accuracy" else f" [{runs[0].problem.unit}]"
    rows = [["", *(title for title, _ in columns)]]
    for run in runs:
        rows.append([run.name, *(show(value_at(run, mark, what), what) for _, mark in columns)])
    width = max(len(row[0]) for row in rows)
    lines = ["  ".join([row[0].ljust(width), *(cell.rjust(10) for cell in row[1:])]) for row in rows]
    return "\n".join([f"  {QUANTITIES[what]}{unit} after", *(f"  {line}" for line in lines)])


def timings(runs: Sequence[Run]) -> str:
    cells = [f"{run.name}: {1000 * run.seconds / run.steps:.1f} ms a step, {run.steps} steps" for run in runs]
    return "  " + "; ".join(cells)


def compare(runs: Sequence[Run], mark: int | float, what: str, score: Counter[str]) -> str:
    """How KFAC, the first run, stands, made from the numbers alone and counted in `score`."""
    first, *rivals = runs
    own = value_at(first, mark, what)
    groups: dict[str, list[str]] = {"ahead of": [], "level with": [], "behind": []}
    for run in rivals:
        other = value_at(run, mark, what)
        low, high = (other, own) if what == "accuracy" else (own, other)
        word = "ahead of" if low < high else "behind" if low > high else "level with"
        groups[word].append(f"{run.kind} ({show(other, what)})")
        score[word] += 1
    parts = [f"{word} {' and '.join(names)}" for word, names in groups.items() if names]
    return f"KFAC ({show(own, what)}) is {', '.join(parts)}"


def catch_up(first: Run, rival: Run, steps: int) -> str:
    """When the first run came to where the rival was after its steps."""
    target = rival.at_step(steps, "train")
    hit = next((p for p in first.points if p.train <= target), None)
    where = f"by step {hit.step}, {hit.seconds:.3g} s" if hit else "nowhere in this run"
    return (
        f"{rival.kind}'s training loss after {steps} steps, {rival.reached:.3g} s ({show(target)}): KFAC has it {where}"
    )


def verdict(runs: Sequence[Run], marks: Sequence[int]) -> list[str]:
    """What happened, in sentences."""
    lines = []
    score: Counter[str] = Counter()
    for title, mark in milestones(runs, marks)[len(marks) - 1 :]:
        for what in quantities(runs[0].problem):
            lines.append(f"  After {title}, {QUANTITIES[what]}: {compare(runs, mark, what, score)}.")
    lines += [f"  {catch_up(runs[0], run, marks[-1])}." for run in runs[1:] if run.reached < math.inf]
    counts = f"ahead in {score['ahead of']}, level in {score['level with']}, behind in {score['behind']}"
    return [*lines, f"  Of these {score.total()} comparisons KFAC is {counts}."]


def play(problem: Problem, options: argparse.Namespace, marks: Sequence[int]) -> list[Run]:
    """Tune, race and report on one problem."""
    say(f"\n== {problem.name} ==\n{problem.text}")
    if problem.floors[0]:
        train, test = problem.floors
        say(
            f"Grey pixels cost their entropy: no model has a lower loss than {train:.2f} (training), {test:.2f} (test)."
        )
    say("\nTuning, training loss by learning rate:")
    entries = {"KFAC": math.nan}
    spent = 0.0
    for kind, grid in problem.grids.items():
        chosen = grid[1:3] if options.quick else grid
        tuning = tune(problem, kind, chosen, options.steps, options.seed, widen=not options.quick)
        entries[kind] = tuning.best
        spent += tuning.seconds
        say(describe_tuning(tuning, problem.unit))
    start = time.perf_counter()
    runs = race(problem, entries, options.steps, marks, options.seed)
    raced = time.perf_counter() - start
    say(f"  KFAC  not tuned. Tuning the rivals took {spent:.1f} s; the race, with its evaluations, {raced:.1f} s.\n")
    for what in quantities(problem):
        say(table(runs, marks, what) + "\n")
    say(timings(runs))
    say("\n".join(verdict(runs, marks)))
    return runs


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; `argv` as on the command line."""
    options = parse(argv)
    start, threads = time.perf_counter(), torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        facts = {"threads": options.threads, "device": options.device, "torch": torch.__version__}
        say(INTRODUCTION.format(steps=options.steps, seed=options.seed, **facts))
        if options.quick:
            say("--quick: too few steps and learning rates for the numbers to mean anything.")
        marks = sorted({max(1, options.steps // 4), options.steps // 2, options.steps})
        given = problems(torch.device(options.device))
        races = [play(problem, options, marks) for problem in given]
        options.out.parent.mkdir(parents=True, exist_ok=True)
        draw(races, given[1].test[1], options.steps, options.out)
    finally:
        torch.set_num_threads(threads)
    say(f"\nPicture: {options.out.resolve()} (curves by step and by second, reconstructions)")
    say(f"All of it took {time.perf_counter() - start:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
