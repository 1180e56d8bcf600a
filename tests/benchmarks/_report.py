"""Files, tables and words of benchmarks' reports."""

from __future__ import annotations

import itertools
import json
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch


def lines_of(head: Sequence[str], align: str, rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Those of a table; `align` has "l" or "r" for each column, the last for all that follow."""
    columns = align.ljust(len(head), align[-1])
    rule = [{"l": "---", "r": "---:"}[side] for side in columns]
    for row in itertools.chain([head, rule], rows):
        yield f"| {' | '.join(row)} |"


def markdown(head: Sequence[str], align: str, rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(lines_of(head, align, rows))


def printed(head: Sequence[str], align: str, rows: Iterable[Sequence[str]]) -> None:
    """Each row as soon as it is known."""
    for line in lines_of(head, align, rows):
        print(line, flush=True)


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


def words(setting: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in setting.items()) or "defaults"


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def save(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
