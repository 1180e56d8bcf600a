"""How time and memory grow with batch, width, classes, length and kernel size, beside what the arithmetic says.

    python tests/benchmarks/growth.py --out growth.md           # five minutes of one thread
    python tests/benchmarks/growth.py --only classes --rounds 2

Each quantity runs on networks that differ in one size alone. The table has the exponents that the last two doublings
show (time and memory proportional to size^exponent), and those that the largest term of the operation count has; what
grows faster than that is marked. Memory is the most that tensors take during a call, beyond what was there.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from _networks import Block
from _report import markdown
from _rows import peak_bytes
from torch import Tensor, nn

import curvature
from optimizers import KFAC

LOSS = nn.CrossEntropyLoss()
Case = tuple[nn.Module, Tensor, Tensor]
MARGIN = 0.25  # a measured exponent above the expected one by more than that is marked


def gradient(model: nn.Module, x: Tensor, y: Tensor) -> None:
    torch.autograd.grad(LOSS(model(x), y), list(model.parameters()))


def product(model: nn.Module, x: Tensor, y: Tensor) -> None:
    _ = curvature.gauss_newton(model, LOSS, (x, y)) @ torch.ones(sum(p.numel() for p in model.parameters()))


def steps(model: nn.Module, x: Tensor, y: Tensor) -> None:
    """Two of an optimizer that is made anew: both renew the factors and invert them."""
    opt = KFAC(model, 1e-3)
    for _ in range(2):
        opt.zero_grad()
        LOSS(model(x), y).backward()
        opt.step()


QUANTITIES: dict[str, Callable[[nn.Module, Tensor, Tensor], object]] = {
    "gradient": gradient,
    "per-sample gradients": lambda model, x, y: curvature.per_sample_gradients(model, LOSS, x, y),
    "norms": lambda model, x, y: curvature.per_sample_norms(model, LOSS, x, y),
    "diagonal, exact": lambda model, x, y: curvature.fisher_diagonal(model, LOSS, (x, y)),
    "diagonal, one sample": lambda model, x, y: curvature.fisher_diagonal(model, LOSS, (x, y), curvature.sampled()),
    "K-FAC, exact": lambda model, x, y: curvature.kfac(model, LOSS, (x, y)),
    "K-FAC, one sample": lambda model, x, y: curvature.kfac(model, LOSS, (x, y), curvature.sampled()),
    "G v": product,
    "two KFAC steps": steps,
}


@dataclass(frozen=True)
class Growth:
    """One size that grows.

    Attributes:
        label: what grows.
        sizes: each twice the one before, or about.
        case: makes the network and batch of a size.
        time: expected exponents by quantity, `time[""]` for all others.
        memory: likewise.
        why: where these come from.
    """

    label: str
    sizes: Sequence[int]
    case: Callable[[int], Case]
    time: Mapping[str, float]
    memory: Mapping[str, float]
    why: str


def mlp(samples: int, width: int, classes: int, inputs: int = 64) -> Case:
    layers = [nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)]
    return nn.Sequential(*layers), torch.randn(samples, inputs), torch.randint(classes, (samples,))


def sequence(length: int) -> Case:
    """One transformer block and a mean over the places; four samples."""

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(1)

    return nn.Sequential(Block(64, 4), Mean(), nn.Linear(64, 10)), torch.randn(4, length, 64), torch.randint(10, (4,))


def image(kernel: int) -> Case:
    convolution = nn.Conv2d(16, 16, kernel, padding=kernel // 2)
    model = nn.Sequential(convolution, nn.ReLU(), nn.AvgPool2d(8), nn.Flatten(), nn.Linear(256, 10))
    return model, torch.randn(16, 16, 32, 32), torch.randint(10, (16,))


FACTORS = ("K-FAC, exact", "K-FAC, one sample", "two KFAC steps")
GROWTHS = {
    "batch": Growth(
        "samples, MLP 64-256-256-10", (64, 128, 256, 512, 1024), lambda n: mlp(n, 256, 10), {"": 1}, {"": 1},
        "everything is a sum over samples",
    ),
    "width": Growth(
        "width w, MLP 64-w-w-10, 64 samples", (128, 256, 512, 1024, 2048), lambda w: mlp(64, w, 10),
        {"": 2, "two KFAC steps": 3}, {"": 2},
        "a weight has w^2 entries, its factors as many; inverting them takes w^3",
    ),
    "classes": Growth(
        "classes C, MLP 64-64-64-C, 16 samples", (64, 128, 256, 512, 1024), lambda c: mlp(16, 64, c),
        {"": 1, "K-FAC, exact": 3, "K-FAC, one sample": 2, "two KFAC steps": 3}, {"": 1, **dict.fromkeys(FACTORS, 2)},
        "the head grows; its factor of outputs has C^2 entries, summed over C - 1 vectors where it is exact, and "
        "inverted in C^3; an exact diagonal takes no more vectors than the head has inputs",
    ),
    "length": Growth(
        "tokens T, a transformer block of width 64, 4 samples", (64, 128, 256, 512, 1024), sequence,
        {"": 2}, {"": 1}, "attention compares all pairs of tokens; all else is linear",
    ),
    "kernel": Growth(
        "kernel side k, Conv2d(16, 16, k) on 16 x 32 x 32", (1, 2, 4, 8), lambda k: image(k),
        {"": 2, **dict.fromkeys(FACTORS, 4), "two KFAC steps": 6}, {"": 2, **dict.fromkeys(FACTORS, 4)},
        "k^2 products for each pixel; the factor of inputs has (16 k^2)^2 entries, inverted in (16 k^2)^3",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """Of one quantity, by size."""

    seconds: list[float]
    peaks: list[float]


def measure(growth: Growth, rounds: int) -> dict[str, Curve]:
    """In turn, the fastest of some rounds."""
    curves = {name: Curve([], []) for name in QUANTITIES}
    for size in growth.sizes:
        torch.manual_seed(0)
        case = growth.case(size)
        for name, run in QUANTITIES.items():
            run(*case)  # learns the structure of the model
            curves[name].peaks.append(peak_bytes(partial(run, *case), False))
        times = dict.fromkeys(QUANTITIES, math.inf)
        for _ in range(rounds):
            for name, run in QUANTITIES.items():
                start = time.process_time()
                run(*case)
                times[name] = min(times[name], time.process_time() - start)
        for name, seconds in times.items():
            curves[name].seconds.append(seconds)
    return curves


def exponent(sizes: Sequence[int], values: Sequence[float]) -> float:
    """From the last three points."""
    return math.log(values[-1] / values[-3]) / math.log(sizes[-1] / sizes[-3])


def cell(found: float, expected: float) -> str:
    return f"{found:.1f} ({expected:g}{', more' if found > expected + MARGIN else ''})"


def table(results: Mapping[str, Mapping[str, Curve]]) -> str:
    head = ["quantity", *(f"{name}: {what}" for name in results for what in ("time", "memory"))]
    rows = []
    for quantity in QUANTITIES:
        line = [quantity]
        for name, curves in results.items():
            growth, curve = GROWTHS[name], curves[quantity]
            for values, expected in ((curve.seconds, growth.time), (curve.peaks, growth.memory)):
                line.append(cell(exponent(growth.sizes, values), expected.get(quantity, expected[""])))
        rows.append(line)
    return markdown(head, "lr", rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=GROWTHS, default=list(GROWTHS))
    parser.add_argument("--rounds", type=int, default=3, help="of which the fastest counts")
    parser.add_argument("--out", type=Path, help="write the table to this file, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {name: measure(GROWTHS[name], options.rounds) for name in options.only}
    text = table(results)
    print(text)
    for name in options.only:
        print(f"{name}: {GROWTHS[name].why}.")
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
