"""Run every benchmark whose figures the documentation has, and store what it prints in docs/results/.

    make bench-all                                               # two to three hours; goes on where it was stopped
    python tests/benchmarks/bench_all.py --only race demo        # these alone, anew
    make figures                                                 # then: tables and pictures of the pages

`influence` needs kronfluence, whose wheel brings a package `tests` and so stays out of the environment:

    pip install --no-deps --target out/kronfluence kronfluence
    PYTHONPATH=out/kronfluence python tests/benchmarks/bench_all.py --only influence

A result is out of date once `curvature`, `optimizers`, or the benchmark itself has changed since. Times are those of
one thread of the processor: other work on the machine counts little.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch
from _report import options_of, processor
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
# what is run, and about how many minutes it takes
COMMANDS: dict[str, tuple[str, float]] = {
    "demo": ("examples/demo.py --json docs/results/demo.runs.json --out docs/demo.png", 1),
    "per_sample": ("tests/benchmarks/per_sample.py --only mlp cnn gpt --seconds 4 --rounds 8", 5),
    "larger": ("tests/benchmarks/per_sample.py --only resnet lstm vit --seconds 6 --rounds 4", 8),
    "matrices": ("tests/benchmarks/matrices.py --seconds 4 --rounds 5", 15),
    "projections": ("tests/benchmarks/projections.py --seconds 4 --rounds 5", 5),
    "laplacian": ("tests/benchmarks/laplacian.py", 3),
    "attribution": ("tests/benchmarks/attribution.py", 10),
    "influence": ("tests/benchmarks/influence.py", 3),
    "adapters": ("tests/benchmarks/adapters.py", 2),
    "posteriors": ("tests/benchmarks/posteriors.py", 10),
    "storage": ("tests/benchmarks/storage.py", 0.5),
    "compression": ("tests/benchmarks/compression.py", 2),
    "forgetting": ("tests/benchmarks/forgetting.py", 0.2),
    "poisson": ("tests/benchmarks/poisson.py", 7),
    "launches": ("tests/benchmarks/step_overhead.py", 1),
    "prices": ("tests/benchmarks/step_overhead.py --families --steps 300", 4),
    "silently_wrong": ("tests/benchmarks/silently_wrong.py --json docs/results/silently_wrong.runs.json", 2),
    "processes": ("tests/benchmarks/processes.py", 12),
    "batches": ("tests/benchmarks/race.py --batches 64 128 256 500 1000 --problem tanh --only kfac adaptive", 6),
    "race": ("tests/benchmarks/race.py --json docs/results/race.runs.json", 40),
    "generality": ("tests/benchmarks/generality.py --json docs/results/generality.runs.json", 45),
    # Ours, into the file that has the rivals' runs: those are made by --only adamw sgd muon soap schedulefree.
    "held_out": ("tests/benchmarks/held_out.py --only kfac ekfac --json docs/results/held_out.runs.json", 45),
    # on a GPU alone
    "gpu_steps": ("tests/benchmarks/gpu.py steps --only vit resnet gpt", 5),
    "gpu_curvature": ("tests/benchmarks/gpu.py curvature --rounds 3 --only resnet18", 1),
    "gpu_race": (
        "tests/benchmarks/race.py --device cuda --seeds 1 --scale 0.15 --problem autoencoder gpt tanh "
        "--only adamw muon soap kfac",
        2,
    ),
}


@dataclass(frozen=True)
class Table:
    columns: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Stored:
    """What a benchmark has printed, and where that comes from.

    Attributes:
        commit: the last one before the run that changed the code.
        date: of the run.
        seconds: that the run took.
        tables: in their order.
    """

    command: str
    commit: str
    date: str
    machine: str
    torch: str
    python: str
    seconds: float
    tables: list[Table]

    @staticmethod
    def read(name: str) -> Stored | None:
        path = RESULTS / f"{name}.json"
        if not path.exists():
            return None
        saved = json.loads(path.read_text("utf-8"))
        return Stored(**saved | {"tables": [Table(**table) for table in saved["tables"]]})


def tables_of(text: str) -> Iterator[Table]:
    """The tables of a text, whose cells stand between bars."""
    block: list[list[str]] = []
    for line in [*text.splitlines(), ""]:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) > 2 and (not block or len(cells) == len(block[0])):
            block.append(cells)
            continue
        rows = [row for row in block if not all(set(cell) <= set("-: ") for cell in row)]
        if len(rows) < len(block):  # has a rule
            yield Table(rows[0], rows[1:])
        block = [cells] if len(cells) > 2 else []


def commit_of(script: str) -> str:
    paths = ["curvature", "optimizers", script]
    command = ["git", "log", "-1", "--format=%h", "--", *paths]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def run(name: str) -> Stored:
    """
    Raises:
        subprocess.CalledProcessError: the benchmark failed.
        ValueError: it has printed no table and stored no runs, because a package that it compares with is missing.
    """
    command = COMMANDS[name][0]
    start = time.perf_counter()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *shlex.split(command)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    if not (tables := list(tables_of(done.stdout))) and "--json" not in command:
        raise ValueError(f"{command}: no table in what it has printed:\n{done.stdout}")
    return Stored(
        command=f"python {command}",
        commit=commit_of(command.split()[0]),
        date=date.today().isoformat(),
        machine=torch.cuda.get_device_name() if name.startswith("gpu_") else f"{os.cpu_count()} x {processor()}",
        torch=torch.__version__,
        python=platform.python_version(),
        seconds=round(time.perf_counter() - start),
        tables=tables,
    )


def is_current(name: str) -> bool:
    stored, command = Stored.read(name), COMMANDS[name][0]
    return stored is not None and (stored.command, stored.commit) == (
        f"python {command}",
        commit_of(command.split()[0]),
    )


def main(args: Sequence[str] | None = None) -> None:
    options = options_of(__doc__, args, only=[str])
    if unknown := [name for name in options.only if name not in COMMANDS]:
        raise SystemExit(f"--only {unknown[0]}: expected some of {', '.join(COMMANDS)}")
    runs_here = lambda name: torch.cuda.is_available() or not name.startswith("gpu_")
    names = options.only or [name for name in COMMANDS if runs_here(name) and not is_current(name)]
    RESULTS.mkdir(exist_ok=True)
    with tqdm(total=sum(COMMANDS[name][1] for name in names), unit="min") as bar:
        for name in names:
            bar.set_description(name)
            stored = run(name)
            (RESULTS / f"{name}.json").write_text(
                json.dumps(asdict(stored), indent=1, ensure_ascii=False) + "\n", "utf-8"
            )
            bar.update(COMMANDS[name][1])


if __name__ == "__main__":
    main()
