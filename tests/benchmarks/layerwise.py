"""Layer-wise exact curvature beside the whole and beside KFAC where a batch is all data: steps and seconds to a loss.

    python tests/benchmarks/layerwise.py --seeds 3

scikit-learn's digits, all of the training images at every step. Nothing is tuned. The clock is that of the race: one
thread's CPU seconds of zero_grad, forward, backward and step. A run ends at the target or after `--cap` of them.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from _race_problems import Problem, deep, epochs, mirrored, pixel_loss, tanh
from _race_rivals import Entry
from _race_run import Run, warm_up
from torch import nn

from optimizers import KFAC, NaturalGradient

WAYS: dict[str, tuple[Any, dict[str, bool]]] = {
    "KFAC": (KFAC, {}),
    "KFAC, adaptive": (KFAC, {"adaptive": True}),
    "whole, line search": (NaturalGradient, {"line_search": True}),
    "layers": (NaturalGradient, {"layerwise": True}),
    "layers, line search": (NaturalGradient, {"layerwise": True, "line_search": True}),
    "layers, adaptive": (NaturalGradient, {"layerwise": True, "adaptive": True}),
}


def classes() -> Problem:
    """Few enough for exact vectors: 3,000 rows."""
    usual = tanh()
    train = usual.train[0][:300], usual.train[1][:300]
    make = functools.partial(deep, 64, 4)
    return replace(usual, name="classes", make=make, train=train, batches=epochs(train, 300), target=1e-3)


def codes() -> Problem:
    train, test = ((part[0], part[0]) for part in (tanh().train, tanh().test))
    make = functools.partial(mirrored, (64, 128, 64, 16))
    return replace(
        tanh(), name="codes", unit="nats per image", make=make, loss=pixel_loss, train=train, test=test,
        batches=epochs(train, 1500), target=16.0, labelled=False,
    )  # fmt: skip


PROBLEMS = {"classes": classes, "codes": codes, "deep": lambda: replace(tanh(batch=1500), name="deep")}
EXACT = {"classes": nn.CrossEntropyLoss()}  # the others take one random vector for each sample


def entries(problem: Problem) -> Iterator[Entry]:
    for label, (kind, given) in WAYS.items():
        exact = {"loss": EXACT[problem.name]} if kind is NaturalGradient and problem.name in EXACT else {}
        make = lambda model, problem, kind=kind, options=exact | given: kind(model, **options)
        yield Entry(label, label, make, closure="," in label)


def row(problem: Problem, entry: Entry, seeds: int, cap: float) -> str:
    warm_up(problem, {entry: {}})
    runs = [Run(problem, entry, {}, seed) for seed in range(seeds)]
    for run in runs:
        run.advance(cap)
        run.stop()
    median = lambda values: statistics.median(list(values))
    steps, seconds = (
        median(getattr(run.reached, what) if run.reached else math.inf for run in runs) for what in ("step", "seconds")
    )
    each = 1000 * median(median(run.durations) for run in runs)
    end = median(run.points[-1].train for run in runs)
    reached = f"{steps:.0f} | {seconds:.1f}" if steps < math.inf else f"over {len(runs[0].durations)} | over {cap:.0f}"
    return f"| {problem.name} | {entry.label} | {reached} | {each:.0f} | {end:.2g} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cap", type=float, default=12.0, help="CPU seconds of a run")
    parser.add_argument("--problem", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| problem | optimizer | steps | CPU seconds | ms a step | loss at the end |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for name in options.problem:
        problem = PROBLEMS[name]()
        for entry in entries(problem):
            print(row(problem, entry, options.seeds, options.cap), flush=True)


if __name__ == "__main__":
    main()
