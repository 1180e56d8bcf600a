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
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


def folder_of(nodeid: str) -> str:
    """The folder of a test below tests/, two levels at most; "tests" of a file that lies there itself."""
    return "/".join(Path(nodeid.partition("::")[0]).parent.parts[1:3]) or "tests"


class Durations:
    """Collects reports, in the process that prints them, and writes their sums at the end, the longest first."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self.cases: dict[str, set[str]] = defaultdict(set)
        self.seconds: dict[str, float] = defaultdict(float)
        self.start = time.perf_counter()

    def pytest_runtest_logreport(self, report: Any) -> None:
        folder = folder_of(report.nodeid)
        self.cases[folder].add(report.nodeid)
        self.seconds[folder] += report.duration

    def pytest_terminal_summary(self) -> None:
        commit = ["git", "log", "-1", "--format=%h"]
        order = sorted(self.seconds.items(), key=lambda item: -item[1])
        entry = {
            "commit": subprocess.run(commit, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip(),
            "machine": f"{platform.machine()}, torch {torch.__version__}, Python {sys.version.split()[0]}",
            "wall_seconds": round(time.perf_counter() - self.start, 1),
            "cases": sum(map(len, self.cases.values())),
            "folders": {f: {"cases": len(self.cases[f]), "seconds": round(seconds, 1)} for f, seconds in order},
        }
        stored = json.loads(self.path.read_text("utf-8")) if self.path.exists() else {}
        self.path.write_text(json.dumps(stored | {self.name: entry}, indent=1) + "\n", "utf-8")
