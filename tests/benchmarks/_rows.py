"""What the benchmarks share: ways to compute one quantity, checked, timed in turn and printed as a row of a table."""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from _report import DEVICE, machine, printed
from torch import Tensor, nn

from support import memory

PLAIN = "plain"
OPTIONS = {"rounds": 15, "seconds": 20.0, "device": DEVICE}
Named = dict[str, Tensor]


class Unsupported(Exception):
    """The peer has no way to compute this for the model; the message says why."""


class Method:
    """One way to compute a quantity: set up once as its user would, then `run` does the work of one call.

    `clear` drops what is left on the parameters. It is called between runs, outside the timed region, so that nobody
    pays for freeing the results of the call before.
    """

    def __init__(self, model: nn.Module, loss: nn.Module, x: Tensor, y: Tensor) -> None:
        self.model, self.loss, self.x, self.y = copy.deepcopy(model), loss, x, y
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def run(self) -> Any:
        raise NotImplementedError

    def clear(self) -> None:
        """Drop what the last run left on the parameters."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def stored(self, attribute: str) -> Named:
        """What the peer left at `attribute` of each parameter."""
        found = {name: getattr(p, attribute, None) for name, p in self.parameters.items()}
        missing = [self.model.get_submodule(name.rpartition(".")[0]) for name, value in found.items() if value is None]
        if missing:
            raise Unsupported(f"no rule for {', '.join(dict.fromkeys(type(module).__name__ for module in missing))}")
        return {name: value for name, value in found.items() if value is not None}


class Plain(Method):
    """The batch gradient alone: forward and backward filling `.grad`. Every ratio is to this."""

    def run(self) -> Named:
        self.loss(self.model(self.x), self.y).backward()
        return {}


T = TypeVar("T")


def timed(run: Callable[[], T], device: str = "cpu") -> tuple[T, float]:
    """What it returns, and its seconds: of the processor, on which others may work, too; on a GPU those that pass."""
    clock = time.perf_counter if device.startswith("cuda") else time.process_time
    wait(device)
    start = clock()
    found = run()
    wait(device)
    return found, clock() - start


def wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def in_turns(ways: Mapping[str, Callable[[], T]], rounds: Iterable[int]) -> dict[str, list[T]]:
    """What each way, which times itself, returns in every round; each round another one begins."""
    names = list(ways)
    found: dict[str, list[T]] = {name: [] for name in names}
    for number in rounds:
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            found[name].append(ways[name]())
    return found


class Row:
    """One quantity of one model: the methods that are right, and what to print for the others.

    Args:
        labels: the first cells: model, quantity, and what comes after the time of the plain gradient.
        plain: makes the method that all ratios are to.
        methods: makes the others, by the names of their columns.
        error: runs a method and returns its error in units of the tolerance.
    """

    def __init__(
        self,
        labels: Sequence[str],
        plain: Callable[[], Method],
        methods: Mapping[str, Callable[[], Method]],
        error: Callable[[Method], float],
    ) -> None:
        self.labels = labels
        self.methods: dict[str, Method] = {PLAIN: plain()}
        self.notes: dict[str, str] = {}
        self.times: dict[str, list[float]] = {}
        for name, make in methods.items():
            note = self.admit(name, make, error)
            if note:
                self.methods.pop(name, None)
                self.notes[name] = note
        gc.collect()

    def admit(self, name: str, make: Callable[[], Method], error: Callable[[Method], float]) -> str:
        """Build the method and check it; '' if it is right, else the words for the table."""
        try:
            method = self.methods[name] = make()
            worst = error(method)
            method.clear()
        except ImportError as reason:
            return f"not installed: {reason.name}"
        except (Unsupported, AssertionError, AttributeError, RuntimeError, ValueError, TypeError) as reason:
            return f"unsupported: {shorten(reason)}"
        return "" if worst <= 1 else f"wrong (max error {worst:.2g} x tolerance)"

    def measure(self, options: argparse.Namespace) -> None:
        """Fill `times`, {method: seconds of each round}: three rounds or more, each the best of up to five runs."""

        def best(method: Method, repeats: int) -> float:
            """Results are freed after each run."""
            taken = []
            for _ in range(repeats):
                taken.append(timed(method.run, options.device)[1])
                method.clear()
            return min(taken)

        count = lambda method: max(1, min(5, int(0.05 / best(method, 3))))  # that take 0.05 seconds; and a warm-up
        ways = {name: partial(best, method, count(method)) for name, method in self.methods.items()}
        gc.collect()
        gc.disable()
        start = time.perf_counter()
        goes_on = lambda turn: turn < 3 or time.perf_counter() - start <= options.seconds
        try:
            self.times = in_turns(ways, itertools.takewhile(goes_on, range(options.rounds)))
        finally:
            gc.enable()
        self.methods.clear()

    def ratio(self, name: str) -> float:
        pairs = zip(self.times[name], self.times[PLAIN], strict=True)
        return statistics.median(mine / plain for mine, plain in pairs)

    def cells(self, columns: Sequence[str]) -> list[str]:
        ratios = {name: self.ratio(name) for name in self.times if name != PLAIN}
        fastest = min(ratios, key=lambda name: ratios[name], default=None)
        cells = [*self.labels[:2], f"{1e3 * statistics.median(self.times[PLAIN]):.1f}", *self.labels[2:]]
        for name in columns:
            if name in ratios:
                cells.append(f"{ratios[name]:.2f}{' †' if name == fastest else ''}")
            else:
                cells.append(self.notes.get(name, "-"))
        return cells


def worst_error(result: Named, reference: Named, tolerance: float = 2e-4) -> float:
    """Largest error, in units of the tolerance: that of a parameter's largest entry and 1e-6 of any's."""
    if result.keys() != reference.keys():
        raise Unsupported(f"other parameters: {sorted(result.keys() ^ reference.keys())[:3]}")
    largest = {name: float(wanted.abs().max()) for name, wanted in reference.items()}
    errors = []
    for name, wanted in reference.items():
        if result[name].shape != wanted.shape:
            raise Unsupported(f"shape {tuple(result[name].shape)} of {name}")
        allowed = tolerance * largest[name] + 1e-6 * max(largest.values())
        errors.append(max(float((a - b).abs().max()) for a, b in zip(result[name], wanted, strict=True)) / allowed)
    return max(errors)


def peak_bytes(run: Callable[[], object], is_cuda: bool) -> float:
    """Most bytes in tensors that a call adds to what there was."""
    if not is_cuda:
        return float(memory.peak_bytes(run))
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return float(torch.cuda.max_memory_allocated() - before)


def shorten(reason: Exception) -> str:
    text = " ".join(str(reason).split()) or type(reason).__name__
    return (text if len(text) <= 80 else text[:77] + "...").replace("|", "/")


def chosen(options: argparse.Namespace, known: Iterable[str]) -> list[str]:
    """Those of the names that ``--only`` lists; all if it lists none of them."""
    known = list(known)
    return [name for name in known if name in options.only] or known


def report(head: Sequence[str], columns: Sequence[str], rows: Iterable[Row], options: argparse.Namespace) -> None:
    """Measure the rows and print them; `head` names the labels of a row."""
    rounds = []

    def measured() -> Iterator[list[str]]:
        for row in rows:
            row.measure(options)
            rounds.append(len(row.times[PLAIN]))
            yield row.cells(columns)

    printed([*head[:2], f"{PLAIN}, ms", *head[2:], *columns], measured())
    print(
        f"\nRatios of times to the plain batch gradient on "
        f"{machine(options.device)}, medians of {min(rounds)} to {max(rounds)} rounds; † fastest.\n"
    )
