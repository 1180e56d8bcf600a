"""What a step costs on a GPU: KFAC and EKFAC beside SGD, AdamW, Muon and SOAP; time, memory, waiting for the device.

    python tests/benchmarks/gpu.py [--device cuda] [--small] [--only resnet vit gpt] [--json gpu.json] [--out gpu.md]

In single precision and, on a GPU, under bfloat16 autocast. All contestants train on one batch, each its own copy of the
model, in turn within a round. Without a GPU, or with --small, the networks are small ones: that shows that
it runs, not what it costs on a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from _gpu_models import FULL, SMALL, Case, Sizes, cases
from _race_rivals import adamw, muon, sgd, soap
from _report import machine, markdown
from _rows import peak_bytes
from torch.utils._python_dispatch import TorchDispatchMode

from optimizers import EKFAC, KFAC

WARM = 9  # steps: factors then look for low ranks at update 16 only
SETTLED = 100  # a step at which KFAC's intervals have their full length
RARE = 1_000_000  # steps between renewals, to see steps without any
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
LR = 1e-4
HEAD = (
    "optimizer", "median, ms", "to SGD's", "mean, ms", "to SGD's", "renewing, ms", "ordinary, ms",
    "renewals and inversions", "peak MB", "waits",
)  # fmt: skip


def fast_muon(model: Any, problem: Any, lr: float) -> Any:
    """The race's, its products in bfloat16 on a GPU as in `torch.optim.Muon`."""
    both = muon(model, problem, lr)
    step = both.step
    cuda = next(model.parameters()).is_cuda

    def fast() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
            step()

    both.step = fast
    return both


CONTESTANTS: dict[str, Callable[..., Any]] = {
    "SGD": sgd,
    "AdamW": adamw,
    "Muon": fast_muon,
    "SOAP": soap,
    "KFAC": lambda model, problem, lr: KFAC(model),
    "EKFAC": lambda model, problem, lr: EKFAC(model),
}


class Reads(TorchDispatchMode):
    """Counts the numbers that Python asks for: on a GPU each is a wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class Run:
    """A contestant on a copy of the model."""

    def __init__(self, name: str, case: Case, precision: torch.dtype | None) -> None:
        torch.manual_seed(0)
        self.case, self.precision, self.device = case, precision, case.x.device.type
        self.model = case.make().train()
        self.opt = CONTESTANTS[name](self.model, None, LR)

    def step(self) -> None:
        self.opt.zero_grad()
        with torch.autocast(self.device, self.precision) if self.precision else nullcontext():
            loss = self.case.loss(self.model(self.case.x), self.case.y)
        loss.backward()
        self.opt.step()

    @property
    def is_ours(self) -> bool:
        return isinstance(self.opt, KFAC)

    def settle(self) -> None:
        """Warm up; then go to where renewals and inversions are as far apart as they will be."""
        for _ in range(WARM):
            self.step()
        if self.is_ours:
            self.opt.monitor.steps = SETTLED

    @property
    def renewed(self) -> bool:
        return self.is_ours and self.opt.monitor.entries[-1]["renewed"]

    def rest(self) -> None:
        """From here on nothing is renewed or inverted."""
        if self.is_ours:
            schedule = self.opt.preconditioner.schedule
            schedule.factor_every = schedule.decompose_every = RARE
            self.opt.monitor.steps = schedule.renewed = 10 * RARE

    def timed(self, clock: Callable[[], float]) -> float:
        wait(self.device)
        start = clock()
        self.step()
        wait(self.device)
        return clock() - start

    def check(self) -> None:
        """Refuse figures of a run that did not train."""
        if not all(bool(torch.isfinite(p).all()) for p in self.model.parameters()):
            raise RuntimeError(f"{type(self.opt).__name__}: parameters are not finite")
        if self.is_ours and self.opt.skipped:
            raise RuntimeError(f"{type(self.opt).__name__}: {self.opt.skipped} steps were skipped")
        if self.is_ours and self.opt.history[-1].get("inverted"):
            raise RuntimeError(f"{type(self.opt).__name__}: an ordinary step inverted something")


@dataclass
class Result:
    """Of one contestant: peak bytes, waits of an ordinary step; seconds of all steps, of those that renew, and of steps
    that neither renew nor invert, taken afterwards."""

    model: str
    precision: str
    optimizer: str
    peak: float
    waits: int = 0
    seconds: list[float] = field(default_factory=list)
    renewing: list[float] = field(default_factory=list)
    ordinary: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Of the mean step, what ordinary steps have not."""
        return 1 - statistics.median(self.ordinary) / statistics.mean(self.seconds)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def waits_of(step: Callable[[], None], device: str) -> int:
    """Synchronising calls as CUDA reports them; elsewhere numbers that Python asks for."""
    if device != "cuda":
        with Reads() as reads:
            step()
        return reads.count
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def peak_of(name: str, case: Case, precision: torch.dtype | None) -> float:
    """Most bytes in tensors while it warms up and takes two steps: model, optimizer and what they compute."""

    def train() -> None:
        run = Run(name, case, precision)
        run.settle()
        for _ in range(2):
            run.step()

    return peak_bytes(train, case.x.is_cuda)


def compare(case: Case, precision: str, rounds: int, clock: Callable[[], float]) -> list[Result]:
    """All contestants on one network: memory one after the other, then time in turn."""
    dtype = PRECISIONS[precision]
    found = {name: Result(case.title, precision, name, peak_of(name, case, dtype)) for name in CONTESTANTS}
    gc.collect()
    runs = {name: Run(name, case, dtype) for name in CONTESTANTS}
    for run in runs.values():
        run.settle()
    for number in range(rounds):
        for name in turned(list(runs), number):
            found[name].seconds.append(runs[name].timed(clock))
            if runs[name].renewed:
                found[name].renewing.append(found[name].seconds[-1])
    for run in runs.values():
        run.rest()
    for number in range(max(3, rounds // 4)):
        for name in turned(list(runs), number):
            found[name].ordinary.append(runs[name].timed(clock))
    for name, run in runs.items():
        found[name].waits = waits_of(run.step, run.device)
        run.check()
    return list(found.values())


def turned(names: list[str], number: int) -> list[str]:
    """Each round another one begins."""
    return names[number % len(names) :] + names[: number % len(names)]


def cells(result: Result, base: Result) -> list[str]:
    found = [result.optimizer]
    for of in (statistics.median, statistics.mean):
        found += [f"{1e3 * of(result.seconds):.3g}", f"{of(result.seconds) / of(base.seconds):.2f}"]
    found += [f"{1e3 * statistics.median(some):.3g}" if some else "-" for some in (result.renewing, result.ordinary)]
    share = f"{100 * result.share:.0f} %" if result.renewing else "-"
    return [*found, share, f"{result.peak / 1e6:.0f}", str(result.waits)]


def table(results: Sequence[Result]) -> str:
    rows = [cells(result, results[0]) for result in results]
    title = f"**{results[0].model}, {results[0].precision}**"
    return f"{title}\n\n{markdown(HEAD, 'lr', rows)}\n"


def measured(options: argparse.Namespace, sizes: Sizes) -> Iterator[list[Result]]:
    for name, make in cases(sizes, options.device).items():
        if name in options.only:
            case = make()
            for precision in options.precisions:
                yield compare(case, precision, options.rounds, options.clock)


def shared_arguments(description: str, networks: Iterable[str], rounds: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    usual = os.environ.get("DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--device", default=usual, help="DEVICE, or cuda where there is one")
    parser.add_argument("--small", action="store_true", help="small networks, as without a GPU")
    parser.add_argument("--only", nargs="+", choices=list(networks), default=list(networks))
    parser.add_argument("--rounds", type=int, default=rounds, help="how often everything is timed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--out", type=Path, help="write the tables to this file too")
    return parser


def save(options: argparse.Namespace, lines: list[str], found: Sequence[Any]) -> None:
    """Tables to `--out`, results to `--json`."""
    if options.out:
        options.out.write_text("\n".join(lines))
    if options.json:
        content = {"machine": lines[0].strip(), "results": [asdict(result) for result in found]}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = shared_arguments(__doc__ or "", FULL, 20)
    parser.add_argument("--precisions", nargs="+", choices=list(PRECISIONS), help="both on a GPU, else fp32")
    parser.add_argument("--cpu-time", action="store_true", help="processor time: with --threads 1 on a shared machine")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    warnings.simplefilter("ignore")
    options.precisions = options.precisions or list(PRECISIONS)[: 2 if options.device.startswith("cuda") else 1]
    small = options.small or not options.device.startswith("cuda")
    options.clock, clock = (time.process_time, "processor") if options.cpu_time else (time.perf_counter, "wall")
    lines, found = [f"{machine(options.device)}{', small networks' if small else ''}, {clock} time\n"], []
    print(lines[0], flush=True)
    for results in measured(options, SMALL if small else FULL):
        found += results
        lines.append(table(results))
        print(lines[-1], flush=True)
    save(options, lines, found)


if __name__ == "__main__":
    main()
