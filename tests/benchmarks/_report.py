"""Options, files, tables and words of all benchmarks."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import re
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
NUMBER = re.compile(r"([<>]?\d[\d,.]*(e-?\d+)?( [†%])?|-)( \(.*\))?|wrong.*|no .*|unsupported.*")
words = lambda setting: ", ".join(f"{name} {value:g}" for name, value in setting.items()) or "defaults"
load = lambda path: json.loads(path.read_text()) if path and path.exists() else {}


def options_of(doc: str | None, args: Sequence[str] | None = None, **usual: Any) -> argparse.Namespace:
    """An option for each: False is a switch, a list has the choices of which some or all are taken, a type stands for a
    value that may be missing (in a list: for several), a tuple for the choices of one word without a name.

    From here on the processor has one thread, and nothing is warned of.
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
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    return options


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table, its columns of numbers set to the right."""
    rows = list(rows)
    rule = ["---:" if all(map(NUMBER.fullmatch, column)) else "---" for column in zip(*rows, strict=True)]
    return "\n".join(map(line_of, [head, rule, *rows]))


def line_of(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def printed(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A table, each row as soon as it is known."""
    for cells in itertools.chain([head, ["---"] * len(head)], rows):
        print(line_of(cells), flush=True)


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
