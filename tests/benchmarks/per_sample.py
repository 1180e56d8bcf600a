"""Per-sample gradients and norms against torch.func, Opacus, BackPACK and expanded weights.

    pip install -e ".[bench]" && pip install --no-deps backpack-for-pytorch       (or `make bench`)
    python tests/benchmarks/per_sample.py                                         # all rows, two threads
    python tests/benchmarks/per_sample.py --only gpt norms --seconds 10 --threads 1 --out table.md

Every method is checked against a loop of batch size one first; what is wrong or unsupported is named and not timed. All
run in one process, in turn: in each round every method is timed once in an order that rotates, and the table shows the
median over rounds of its ratio to the plain batch gradient (forward and backward filling `.grad`) of the same round.
Building the results is part of the time, freeing them is not. A dagger marks the fastest. On a machine shared with
other work, `--threads 1 --cpu-time` counts processor time instead, which waiting for the processor does not lengthen.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from _peers import GRADIENTS, NORMS, Gradients, Method, Plain, Unsupported, one_by_one, reference_norms
from _workloads import WORKLOADS, Workload
from torch import Tensor, nn

QUANTITIES: dict[str, dict[str, type[Method]]] = {"gradients": GRADIENTS, "norms": NORMS}
COLUMNS = list(NORMS)
PLAIN = "plain"
LOSS = nn.CrossEntropyLoss()
CLOCK = time.perf_counter


class Row:
    """One workload and quantity: the methods that are right, and what to print for the others."""

    def __init__(self, quantity: str, workload: Workload, reference: Gradients) -> None:
        self.quantity, self.workload = quantity, workload
        self.methods: dict[str, Method] = {PLAIN: self.make(Plain)}
        self.notes: dict[str, str] = {}
        self.times: dict[str, list[float]] = {}
        for name, kind in QUANTITIES[quantity].items():
            note = self.admit(name, kind, reference)
            if note:
                self.methods.pop(name, None)
                self.notes[name] = note
        gc.collect()

    def make(self, kind: type[Method]) -> Method:
        return kind(self.workload.model, LOSS, self.workload.x, self.workload.y)

    def admit(self, name: str, kind: type[Method], reference: Gradients) -> str:
        """Build the method and check it; '' if it is right, else the words for the table."""
        try:
            method = self.methods[name] = self.make(kind)
            result = method.run()
            error = worst_error(result, reference)
            del result
            method.clear()
        except ImportError as reason:
            return f"not installed: {reason.name}"
        except (Unsupported, NotImplementedError, AttributeError, RuntimeError, ValueError, TypeError) as reason:
            return f"unsupported: {shorten(reason)}"
        return "" if error <= 1 else f"wrong (max error {error:.0f} x tolerance)"

    def measure(self, rounds: int, seconds: float, device: str) -> None:
        """Fill `times`, {method: seconds of each round}: at least three rounds, at most `rounds`."""
        names = list(self.methods)
        repeats = {name: self.repeats(name, device) for name in names}
        self.times = {name: [] for name in names}
        gc.collect()
        gc.disable()
        start = time.perf_counter()
        try:
            for turn in range(rounds):
                if turn >= 3 and time.perf_counter() - start > seconds:
                    break
                shift = turn % len(names)
                for name in names[shift:] + names[:shift]:
                    best = min(timed(self.methods[name], device) for _ in range(repeats[name]))
                    self.times[name].append(best)
        finally:
            gc.enable()

    def repeats(self, name: str, device: str) -> int:
        """Warm up, and choose how often a round runs the method: the best of up to five, within 0.05 seconds."""
        once = min(timed(self.methods[name], device) for _ in range(3))
        return max(1, min(5, int(0.05 / once)))

    def ratio(self, name: str) -> float:
        pairs = zip(self.times[name], self.times[PLAIN], strict=True)
        return statistics.median(mine / plain for mine, plain in pairs)

    def cells(self) -> list[str]:
        ratios = {name: self.ratio(name) for name in self.times if name != PLAIN}
        fastest = min(ratios, key=lambda name: ratios[name], default=None)
        cells = [self.workload.name, self.quantity, f"{1e3 * statistics.median(self.times[PLAIN]):.1f}", self.memory()]
        for name in COLUMNS:
            if name in ratios:
                cells.append(f"{ratios[name]:.2f}{' †' if name == fastest else ''}")
            else:
                cells.append(self.notes.get(name, "-"))
        return cells

    def memory(self) -> str:
        size = self.workload.result_bytes if self.quantity == "gradients" else 4 * self.workload.samples
        return f"{size / 1e6:.0f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"


def timed(method: Method, device: str) -> float:
    """Seconds of one run; its results are freed afterwards."""
    synchronize(device)
    start = CLOCK()
    result = method.run()
    synchronize(device)
    taken = CLOCK() - start
    del result
    method.clear()
    return taken


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def worst_error(result: Gradients | Tensor, reference: Gradients) -> float:
    """Largest error in units of the tolerance of float32: 2e-4 of a parameter's largest entry and 1e-6 of any's."""
    if isinstance(result, Tensor):
        norms = reference_norms(reference)
        return float(((result - norms).abs() / (2e-4 * norms)).max())
    if result.keys() != reference.keys():
        raise Unsupported(f"other parameters: {sorted(result.keys() ^ reference.keys())[:3]}")
    largest = {name: float(g.abs().max()) for name, g in reference.items()}
    errors = []
    for name, wanted in reference.items():
        if result[name].shape != wanted.shape:
            raise Unsupported(f"shape {tuple(result[name].shape)} of {name}")
        tolerance = 2e-4 * largest[name] + 1e-6 * max(largest.values())
        errors.append(max(float((a - b).abs().max()) for a, b in zip(result[name], wanted, strict=True)) / tolerance)
    return max(errors)


def shorten(reason: Exception) -> str:
    text = " ".join(str(reason).split()) or type(reason).__name__
    return (text if len(text) <= 80 else text[:77] + "...").replace("|", "/")


def table(rows: Sequence[Row]) -> str:
    head = ["model", "per-sample", "plain, ms", "results", *COLUMNS]
    lines = [head, ["---"] * 2 + ["---:"] * (len(head) - 2), *(row.cells() for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine(device: str, rounds: Sequence[int]) -> str:
    name = torch.cuda.get_device_name() if device.startswith("cuda") else f"{torch.get_num_threads()} CPU thread(s)"
    clock = "processor time" if CLOCK is time.process_time else "wall time"
    return (
        f"Ratios of {clock} to the plain batch gradient on {name}, torch {torch.__version__}, "
        f"medians of {min(rounds)} to {max(rounds)} rounds; † fastest."
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    choices = [*WORKLOADS, *QUANTITIES]
    parser.add_argument("--only", nargs="+", choices=choices, default=[], help="these models and quantities alone")
    parser.add_argument("--rounds", type=int, default=15, help="most rounds per row")
    parser.add_argument("--seconds", type=float, default=20, help="no new round after this time in a row (at least 3)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="processor time: with --threads 1 on a shared machine")
    parser.add_argument("--device", default=os.environ.get("DEVICE", "cpu"))
    parser.add_argument("--out", type=Path, help="write the table to this file too")
    return parser.parse_args()


def main() -> None:
    global CLOCK
    options = arguments()
    CLOCK = time.process_time if options.cpu_time else time.perf_counter
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    models = [name for name in WORKLOADS if name in options.only] or list(WORKLOADS)
    quantities = [name for name in QUANTITIES if name in options.only] or list(QUANTITIES)
    rows = []
    for model in models:
        workload = WORKLOADS[model](options.device)
        reference = one_by_one(workload.model, LOSS, workload.x, workload.y)
        pending = [Row(quantity, workload, reference) for quantity in quantities]
        del reference
        for row in pending:
            row.measure(options.rounds, options.seconds, options.device)
            rows.append(row)
            print(" | ".join(row.cells()), flush=True)
    text = f"{table(rows)}\n\n{machine(options.device, [len(row.times[PLAIN]) for row in rows])}\n"
    print(f"\n{text}")
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
