"""Per-sample gradients, norms and clipped sums against torch.func, Opacus, BackPACK and expanded weights.

    pip install -e ".[bench]" && pip install --no-deps backpack-for-pytorch       (or `make bench`)
    python tests/benchmarks/per_sample.py                                         # all rows
    python tests/benchmarks/per_sample.py --only gpt norms --seconds 10

Every method is checked against a loop of batch size one first; what is wrong or unsupported is named and not timed. All
run in one process, in turn: in each round every method is timed once in an order that rotates, and the table shows the
median over rounds of its ratio to the plain batch gradient (forward and backward filling `.grad`) of the same round.
Building the results is part of the time, freeing them is not. A dagger marks the fastest.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

from _networks import LOSS, PER_SAMPLE, Workload, workloads
from _peers import CLIPPED, GRADIENTS, NORMS, Gradients, Kinds, one_by_one, reference_clipped
from _peers import norms as norms_of
from _report import options_of
from _rows import OPTIONS, Method, Plain, Row, chosen, report, worst_error
from torch import Tensor

QUANTITIES: dict[str, Kinds] = {"gradients": GRADIENTS, "norms": NORMS, "clipped": CLIPPED}


def error_of(quantity: str, method: Method, reference: Gradients) -> float:
    """In units of the tolerance of float32."""
    result = method.run()
    if quantity == "clipped":
        return worst_error(result, reference_clipped(reference))
    if not isinstance(result, Tensor):
        return worst_error(result, reference)
    norms = norms_of(reference)
    return float(((result - norms).abs() / (2e-4 * norms)).max())


def memory(quantity: str, workload: Workload) -> str:
    whole = workload.result_bytes
    size = {"gradients": whole, "norms": 4 * workload.samples, "clipped": whole // workload.samples}[quantity]
    return f"{size / 1e6:.0f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"


def row(quantity: str, workload: Workload, reference: Gradients) -> Row:
    setting = workload.model, LOSS, workload.x, workload.y
    makers = {name: partial(kind, *setting) for name, kind in QUANTITIES[quantity].items()}
    labels = [workload.name, quantity, memory(quantity, workload)]
    return Row(labels, partial(Plain, *setting), makers, lambda method: error_of(quantity, method, reference))


def rows(options: argparse.Namespace) -> Iterator[Row]:
    for _, workload in workloads(options, PER_SAMPLE):
        reference = one_by_one(workload.model, LOSS, workload.x, workload.y)
        pending = [row(quantity, workload, reference) for quantity in chosen(options, QUANTITIES)]
        del reference
        yield from pending


def main() -> None:
    options = options_of(__doc__, only=[*PER_SAMPLE, *QUANTITIES], **OPTIONS)
    report(["model", "per-sample", "results"], list(NORMS), rows(options), options)


if __name__ == "__main__":
    main()
