"""The price of a step: whole steps of the families of generality.py, in SGD's.

    python tests/benchmarks/step_overhead.py [--families softmax siren ...] [--optimizer ekfac] [--steps 300]

SGD's steps take turns with ours: the mean from the first step on, medians of each kind of step, and the parts of a mean
step, all in SGD's median step. CPU time is that of one thread. Launches and waits of a step are what
`tests/optimizers/steps/test_launches_and_waits.py` holds.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from _contest import Run
from _generality_families import FAMILIES
from _race_rivals import ENTRIES
from _report import printed

KINDS = "ordinary", "inverting", "renewing"  # the last inverts, too
PARTS = "capture", "factors", "inverses", "direction"  # of an optimizer's own clock; the last is in ordinary steps, too


def kind_of(opt: Any) -> str:
    entry = opt.monitor.entries[-1]
    return "renewing" if entry["renewed"] else "inverting" if entry["inverted"] else "ordinary"


def prices(name: str, optimizer: str, steps: int) -> list[str]:
    """CPU time of whole steps, forward and backward pass included, in SGD's median step; the two take turns."""
    family = FAMILIES[name]()
    plain, ours = (
        Run(family, ENTRIES[entry], setting, seed=0) for entry, setting in (("sgd", {"lr": 1e-3}), (optimizer, {}))
    )
    kinds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(steps):
        plain.step()
        ours.step()
        kinds[kind_of(ours.optimizers[0])].append(ours.durations[-1])
    unit = statistics.median(plain.durations)
    cells = [f"{1e3 * unit:.2f}", f"{statistics.fmean(ours.durations) / unit:.2f}"]
    cells += [f"{statistics.median(own) / unit:.2f} x {len(own)}" if own else "-" for own in kinds.values()]
    seconds = Counter[str]()
    for own in ours.optimizers:
        seconds.update(own.monitor.seconds)
    return [name, *cells, *(f"{seconds[part] / steps / unit:.2f}" for part in PARTS)]


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--families", nargs="*", choices=FAMILIES, help="these alone")
    parser.add_argument("--optimizer", choices=["kfac", "ekfac"], default="kfac")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(args)
    torch.set_num_threads(1)
    names = options.families or FAMILIES
    head = ["family", "SGD, ms", "mean", *KINDS, *PARTS]
    printed(head, "lr", (prices(name, options.optimizer, options.steps) for name in names))


if __name__ == "__main__":
    main()
