"""Files, tables and words of benchmarks' reports."""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

parser_of = lambda doc: argparse.ArgumentParser(description=(doc or "").split("\n")[0])
markdown = lambda head, align, rows: "\n".join(lines_of(head, align, rows))
words = lambda setting: ", ".join(f"{name} {value:g}" for name, value in setting.items()) or "defaults"
load = lambda path: json.loads(path.read_text()) if path.exists() else {}


def options_of(doc: str | None, **usual: Any) -> argparse.Namespace:
    """An option for each, with its usual value; from here on the processor has one thread."""
    parser = parser_of(doc)
    for name, value in usual.items():
        kind: dict[str, Any] = {"action": "store_true"} if value is False else {"type": type(value), "default": value}
        parser.add_argument(f"--{name.replace('_', '-')}", **kind)
    torch.set_num_threads(1)
    return parser.parse_args()


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
