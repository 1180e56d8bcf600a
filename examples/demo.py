"""KFAC with its defaults against tuned SGD and AdamW: a deep autoencoder of scikit-learn's digits.

python examples/demo.py            # draws out/demo.png
python examples/demo.py --quick    # a few steps, to see that everything runs
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from _demo_picture import draw
from _demo_race import GRIDS, Data, Run, digits, race, tune
from tqdm import tqdm

INTRODUCTION = """\
The autoencoder of Martens & Grosse (2015) on scikit-learn's digits: 64-256-128-64-16 and back, tanh; 1,437 digits to
train, 360 held out. The loss is theirs, in nats per image. SGD (momentum 0.9) and AdamW have the learning rate that is
best for the loss below after {steps} steps; KFAC(model) has its defaults. All see the same batches of 256."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="of the comparison (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of initial weights and batches (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch; the model is tiny (%(default)s)")
    parser.add_argument("--device", default=os.environ.get("DEVICE") or "cpu", help="($DEVICE, or cpu)")
    parser.add_argument("--out", type=Path, default=Path("out/demo.png"), help="the picture (%(default)s)")
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    parser.add_argument("--quick", action="store_true", help="at most 4 steps: a test run")
    options = parser.parse_args(argv)
    if options.steps < 4 or options.threads < 1:
        parser.error("--steps must be at least 4 and --threads at least 1")
    if options.quick:
        options.steps = min(options.steps, 4)
    return options


def show(loss: float) -> str:
    return f"{loss:.2f}" if loss < math.inf else "diverged"


def table(title: str, columns: Sequence[str], rows: dict[str, list[float]]) -> str:
    lines = [["", *columns], *([name, *map(show, losses)] for name, losses in rows.items())]
    width = max(map(len, rows))
    return "\n".join(
        [title, *("  ".join([name.ljust(width), *(cell.rjust(10) for cell in cells)]) for name, *cells in lines)]
    )


def by_step(runs: Sequence[Run], marks: Sequence[int]) -> str:
    """KFAC, the first run, and how many of its steps are worth all of a rival's."""
    first, *rivals = runs
    parts = []
    for run in rivals:
        end = run.at_step(marks[-1])
        hit = next((p.step for p in first.points if p.loss <= end), None)
        parts.append(f"{'more than all its' if hit is None else hit} steps for what {run.kind} reaches in {marks[-1]}")
    text = table(
        "Loss on held-out digits after the same steps",
        [f"{mark} steps" for mark in marks],
        {run.name: [run.at_step(mark) for mark in marks] for run in runs},
    )
    return f"{text}\nKFAC needs {', and '.join(parts)}."


def by_time(runs: Sequence[Run], steps: int) -> str:
    first, *rivals = runs
    times = sorted({run.reached for run in runs if run.reached < math.inf})
    ends = [times[0], times[-1]] if len(times) > 1 else times
    text = table(
        "Loss on held-out digits after the same time",
        [f"{seconds:.2f} s" for seconds in ends],
        {run.name: [run.at_time(seconds) for seconds in ends] for run in runs},
    )
    said: dict[str, list[str]] = {}
    for seconds in ends:
        is_ahead = {run.kind: first.at_time(seconds) < run.at_time(seconds) for run in rivals}
        ahead, behind = ([kind for kind, one in is_ahead.items() if one is which] for which in (True, False))
        words = [f"{word} {' and '.join(kinds)}" for word, kinds in (("ahead of", ahead), ("behind", behind)) if kinds]
        said.setdefault(", ".join(words), []).append(f"{seconds:.2f} s")
    parts = [f"{words} after {' and after '.join(times)}" for words, times in said.items()]
    price = first.seconds / first.steps / (rivals[0].seconds / rivals[0].steps)
    return f"{text}\nA KFAC step takes {price:.1f} times as long as one of SGD. KFAC is {'; '.join(parts)}."


def figures(runs: Sequence[Run], options: argparse.Namespace, losses: dict[str, dict[float, float]]) -> dict[str, Any]:
    """What the documents quote."""
    return {
        "command": "python examples/demo.py",
        "machine": f"{platform.machine()}, {options.threads} thread, torch {torch.__version__}",
        "steps": options.steps,
        "tuning": {kind: {f"{lr:g}": loss for lr, loss in by_rate.items()} for kind, by_rate in losses.items()},
        "runs": {
            run.name: {"points": [(p.step, round(p.seconds, 4), round(p.loss, 4)) for p in run.points]} for run in runs
        },
    }


def compete(data: Data, options: argparse.Namespace, marks: Sequence[int]) -> tuple[list[Run], dict[str, Any]]:
    """Tune the rivals, and race."""
    grids = {kind: grid[1:3] if options.quick else grid for kind, grid in GRIDS.items()}
    total = options.steps * (sum(map(len, grids.values())) + 1 + len(grids))
    with tqdm(total=total, unit="step", leave=False, disable=None) as bar:
        losses = {kind: tune(data, kind, grid, options.steps, options.seed, bar) for kind, grid in grids.items()}
        best = {kind: min(by_rate, key=by_rate.__getitem__) for kind, by_rate in losses.items()}
        runs = race(data, {"KFAC": math.nan} | best, options.steps, marks, options.seed, bar)
    return runs, losses


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; `argv` as on the command line."""
    options = parse(argv)
    start, threads = time.perf_counter(), torch.get_num_threads()
    torch.set_num_threads(options.threads)
    try:
        print(INTRODUCTION.format(steps=options.steps) + "\n", flush=True)
        marks = sorted({max(1, options.steps // 4), options.steps // 2, options.steps})
        runs, losses = compete(digits(torch.device(options.device)), options, marks)
        print(f"{by_step(runs, marks)}\n\n{by_time(runs, options.steps)}\n")
        options.out.parent.mkdir(parents=True, exist_ok=True)
        draw(runs, options.steps, options.out)
        if options.json:
            options.json.write_text(json.dumps(figures(runs, options, losses), indent=1) + "\n", "utf-8")
    finally:
        torch.set_num_threads(threads)
    print(f"Picture: {options.out.resolve()}. It took {time.perf_counter() - start:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
