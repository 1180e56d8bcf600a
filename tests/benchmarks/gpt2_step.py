"""What a step of KFAC on GPT-2 small costs beside AdamW's, by how rarely factors are renewed.

    python tests/benchmarks/gpt2_step.py [--device cuda] [--batch 8] [--length 1024] [--rounds 3] [--cpu-time]

It times ordinary steps, and steps that renew all factors and invert all blocks. If each happens
once in n steps, the mean step is ``ordinary + (whole - ordinary) / n``. Both optimizers train on one batch.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from _gpu_models import Case, text
from _report import machine
from gpu import Run

SIZE = {"vocabulary": 50257, "d": 768, "layers": 12, "heads": 12}
SMALL = {"vocabulary": 50, "d": 32, "layers": 2, "heads": 2}
INTERVALS = 10, 32, 100  # steps
WARM = 2  # steps of each


class Seconds(NamedTuple):
    """Medians: AdamW's step, and KFAC's steps of two kinds."""

    adamw: float
    ordinary: float
    whole: float

    def mean(self, interval: int) -> float:
        return self.ordinary + (self.whole - self.ordinary) / interval


def measure(case: Case, rounds: int, cpu_time: bool) -> Seconds:
    clock = time.process_time if cpu_time else time.perf_counter
    adamw, kfac = (Run(name, case, None) for name in ("AdamW", "KFAC"))
    for run in (adamw, kfac):
        for _ in range(WARM):
            run.step()
    schedule = kfac.opt.preconditioner.schedule
    schedule.factor_every = schedule.decompose_every = 1
    whole = [kfac.timed(clock) for _ in range(rounds)]
    kfac.rest()
    pairs = [(adamw.timed(clock), kfac.timed(clock)) for _ in range(rounds)]
    for run in (adamw, kfac):
        run.check()
    first, ordinary = (statistics.median(times) for times in zip(*pairs, strict=True))
    return Seconds(first, ordinary, statistics.median(whole))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a small network, to see that it runs")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="processor time: with --threads 1 on a shared machine")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    warnings.simplefilter("ignore")
    size = (SMALL if options.small else SIZE) | {"length": options.length}
    title = f"GPT-2 {size['layers']} x {size['d']}, {options.batch} x {options.length} tokens"
    found = measure(text(title, size, options.batch, options.device), options.rounds, options.cpu_time)
    print(f"{machine(options.device)}, {'processor' if options.cpu_time else 'wall'} time: {title}")
    print(
        f"AdamW {found.adamw:.3g} s, KFAC: ordinary {found.ordinary:.3g} s, renewing and inverting {found.whole:.3g} s"
    )
    for interval in INTERVALS:
        print(f"every {interval} steps: {found.mean(interval) / found.adamw:.3f} times AdamW's step")


if __name__ == "__main__":
    main()
