"""Sixteen families of problems: ours, with nothing to set, against rivals that were tuned on each.

python tests/benchmarks/generality.py --families vit lstm --optimizers kfac --seeds 0 --budget 6
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence

import torch
from _generality_families import FAMILIES
from _generality_run import Run
from _race_rivals import ENTRIES, Entry

import optimizers

NATURAL = Entry("natural", "NaturalGradient", lambda model, problem: optimizers.NaturalGradient(model))
CONTESTANTS = {**ENTRIES, NATURAL.name: NATURAL}


def names(text: str) -> list[str]:
    return text.replace(",", " ").split()


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--families", type=names, default=list(FAMILIES))
    parser.add_argument("--optimizers", type=names, default=["kfac", "ekfac"])
    parser.add_argument("--seeds", type=names, default=["0"])
    parser.add_argument("--budget", type=float, help="CPU seconds")
    parser.add_argument("--lr", type=float, help="of rivals")
    options = parser.parse_args(args)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in options.families:
        family = FAMILIES[name]()
        for seed in map(int, options.seeds):
            for entry in map(CONTESTANTS.__getitem__, options.optimizers):
                lr = options.lr or (entry.lrs[1] if entry.lrs else 0)
                run = Run(family, entry, {"lr": lr} if entry.lrs else {}, seed)
                run.advance(options.budget or family.budget)
                run.stop()
                print(f"{name} {entry.name} seed {seed}: {run.end}, {1e3 * run.seconds / run.steps:.2f} ms a step")
                for point in run.points:
                    print(f"  {point.step:6.0f} {point.seconds:7.2f} s  {point.loss:10.4g} {point.metric:10.4g}")


if __name__ == "__main__":
    main()
