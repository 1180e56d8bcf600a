"""Training on two processes beside one: the CNN of the race, each process on one core, gloo.

    python tests/benchmarks/processes.py

Samples per second with DistributedDataParallel on two processes over those of one process without it, rounds in turn;
printed are the medians of the ratios. "the same batch each": every process has 128 images; "the batch in two": 64 each.
SGD's row says what the communication of gradients and the shared memory cost. Processes wait for each other to begin;
the first `WARM` steps, where renewals are frequent, are left out.
"""

from __future__ import annotations

import gc
import itertools
import os
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _problems import cnn
from _report import medians, options_of, printed
from torch.nn.parallel import DistributedDataParallel

from optimizers import EKFAC, KFAC
from support.distributed.processes import on_processes

WARM, STEPS, ROUNDS = 120, 200, 3
MAKES: dict[str, Any] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "KFAC": KFAC,
    "EKFAC": EKFAC,
}


def rate(rank: int, size: int, name: str, batch: int) -> float:
    """Samples per second of all processes together; each has a core of its own."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if cores:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.manual_seed(0)
    problem = cnn(batch=batch)
    (model,) = problem.make()
    used = DistributedDataParallel(model) if size > 1 else model
    opt = MAKES[name](model)
    start = 0.0
    for step, (x, y) in enumerate(itertools.islice(problem.batches(rank), WARM + STEPS)):
        if step == WARM:
            dist.barrier()
            start = time.perf_counter()
        opt.zero_grad()
        problem.loss(used(x), y).backward()
        opt.step()
    seconds = time.perf_counter() - start
    del used
    gc.collect()  # DistributedDataParallel is in a cycle: if it outlives the group, its threads abort the process
    return size * batch * STEPS / seconds


def measured(size: int, name: str, batch: int) -> float:
    run = partial(rate, name=name, batch=batch)
    return on_processes(size, {"rate": run}, seconds=600.0)[0]["rate"]


def main() -> None:
    options_of(__doc__)
    rows: dict[str, list[tuple[float, ...]]] = {name: [] for name in MAKES}
    for _ in range(ROUNDS):
        for name, found in rows.items():
            one = measured(1, name, 128)
            found.append((one, *(measured(2, name, batch) / one for batch in (128, 64))))
    head = ["optimizer", "one process, images/s", "the same batch each", "the batch in two"]
    printed(head, medians(rows, ".0f", ".2f", ".2f"))


if __name__ == "__main__":
    main()
