"""How long the tests of each folder take, written where DURATIONS says (`make durations`).

A plugin of pytest. Seconds are those of setup, call and teardown, added up over all processes; a further run into the
same file, on the simulated device, adds an entry of its own.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parents[2]
TESTS = "tests"


class Timed(NamedTuple):
    """What a phase of a test took, in seconds."""

    nodeid: str
    duration: float


def folder_of(nodeid: str) -> str:
    """The folder of a test below tests/, two levels at most; "tests" of a file that lies there itself."""
    folders = Path(nodeid.partition("::")[0]).parent.parts[1:3]
    return "/".join(folders) or TESTS


def sum_by_folder(phases: Iterable[Timed]) -> dict[str, dict[str, float]]:
    """Cases and seconds of each folder, the longest first."""
    cases: dict[str, set[str]] = defaultdict(set)
    seconds: dict[str, float] = defaultdict(float)
    for nodeid, duration in phases:
        folder = folder_of(nodeid)
        cases[folder].add(nodeid)
        seconds[folder] += duration
    order = sorted(seconds, key=lambda folder: -seconds[folder])
    return {folder: {"cases": len(cases[folder]), "seconds": round(seconds[folder], 1)} for folder in order}


class Durations:
    """Collects reports, in the process that prints them, and writes their sums at the end."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.phases: list[Timed] = []
        self.start = time.perf_counter()

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.phases.append(Timed(report.nodeid, report.duration))

    def pytest_terminal_summary(self) -> None:
        folders = sum_by_folder(self.phases)
        commit = ["git", "log", "-1", "--format=%h"]
        entry = {
            "commit": subprocess.run(commit, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip(),
            "machine": f"{platform.machine()}, torch {torch.__version__}, Python {sys.version.split()[0]}",
            "wall_seconds": round(time.perf_counter() - self.start, 1),
            "cases": sum(folder["cases"] for folder in folders.values()),
            "folders": folders,
        }
        stored = json.loads(self.path.read_text("utf-8")) if self.path.exists() else {}
        self.path.write_text(json.dumps(stored | {self.name: entry}, indent=1) + "\n", "utf-8")
