"""A simulation of data-parallel K-FAC on 1 to 1,024 ranks, from what operations cost on the machine at hand.

    python tests/benchmarks/scaling.py [--check] [--figure docs/scaling.png] [--out scaling.md]

`_scaling_model.py` has the model, docs/scaling.md what came out. --check compares it with one and two processes.
The network is given by --latency and --bandwidth: one port of 200 Gb/s (HDR InfiniBand) carries 25 GB/s, and 10 us is
within the 2.7 to 14 us for a hop over a network in the table that NCCL chooses its algorithms by (`hwLat` in its
src/graph/tuning.cc).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from _report import machine, markdown
from _scaling_measure import check, gloo, measured, predicted
from _scaling_model import Costs, Curve, Network, Step, step
from _scaling_networks import DEPTHS, FAMILY_RANKS, FRACTIONS, NETWORKS, RANKS, SUPPOSED, WIDTHS, divided, mlp

SHOWN = (1, 8, 64, 1024)
Rows = Iterator[Sequence[str]]


def table(head: Sequence[str], rows: Rows) -> str:
    return markdown(head, "lr", rows) + "\n"


def stopped(steps: Sequence[Step]) -> tuple[int, str]:
    """From how many ranks on a step is at most 5 % slower than with most, and what K-FAC's share is spent on then."""
    last = steps[-1]
    first = next(p for p, own in zip(RANKS, steps, strict=True) if own.seconds <= 1.05 * last.seconds)
    extra = {k: v for k, v in last.parts.items() if k != "forward and backward"}
    return first, max(extra, key=lambda k: extra[k])


def cost_rows(costs: Costs) -> Rows:
    for size, each in zip(costs.product.sizes, costs.product.seconds, strict=True):
        yield f"product, smallest dimension {size:.0f}", f"{2e-9 / each:.3g} Gflop/s"
    for name, curve in (("Cholesky inverse", costs.inverse), ("eigendecomposition", costs.eigen)):
        for size, own in zip(curve.sizes, curve.seconds, strict=True):
            yield f"{name}, {size:.0f} rows", f"{1e3 * own:.3g} ms"
    yield "elementwise, reads and writes", f"{4e-9 / costs.touch:.3g} GB/s"
    yield "any operation", f"{1e6 * costs.call:.3g} us"


def network_rows(costs: Costs, network: Network) -> Rows:
    for title, (layers, samples) in NETWORKS.items():
        for ranks in SHOWN:
            found = [step(layers, samples, ranks, f, costs, network) for f in FRACTIONS.values()]
            cells = [f"{1e3 * found[0].sgd:.3g}"]
            cells += [f"{s.seconds / s.sgd:.3f}" for s in found]
            cells += [" / ".join(f"{value(s) / 1e6:.3g}" for s in found) for value in VALUES]
            yield title, str(ranks), *cells


VALUES = (lambda s: s.received, lambda s: s.ordinary, lambda s: s.memory)


def limit_rows(costs: Costs, network: Network) -> Rows:
    for title, (layers, samples) in NETWORKS.items():
        steps = [step(layers, samples, p, 1.0, costs, network) for p in RANKS]
        first, part = stopped(steps)
        split = {k: f"{100 * v / steps[-1].seconds:.1f} %" for k, v in steps[-1].parts.items()}
        by_turns = step(layers, samples, RANKS[-1], 1.0, costs, network, by_turns=True)
        eigen = step(layers, samples, RANKS[-1], 1.0, costs, network, eigen=True)
        ratio = [f"{s.seconds / s.sgd:.3f}" for s in (steps[0], steps[-1], by_turns, eigen)]
        yield title, str(len(layers)), str(first), part, split[part], *ratio


def family_rows(costs: Costs, network: Network) -> Rows:
    for depth in DEPTHS:
        for width in WIDTHS:
            found = [step(mlp(depth, width), 128, p, 1.0, costs, network) for p in (1, FAMILY_RANKS)]
            cells = [f"{1e3 * s.seconds:.3g} ({s.seconds / s.sgd:.2f})" for s in found]
            yield f"{depth} x {width:,}", *cells, f"{found[1].received / 1e6:.3g}", f"{found[1].memory / 1e6:.3g}"


def divided_rows(costs: Costs, network: Network) -> Rows:
    """Efficiency where a batch is divided over the ranks."""
    for title, (layers, _) in NETWORKS.items():
        for name in ("SGD", "K-FAC"):
            seconds = divided(layers, costs, network, name)
            yield title, name, *(f"{seconds[0] / (p * s):.2f}" for p, s in zip(RANKS, seconds, strict=True))


def check_rows(costs: Costs, options: argparse.Namespace) -> Rows:
    size = (options.depth, options.width, options.samples)
    found = check(*size)
    network = gloo(found[2])
    for ranks in (1, 2):
        for piece, own in predicted(*size, ranks, costs, network).items():
            real = found[ranks][piece]
            if own:
                yield str(ranks), piece, f"{1e3 * own:.3g}", f"{1e3 * real:.3g}", f"{100 * (own / real - 1):+.0f} %"
        yield str(ranks), "inversions, as KFAC", "", f"{1e3 * found[ranks]['inversions, as KFAC']:.3g}", ""
    yield "2", f"gloo: {1e6 * network.latency:.0f} us, {network.bandwidth / 1e9:.2g} GB/s", "", "", ""


def report(costs: Costs, network: Network, options: argparse.Namespace) -> Iterator[str]:
    yield "## Operations\n\n" + table(["operation", "cost"], cost_rows(costs))
    if options.check:
        title = f"MLP {options.depth} x {options.width}, batch {options.samples}"
        head = [f"{title}: processes", "piece", "simulated, ms", "measured, ms", "deviation"]
        yield "## Check\n\n" + table(head, check_rows(costs, options))
    head = ["network", "ranks", "SGD, ms", *(f"K-FAC to SGD, f = {f}" for f in FRACTIONS)]
    head += ["MB received a step", "of them in an ordinary step", "MB of inverses"]
    tail = ["network", "layers", "flat from", "largest part", "its share", "1 rank", "1,024", "by turns", "EKFAC"]
    for title, own in ((options.machine, costs), ("supposed accelerator", costs.faster(*SUPPOSED))):
        yield f"## {title}\n\n" + table(head, network_rows(own, network))
        yield table(tail, limit_rows(own, network))
        family = ["MLP", "1 rank, ms (to SGD)", f"{FAMILY_RANKS} ranks", "MB received a step", "MB of inverses"]
        yield table(family, family_rows(own, network))
        yield table(["network", "", *map(str, RANKS)], divided_rows(own, network))


def known(path: Path | None, device: str) -> Costs:
    """Costs from a file, where there is one; measured, and written there, otherwise."""
    if path is None or not path.exists():
        costs = measured(device)
        if path is not None:
            path.write_text(json.dumps(asdict(costs)))
        return costs
    saved = json.loads(path.read_text())
    curves = {k: Curve(tuple(v["sizes"]), tuple(v["seconds"])) for k, v in saved.items() if isinstance(v, dict)}
    return Costs(**(saved | curves))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--latency", type=float, default=10.0, help="microseconds")
    parser.add_argument("--bandwidth", type=float, default=25.0, help="GB/s of one rank")
    parser.add_argument("--check", action="store_true", help="compare with one and two processes")
    parser.add_argument("--depth", type=int, default=6, help="layers of the network of --check")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--costs", type=Path, help="file of costs, read if it is there, written otherwise")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--out", type=Path, help="write the tables to this file too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    options.machine = machine(options.device)
    costs, network = known(options.costs, options.device), Network(1e-6 * options.latency, 1e9 * options.bandwidth)
    lines = []
    for text in report(costs, network, options):
        print(text, flush=True)
        lines.append(text)
    if options.out:
        options.out.write_text("\n".join(lines))
    if options.figure:
        from _scaling_figure import draw

        draw(costs, network, options.figure)


if __name__ == "__main__":
    main()
