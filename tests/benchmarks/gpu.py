"""What steps and curvature cost on a GPU: time, memory, waiting for the device.

    python tests/benchmarks/gpu.py [--device cuda] [--small] [--only resnet vit gpt] [--json gpu.json] [--out gpu.md]
    python tests/benchmarks/gpu.py curvature [--device cuda] [--small] [--only nanogpt resnet18] [--json FILE]
    python tests/benchmarks/gpu.py gpt2 [--batch 8] [--length 1024] [--rounds 3] [--threads 1 --cpu-time]

"steps", which is also what runs when nothing is named: KFAC and EKFAC beside SGD, AdamW, Muon and SOAP, in single
precision and, on a GPU, under bfloat16 autocast. All contestants train on one batch, each its own copy of the model, in
turn within a round.

"curvature": factors, inverses and products with matrices, to a plain gradient. Networks and batches are those of
curvlinops' own benchmark. The last column has its figures, taken on an RTX A6000 (eager, compiled): ratios on another
GPU, so a first orientation and no comparison. Networks are in evaluation mode, in single precision without TF32;
factors come from one sampled label. "Cholesky" damps the factors, "eigenvalues" the matrix. Ratios are medians over
rounds.

"gpt2": ordinary steps of KFAC on GPT-2 small, and steps that renew all factors and invert all blocks, beside AdamW's.
If each happens once in n steps, the mean step is ``ordinary + (whole - ordinary) / n``.

Without a GPU, or with --small, the networks are small ones: that shows that it runs, not what it costs on a GPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _networks import LOSS, ViT, resnet18, resnet50
from _problems import GPT
from _race_rivals import adamw, muon, sgd, soap
from _report import machine, markdown
from _rows import Clock, clock_of, in_turns, peak_bytes, timed
from torch import Tensor, nn

import curvature
from optimizers import EKFAC, KFAC

sys.path.append(str(Path(__file__).resolve().parents[1]))  # last: there are folders of the packages' names, too

from support.host_waits import Waits

mean_step = lambda ordinary, whole, interval: ordinary + (whole - ordinary) / interval


class ClassesSecond(nn.Module):
    """Logits (N, T, V) as (N, V, T), the layout that `nn.CrossEntropyLoss` takes."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mT


@dataclass(frozen=True)
class Network:
    """What makes a network on a device, and its batch; the loss is the mean cross-entropy."""

    title: str
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]

    def on(self, device: str) -> tuple[nn.Module, Tensor, Tensor]:
        """Always the same parameters and the same batch."""
        torch.manual_seed(0)
        with torch.device(device):
            return (self.make(), *self.batch())


def gpt(name: str, vocabulary: int, length: int, batch: int, **size: Any) -> Network:
    def tokens() -> tuple[Tensor, Tensor]:
        whole = torch.randint(vocabulary, (batch, length + 1))
        return whole[:, :-1], whole[:, 1:]

    title = f"{name} {size['layers']} x {size['d']}, {vocabulary:,} words, {batch} x {length} tokens"
    return Network(title, lambda: nn.Sequential(GPT(vocabulary, length=length, **size), ClassesSecond()), tokens)


def images(name: str, make: Callable[..., nn.Module], side: int, batch: int, classes: int, **size: Any) -> Network:
    drawn = lambda: (torch.randn(batch, 3, side, side), torch.randint(classes, (batch,)))
    width = f", width {size['width']}" if "width" in size else ""
    return Network(f"{name}{width}, {side}x{side}, batch {batch}", lambda: make(classes=classes, **size), drawn)


# for each way to measure the networks that are meant, and small ones for a processor; those of "curvature" are those of
# curvlinops' own benchmark, whose figures stand beside ours
FULL = {
    "steps": {
        "resnet": images("ResNet-18", resnet18, 32, 128, 100, width=64),
        "vit": images("ViT 12 x 384", ViT, 32, 128, 100, d=384, layers=12, heads=6, patch=4),
        "gpt": gpt("GPT-2", 50257, 256, 8, d=768, layers=12, heads=12),
    },
    "curvature": {
        "nanogpt": gpt("nanoGPT", 50257, 1024, 4, d=768, layers=12, heads=12),
        "resnet50": images("ResNet-50", resnet50, 224, 64, 1000, width=64, depths=(3, 4, 6, 3)),
        "resnet18": images("ResNet-18", resnet18, 32, 512, 10, width=64),
    },
}
SMALL = {
    "steps": {
        "resnet": images("ResNet-18", resnet18, 32, 32, 100, width=16),
        "vit": images("ViT 4 x 96", ViT, 32, 16, 100, d=96, layers=4, heads=3, patch=4),
        "gpt": gpt("GPT-2", 2000, 64, 8, d=128, layers=2, heads=4),
    },
    "curvature": {
        "nanogpt": gpt("nanoGPT", 500, 32, 4, d=64, layers=2, heads=2),
        "resnet50": images("ResNet-50", resnet50, 64, 4, 100, width=8, depths=(1, 1, 1, 1)),
        "resnet18": images("ResNet-18", resnet18, 32, 16, 10, width=8),
    },
}


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


class Run:
    """A contestant on a copy of the model."""

    def __init__(self, name: str, network: Network, device: str, precision: torch.dtype | None = None) -> None:
        self.precision, self.device = precision, device
        self.model, self.x, self.y = network.on(device)
        self.opt = CONTESTANTS[name](self.model, None, LR)

    def step(self) -> None:
        self.opt.zero_grad()
        with torch.autocast(torch.device(self.device).type, self.precision) if self.precision else nullcontext():
            loss = LOSS(self.model(self.x), self.y)
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

    def rest(self) -> None:
        """From here on nothing is renewed or inverted."""
        if self.is_ours:
            schedule = self.opt.preconditioner.schedule
            schedule.factor_every = schedule.decompose_every = RARE
            self.opt.monitor.steps = schedule.renewed = 10 * RARE

    def timed(self, clock: Clock) -> tuple[float, bool]:
        """Seconds of a step, and whether it has renewed something."""
        seconds = timed(self.step, clock, self.device)[1]
        return seconds, self.is_ours and self.opt.monitor.entries[-1]["renewed"]

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


def waits_of(step: Callable[[], None], device: str) -> int:
    """Synchronising calls as CUDA reports them; elsewhere numbers that Python asks for."""
    if not device.startswith("cuda"):
        with Waits() as found:
            step()
        return found.count
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def peak_of(name: str, network: Network, device: str, precision: torch.dtype | None) -> float:
    """Most bytes in tensors while it warms up and takes two steps: model, optimizer and what they compute."""

    def train() -> None:
        run = Run(name, network, device, precision)
        run.settle()
        for _ in range(2):
            run.step()

    return peak_bytes(train, device.startswith("cuda"))


def compare(network: Network, precision: str, options: argparse.Namespace) -> list[Result]:
    """All contestants on one network: memory one after the other, then time in turn."""
    setting = network, options.device, PRECISIONS[precision]
    found = {name: Result(network.title, precision, name, peak_of(name, *setting)) for name in CONTESTANTS}
    gc.collect()
    runs = {name: Run(name, *setting) for name in CONTESTANTS}
    for run in runs.values():
        run.settle()
    ways = {name: partial(run.timed, clock_of(options)) for name, run in runs.items()}
    for name, times in in_turns(ways, range(options.rounds)).items():
        found[name].seconds = [seconds for seconds, _ in times]
        found[name].renewing = [seconds for seconds, renewed in times if renewed]
    for run in runs.values():
        run.rest()
    for name, times in in_turns(ways, range(max(3, options.rounds // 4))).items():
        found[name].ordinary = [seconds for seconds, _ in times]
    for name, run in runs.items():
        found[name].waits = waits_of(run.step, run.device)
        run.check()
    return list(found.values())


def cells(result: Result, base: Result) -> list[str]:
    found = [result.optimizer]
    for of in (statistics.median, statistics.mean):
        found += [f"{1e3 * of(result.seconds):.3g}", f"{of(result.seconds) / of(base.seconds):.2f}"]
    found += [f"{1e3 * statistics.median(some):.3g}" if some else "-" for some in (result.renewing, result.ordinary)]
    share = f"{100 * result.share:.0f} %" if result.renewing else "-"
    return [*found, share, f"{result.peak / 1e6:.0f}", str(result.waits)]


def table_of_steps(results: Sequence[Result]) -> str:
    rows = [cells(result, results[0]) for result in results]
    title = f"**{results[0].model}, {results[0].precision}**"
    return f"{title}\n\n{markdown(HEAD, 'lr', rows)}\n"


DAMPING = 1e-3
GRADIENT = "gradient"
# ratios to the gradient, eager and compiled
PUBLISHED = {
    "nanogpt": {
        "K-FAC factors": "1.50 / 1.39", "EKFAC": "1.67 / 1.56 (correction)", "inverse, Cholesky": "1.7",
        "inverse, eigenvalues": "17.5", "inverse times vector": "0.15", "G v": "3.1 / 2.1", "H v": "4.5 / 2.9",
    },
    "resnet50": {
        "K-FAC factors": "2.6 / 2.5", "EKFAC": "2.9 / 2.6 (correction)", "inverse, Cholesky": "1.5",
        "inverse, eigenvalues": "16", "inverse times vector": "0.13 / 0.09", "G v": "2.7 / 2.2", "H v": "4.9 / 2.8",
    },
    "resnet18": {
        "K-FAC factors": "5.8 / 2.3", "EKFAC": "6.8 / 3.2 (correction)", "inverse, Cholesky": "8.1",
        "inverse, eigenvalues": "89", "inverse times vector": "0.55 / 0.45", "G v": "2.6 / 1.6", "H v": "7.9 / 2.2",
    },
}  # fmt: skip


@dataclass
class Quantity:
    """Of one quantity: seconds in every round, and the bytes that a call adds at its peak."""

    network: str
    quantity: str
    seconds: list[float]
    peak: float


def quantities(network: Network, device: str) -> dict[str, Callable[[], object]]:
    """What is timed. Operators that later ones apply are made beforehand."""
    model, x, y = network.on(device)
    model.eval()
    parameters = list(model.parameters())
    v = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    factors = lambda: curvature.kfac(model, LOSS, (x, y), inject=curvature.sampled(), progress=False)
    K = factors()
    anew = lambda: (1.0 * K).inverse(DAMPING)  # K keeps its eigenvalues, what is computed from it does not
    inverse = K.factored_damping(DAMPING).inverse()
    G, H = (make(model, LOSS, (x, y), progress=False) for make in (curvature.gauss_newton, curvature.hessian))
    return {
        GRADIENT: lambda: torch.autograd.grad(LOSS(model(x), y), parameters),
        "K-FAC factors": factors,
        "EKFAC": lambda: curvature.ekfac(model, LOSS, (x, y), inject=curvature.sampled(), progress=False),
        "inverse, Cholesky": lambda: K.factored_damping(DAMPING).inverse(),
        "inverse, eigenvalues": anew,
        "inverse times vector": lambda: inverse @ v,
        "G v": lambda: G @ v,
        "H v": lambda: H @ v,
    }


def measure(name: str, network: Network, options: argparse.Namespace) -> list[Quantity]:
    device, calls, peaks = options.device, quantities(network, options.device), {}
    for quantity, call in calls.items():
        call()  # plans are learnt, kernels chosen
        peaks[quantity] = peak_bytes(call, device.startswith("cuda"))

    def seconds(call: Callable[[], object]) -> float:
        gc.collect()
        return timed(call, clock_of(options), device)[1]

    times = in_turns({quantity: partial(seconds, call) for quantity, call in calls.items()}, range(options.rounds))
    return [Quantity(name, quantity, own, peaks[quantity]) for quantity, own in times.items()]


def table_of_quantities(title: str, results: Sequence[Quantity], with_published: bool) -> str:
    base = results[0].seconds
    head, rows = ["quantity", "median, ms", "to the gradient", "peak MB", "curvlinops, RTX A6000"], []
    for result in results:
        ratio = statistics.median(own / plain for own, plain in zip(result.seconds, base, strict=True))
        milliseconds = f"{1e3 * statistics.median(result.seconds):.3g}"
        published = PUBLISHED[result.network].get(result.quantity, "-") if with_published else "-"
        rows.append([result.quantity, milliseconds, f"{ratio:.2f}", f"{result.peak / 1e6:.0f}", published])
    return f"**{title}**\n\n{markdown(head, 'lr', rows)}\n"


INTERVALS = 10, 32, 100  # steps


def gpt2(options: argparse.Namespace) -> Iterator[tuple[str, list[Any]]]:
    """One optimizer after the other, since both networks take much memory."""
    size = {"d": 32, "layers": 2, "heads": 2} if options.small else {"d": 768, "layers": 12, "heads": 12}
    network = gpt("GPT-2", 50 if options.small else 50257, options.length, options.batch, **size)
    clock = clock_of(options)
    median = lambda run: statistics.median(run.timed(clock)[0] for _ in range(options.rounds))
    run = Run("AdamW", network, options.device)
    for _ in range(2):
        run.step()
    usual = median(run)
    del run
    gc.collect()
    run = Run("KFAC", network, options.device)
    for _ in range(2):
        run.step()
    schedule = run.opt.preconditioner.schedule
    schedule.factor_every = schedule.decompose_every = 1
    whole = median(run)
    run.rest()
    ordinary = median(run)
    run.check()
    times = f"AdamW {usual:.3g} s, KFAC: ordinary {ordinary:.3g} s, renewing and inverting {whole:.3g} s"
    yield f"{network.title}: {times}", []
    for interval in INTERVALS:
        yield f"every {interval} steps: {mean_step(ordinary, whole, interval) / usual:.3f} times AdamW's step", []


def steps(options: argparse.Namespace) -> Iterator[tuple[str, list[Any]]]:
    for name in options.only:
        for precision in options.precisions:
            results = compare(options.networks[name], precision, options)
            yield table_of_steps(results), results


def matrices(options: argparse.Namespace) -> Iterator[tuple[str, list[Any]]]:
    for name in options.only:
        results = measure(name, options.networks[name], options)
        yield table_of_quantities(options.networks[name].title, results, not options.small), results


WHAT = {"steps": (steps, 20), "curvature": (matrices, 10), "gpt2": (gpt2, 3)}  # and how often everything is timed


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    usual = os.environ.get("DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("what", nargs="?", choices=WHAT, default="steps")
    parser.add_argument("--device", default=usual, help="DEVICE, or cuda where there is one")
    parser.add_argument("--small", action="store_true", help="small networks, as without a GPU")
    parser.add_argument("--only", nargs="+", help="these networks")
    parser.add_argument("--precisions", nargs="+", choices=list(PRECISIONS), help="both on a GPU, else fp32")
    parser.add_argument("--batch", type=int, default=8, help="of gpt2")
    parser.add_argument("--length", type=int, default=1024, help="of gpt2")
    parser.add_argument("--rounds", type=int, help="how often everything is timed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="processor time: with --threads 1 on a shared machine")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--out", type=Path, help="write the tables to this file too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    warnings.simplefilter("ignore")
    is_cuda, (run, rounds) = options.device.startswith("cuda"), WHAT[options.what]
    options.small = options.small or not is_cuda and options.what != "gpt2"
    options.rounds = options.rounds or rounds
    options.precisions = options.precisions or list(PRECISIONS)[: 2 if is_cuda else 1]
    options.networks = (SMALL if options.small else FULL).get(options.what, {})
    options.only = options.only or list(options.networks)
    clock = "processor" if options.cpu_time else "wall"
    lines, found = [f"{machine(options.device)}{', small networks' if options.small else ''}, {clock} time\n"], []
    print(lines[0], flush=True)
    for text, results in run(options):
        lines.append(text)
        found += results
        print(text, flush=True)
    if options.out:
        options.out.write_text("\n".join(lines))
    if options.json:
        content = {"machine": lines[0].strip(), "results": [asdict(result) for result in found]}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
