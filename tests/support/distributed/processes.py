"""Runs functions on several processes of torch.distributed (gloo), all in one start of these."""

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# imported once, by the process that all others are forked from
PRELOAD = ["torch.distributed.checkpoint", "torch.distributed.fsdp", "torch._dynamo", "sklearn.datasets", "optimizers"]
PRELOAD += ["matplotlib.pyplot", "curvature.plots"]


def forkserver() -> Any:
    multiprocessing.set_forkserver_preload(PRELOAD)
    return multiprocessing.get_context("forkserver")


Scenario = Callable[[int, int], Any]  # (rank, size) -> what to look at


def run(rank: int, size: int, folder: str, scenarios: Mapping[str, Scenario], seconds: float) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
    )
    found = {}
    for name, scenario in scenarios.items():
        try:
            found[name] = scenario(rank, size)
        except Exception:
            found[name] = traceback.format_exc()
            break  # the others would wait for each other
    torch.save(found, f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


def on_processes(size: int, scenarios: Mapping[str, Scenario], seconds: float = 60.0) -> list[dict[str, Any]]:
    """What every scenario returns, by rank; a traceback where it failed."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            forkserver()
            mp.start_processes(run, (size, folder, dict(scenarios), seconds), size, start_method="forkserver")
        except Exception as error:  # a process that waits in vain for another that failed
            print(error)
        return [
            torch.load(path, weights_only=False) if (path := Path(folder) / str(rank)).exists() else {}
            for rank in range(size)
        ]
