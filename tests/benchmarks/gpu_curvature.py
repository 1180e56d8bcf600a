"""What curvature costs on a GPU, to a plain gradient: factors, inverses, products with matrices; time and memory.

    python tests/benchmarks/gpu_curvature.py [--device cuda] [--small] [--only nanogpt resnet18] [--json FILE]

Networks and batches are those of curvlinops' own benchmark. The last column has its figures, taken on an RTX A6000
(eager, compiled): ratios on another GPU, so a first orientation and no comparison. Networks are in evaluation mode, in
single precision without TF32; factors come from one sampled label. "Cholesky" damps the factors, "eigenvalues" the
matrix. Quantities run in turn within a round, the device being waited for; ratios are medians over rounds. Without a
GPU, or with --small, the networks are small ones: that shows that it runs, not what it costs on a GPU.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from _gpu_networks import FULL, SMALL, Network
from _report import machine, markdown
from _workloads import LOSS
from gpu import peak_bytes, save, shared_arguments, turned, wait

import curvature

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
class Result:
    """Of one quantity: seconds in every round, and the bytes that a call adds at its peak."""

    network: str
    quantity: str
    seconds: list[float]
    peak: float


def quantities(network: Network, device: str) -> dict[str, Callable[[], object]]:
    """What is timed. Operators that later ones apply are made beforehand."""
    model, x, y = network.on(device)
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


def measure(name: str, network: Network, device: str, rounds: int) -> list[Result]:
    calls = quantities(network, device)
    results = {}
    for quantity, call in calls.items():
        call()  # plans are learnt, kernels chosen
        results[quantity] = Result(name, quantity, [], peak_bytes(call, device.startswith("cuda")))
    for number in range(rounds):
        for quantity in turned(list(calls), number):
            gc.collect()
            wait(device)
            start = time.perf_counter()
            calls[quantity]()
            wait(device)
            results[quantity].seconds.append(time.perf_counter() - start)
    return list(results.values())


def table(title: str, results: Sequence[Result], with_published: bool) -> str:
    base = results[0].seconds
    head, rows = ["quantity", "median, ms", "to the gradient", "peak MB", "curvlinops, RTX A6000"], []
    for result in results:
        ratio = statistics.median(own / plain for own, plain in zip(result.seconds, base, strict=True))
        milliseconds = f"{1e3 * statistics.median(result.seconds):.3g}"
        published = PUBLISHED[result.network].get(result.quantity, "-") if with_published else "-"
        rows.append([result.quantity, milliseconds, f"{ratio:.2f}", f"{result.peak / 1e6:.0f}", published])
    return f"**{title}**\n\n{markdown(head, 'lr', rows)}\n"


def main(arguments: Sequence[str] | None = None) -> None:
    options = shared_arguments(__doc__ or "", FULL, 10).parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    warnings.simplefilter("ignore")
    small = options.small or not options.device.startswith("cuda")
    lines, found = [f"{machine(options.device)}{', small networks' if small else ''}\n"], []
    print(lines[0], flush=True)
    for name in options.only:
        network = (SMALL if small else FULL)[name]
        found += (results := measure(name, network, options.device, options.rounds))
        lines.append(table(network.title, results, not small))
        print(lines[-1], flush=True)
    save(options, lines, found)


if __name__ == "__main__":
    main()
