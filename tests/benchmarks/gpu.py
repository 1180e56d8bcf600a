"""What steps and curvature cost on a GPU: time, memory, waiting for the device.

    python tests/benchmarks/gpu.py [--device cuda] [--only resnet vit gpt gpt2]    # the last is large
    python tests/benchmarks/gpu.py curvature [--device cuda] [--only resnet18]

"steps", which is also what runs when nothing is named: KFAC and EKFAC beside SGD, AdamW, Muon and SOAP, in single
precision and, on a GPU, under bfloat16 autocast. All contestants train on one batch, each its own copy of the model, in
turn within a round.

"curvature": factors, inverses and products with matrices, to a plain gradient. Network and batch are of curvlinops'
own benchmark. The last column has its figures, taken on an RTX A6000 (eager, compiled): ratios on another
GPU, so a first orientation and no comparison. The network is in evaluation mode, in single precision without TF32;
factors come from one sampled label. "Cholesky" damps the factors, "eigenvalues" the matrix. Ratios are medians over
rounds.
"""

from __future__ import annotations

import gc
import os
import statistics
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from _networks import GPT, LOSS, ClassesSecond, ViT, Workload, resnet18
from _race_rivals import adamw, muon, sgd, soap
from _report import machine, options_of, printed
from _rows import in_turns, peak_bytes, timed
from torch import Tensor, nn

import curvature
from optimizers import EKFAC, KFAC
from support.host_waits import Waits

Network = Callable[[], Workload]


def gpt(name: str, vocabulary: int, length: int, batch: int, **size: Any) -> Workload:
    model = nn.Sequential(GPT(vocabulary, length, **size, tied=True), ClassesSecond())
    tokens = torch.randint(vocabulary, (batch, length + 1))
    title = f"{name} {size['layers']} x {size['d']}, {vocabulary:,} words, {batch} x {length} tokens"
    return Workload(title, model, tokens[:, :-1], tokens[:, 1:])


def images(name: str, make: Callable[..., nn.Module], side: int, batch: int, classes: int, **size: Any) -> Workload:
    width = f", width {size['width']}" if "width" in size else ""
    model = make(classes=classes, **size)
    x, y = torch.randn(batch, 3, side, side), torch.randint(classes, (batch,))
    return Workload(f"{name}{width}, {side}x{side}, batch {batch}", model, x, y)


def on(network: Network, device: str) -> Workload:
    """Always the same parameters and the same batch."""
    torch.manual_seed(0)
    with torch.device(device):
        return network()


NETWORKS: dict[str, Network] = {
    "resnet": partial(images, "ResNet-18", resnet18, 32, 128, 100, width=64),
    "vit": partial(images, "ViT 12 x 384", ViT, 32, 128, 100, d=384, layers=12, heads=6, patch=4),
    "gpt": partial(gpt, "GPT-2", 50257, 256, 8, d=768, layers=12, heads=12),
    "gpt2": partial(gpt, "GPT-2", 50257, 1024, 8, d=768, layers=12, heads=12),
    "resnet18": partial(images, "ResNet-18", resnet18, 32, 512, 10, width=64),
}
NAMES = {"steps": ["resnet", "vit", "gpt", "gpt2"], "curvature": ["resnet18"]}
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
        self.precision, self.device, work = precision, device, on(network, device)
        self.model, self.x, self.y = work.model, work.x, work.y
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

    @property
    def renewed(self) -> bool:
        """In its last step."""
        return self.is_ours and self.opt.monitor.entries[-1]["renewed"]

    def check(self) -> None:
        """Refuse figures of a run that did not train."""
        if not all(bool(torch.isfinite(p).all()) for p in self.model.parameters()):
            raise RuntimeError(f"{type(self.opt).__name__}: parameters are not finite")
        if self.is_ours and self.opt.skipped:
            raise RuntimeError(f"{type(self.opt).__name__}: {self.opt.skipped} steps were skipped")
        if self.is_ours and self.opt.history[-1].get("inverted"):
            raise RuntimeError(f"{type(self.opt).__name__}: an ordinary step inverted something")


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


def peak_of(name: str, *setting: Any) -> float:
    """Most bytes in tensors while it warms up and takes two steps: model, optimizer and what they compute."""

    def train() -> None:
        run = Run(name, *setting)
        run.settle()
        for _ in range(2):
            run.step()

    return peak_bytes(train, setting[1].startswith("cuda"))


def compared(network: Network, precision: str, device: str, rounds: int) -> list[list[str]]:
    """The table of all contestants on one network: memory one after the other, then time in turn."""
    setting = network, device, PRECISIONS[precision]
    peaks = {name: peak_of(name, *setting) for name in CONTESTANTS}
    gc.collect()
    runs = {name: Run(name, *setting) for name in CONTESTANTS}
    step = lambda run: (timed(run.step, device)[1], run.renewed)
    ways = {name: partial(step, run) for name, run in runs.items()}
    for run in runs.values():
        run.settle()
    times = in_turns(ways, range(rounds))
    for run in runs.values():
        run.rest()
    ordinary = in_turns(ways, range(max(3, rounds // 4)))
    rows, usual = [], [seconds for seconds, _ in times["SGD"]]
    for name, run in runs.items():
        waits = waits_of(run.step, run.device)
        run.check()
        row = cells(times[name], [seconds for seconds, _ in ordinary[name]], usual)
        rows.append([name, *row, f"{peaks[name] / 1e6:.0f}", str(waits)])
    return rows


def cells(times: Sequence[tuple[float, bool]], ordinary: Sequence[float], usual: Sequence[float]) -> list[str]:
    """`usual` are the seconds of SGD. The share is what ordinary steps have not, of the mean step."""
    seconds, found = [seconds for seconds, _ in times], []
    for of in (statistics.median, statistics.mean):
        found += [f"{1e3 * of(seconds):.3g}", f"{of(seconds) / of(usual):.2f}"]
    renewing, median = [taken for taken, renewed in times if renewed], statistics.median(ordinary)
    share = f"{100 * (1 - median / statistics.mean(seconds)):.0f} %" if renewing else "-"
    return [*found, f"{1e3 * statistics.median(renewing):.3g}" if renewing else "-", f"{1e3 * median:.3g}", share]


def steps(network: Network, device: str, rounds: int = 20) -> None:
    for precision in PRECISIONS if device.startswith("cuda") else ["fp32"]:
        print(f"\n**{on(network, 'meta').name}, {precision}**\n")
        printed(HEAD, compared(network, precision, device, rounds))


DAMPING = 1e-3
GRADIENT = "gradient"
PUBLISHED = {  # ratios to the gradient, eager and compiled
    "K-FAC factors": "5.8 / 2.3", "EKFAC": "6.8 / 3.2 (correction)", "inverse, Cholesky": "8.1",
    "inverse, eigenvalues": "89", "inverse times vector": "0.55 / 0.45", "G v": "2.6 / 1.6", "H v": "7.9 / 2.2",
}  # fmt: skip


def quantities(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Callable[[], object]]:
    """What is timed. Operators that later ones apply are made beforehand."""
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


def matrices(network: Network, device: str, rounds: int = 10) -> None:
    work, peaks = on(network, device), {}
    calls = quantities(work.model, work.x, work.y)
    for quantity, call in calls.items():
        call()  # plans are learnt, kernels chosen
        peaks[quantity] = peak_bytes(call, device.startswith("cuda"))

    def seconds(call: Callable[[], object]) -> float:
        gc.collect()
        return timed(call, device)[1]

    times = in_turns({quantity: partial(seconds, call) for quantity, call in calls.items()}, range(rounds))
    rows = []
    for quantity, own in times.items():
        ratio = statistics.median(one / plain for one, plain in zip(own, times[GRADIENT], strict=True))
        cells = f"{1e3 * statistics.median(own):.3g}", f"{ratio:.2f}", f"{peaks[quantity] / 1e6:.0f}"
        rows.append([quantity, *cells, PUBLISHED.get(quantity, "-")])
    head = ["quantity", "median, ms", "to the gradient", "peak MB", "curvlinops, RTX A6000"]
    print(f"\n**{work.name}**\n")
    printed(head, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    device = os.environ.get("DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
    options = options_of(__doc__, arguments, what=tuple(NAMES), device=device, only=list(NETWORKS), rounds=int)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    run, rounds = steps if options.what == "steps" else matrices, {"rounds": options.rounds} if options.rounds else {}
    print(machine(options.device))
    for name in options.only:
        if name in NAMES[options.what]:
            run(NETWORKS[name], options.device, **rounds)


if __name__ == "__main__":
    main()
