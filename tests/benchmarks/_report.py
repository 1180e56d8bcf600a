"""Options, files, tables and words of all benchmarks."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve()
sys.path += [str(HERE.parents[2]), str(HERE.parents[1])]  # tests last: it has folders of the packages' names, too
DEVICE = os.environ.get("DEVICE", "cpu")
markdown = lambda head, align, rows: "\n".join(lines_of(head, align, rows))
words = lambda setting: ", ".join(f"{name} {value:g}" for name, value in setting.items()) or "defaults"
load = lambda path: json.loads(path.read_text()) if path and path.exists() else {}


def options_of(doc: str | None, args: Sequence[str] | None = None, **usual: Any) -> argparse.Namespace:
    """An option for each: False is a switch, a list has the choices of which some or all are taken, a type stands for a
    value that may be missing (in a list: for several), a tuple for the choices of one word without a name.

    From here on the processor has one thread, unless `threads` says otherwise, and nothing is warned of.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in usual.items():
        several = {"nargs": "+", "metavar": name.upper()}
        kind: dict[str, Any] = {"type": type(value), "default": value}
        if value is False:
            kind = {"action": "store_true"}
        elif isinstance(value, type):
            kind = {"type": value}
        elif isinstance(value, list):
            known = {"choices": value, "default": value}
            kind = several | ({"type": value[0], "default": []} if isinstance(value[0], type) else known)
        elif isinstance(value, tuple):
            parser.add_argument(name, nargs="?", choices=value, default=value[0])
            continue
        parser.add_argument(f"--{name.replace('_', '-')}", **kind)
    options = parser.parse_args(args)
    torch.set_num_threads(getattr(options, "threads", 1))
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    return options


def lines_of(head: Sequence[str], align: str, rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Those of a table; `align` has "l" or "r" for each column, the last for all that follow."""
    columns = align.ljust(len(head), align[-1])
    rule = [{"l": "---", "r": "---:"}[side] for side in columns]
    for row in itertools.chain([head, rule], rows):
        yield f"| {' | '.join(row)} |"


def printed(head: Sequence[str], align: str, rows: Iterable[Sequence[str]]) -> None:
    """Each row as soon as it is known."""
    for line in lines_of(head, align, rows):
        print(line, flush=True)


def medians(rows: Mapping[Any, Sequence[Sequence[float]]], *forms: str) -> Iterator[list[str]]:
    """Names, and the median of each of their numbers in its form."""
    for name, found in rows.items():
        numbers = map(statistics.median, zip(*found, strict=True))
        yield [*([name] if isinstance(name, str) else name), *map("{:{}}".format, numbers, forms)]


def processor() -> str:
    """Its name, where the system tells it."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine(device: str) -> str:
    """Processor, threads and versions, in words."""
    name = torch.cuda.get_device_name() if device.startswith("cuda") else processor()
    threads, python = torch.get_num_threads(), platform.python_version()
    return f"{name}, {threads} thread(s), torch {torch.__version__}, Python {python}"


def save(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
