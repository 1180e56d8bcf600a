"""Does a test fail where one line of code is wrong? Formulas broken one at a time, in a copy of the repository.

    python tests/support/run_mutants.py [--only PATTERN] [-n COPIES] [--first]

A mutant is killed by the tests of the files named with it or, where these pass, by more of the suite; it survives if
all pass. Exits with 1 if any does.
"""

from __future__ import annotations

import argparse
import fnmatch
import multiprocessing
import os
import queue
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

from mutants import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[2]
MORE = ["curvature", "optimizers", "integration"]  # folders of tests, where those named pass
SECONDS = 900.0  # after which a mutant that still runs counts as killed: it never ends


def applied(mutant: Mutant, root: Path) -> str:
    """Break the line; returns the file as it was."""
    path = root / mutant.file
    text = path.read_text("utf-8")
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file} has {text.count(mutant.old)} times: {mutant.old}")
    path.write_text(text.replace(mutant.old, mutant.new), "utf-8")
    return text


def copied(folder: str) -> Path:
    names = ("Makefile", "README.md", "pyproject.toml", "curvature", "docs", "examples", "optimizers", "tests")
    for name in names:
        source, target = ROOT / name, Path(folder) / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    return Path(folder)


def child(root: Path, tests: list[str]) -> None:
    """pytest in a process forked from one that has imported torch."""
    import pytest

    log = os.open(root / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1), os.dup2(log, 2)
    os.chdir(root)
    sys.path[:] = [entry for entry in sys.path if entry and Path(entry).resolve() != ROOT]
    sys.dont_write_bytecode = True
    options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line"]
    os._exit(pytest.main([*options, *(f"tests/{test}" for test in tests)]))


def fails(root: Path, tests: list[str]) -> str | None:
    """The test that failed, or None."""
    process = multiprocessing.get_context("fork").Process(target=child, args=(root, tests))
    process.start()
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
        return f"no end in {SECONDS:.0f} s"
    if not process.exitcode:
        return None
    lines = (root / "log").read_text("utf-8", "replace").splitlines()
    return next((line for line in lines if line.startswith(("FAILED", "ERROR"))), f"exit status {process.exitcode}")


def run(mutant: Mutant, root: Path, first_only: bool) -> tuple[str | None, float]:
    before, start = applied(mutant, root), time.perf_counter()
    try:
        killer = fails(root, list(mutant.tests))
        if killer is None and not first_only:
            killer = fails(root, MORE)
    finally:
        (root / mutant.file).write_text(before, "utf-8")
    return killer, time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="*", help="of the file or the formula, for example '*layers*'")
    parser.add_argument("-n", type=int, default=2, help="copies of the repository that are run beside each other")
    parser.add_argument("--first", action="store_true", help="only the tests named with a mutant")
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    import torch  # noqa: F401 (once, for all processes forked from this one)

    chosen = [mutant for mutant in MUTANTS if fnmatch.fnmatch(str(mutant), f"*{arguments.only}*")]
    todo: queue.SimpleQueue[Mutant | None] = queue.SimpleQueue()
    for mutant in [*chosen, *[None] * arguments.n]:
        todo.put(mutant)
    survivors = []

    def work() -> None:
        with tempfile.TemporaryDirectory() as folder:
            root = copied(folder)
            while (mutant := todo.get()) is not None:
                killer, seconds = run(mutant, root, arguments.first)
                print(
                    f"{'survived' if killer is None else 'killed'} {seconds:5.1f} s  {mutant}\n    {killer}", flush=True
                )
                if killer is None:
                    survivors.append(mutant)

    threads = [threading.Thread(target=work) for _ in range(arguments.n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} killed", *survivors, sep="\n  survived: ")
    return bool(survivors)


if __name__ == "__main__":
    raise SystemExit(main())
