"""Every script of examples/ runs from its first line to its last with few steps, and shows what it is there to show."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support import programs
from support.architecture import ROOT

ELSEWHERE = {"demo", "_demo_picture", "_demo_race", "laplace_backend"}  # have tests of their own
SCRIPTS = sorted({path.stem for path in (ROOT / "examples").glob("*.py")} - ELSEWHERE)
STORED = ROOT / "docs" / "results" / "examples"  # what they print with all their steps: make examples
FAST = {
    "attribution": ["--steps", "200"],
    "language_model": ["--seconds", "2"],
    "language_model_ddp": ["--steps", "20"],
    "laplace_posterior": ["--steps", "20"],
    "lightning_autoencoder": ["--epochs", "5"],
    "poisson": ["--steps", "5"],
    "private_training": ["--steps", "40"],
    "train_classifier": ["--epochs", "2"],
    "trainer": ["--epochs", "2"],
}
NEEDS = {
    "language_model": ["transformers"],
    "lightning_autoencoder": ["lightning"],
    "private_training": ["opacus"],
    "trainer": ["transformers", "accelerate"],
}


def numbers(pattern: str, text: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, text)]


def column(number: int, text: str) -> float:
    """The sum of a column of how much losses rise."""
    return sum(float(rise[number]) for rise in re.findall(r"\] +(-?[\d.]+) +(-?[\d.]+)$", text, re.MULTILINE))


def falls(pattern: str, text: str, factor: float, last: int = -1) -> bool:
    losses = numbers(pattern, text)
    return losses[last] < factor * losses[0]


accuracies = lambda text: numbers(r"accuracy ([\d.]+)%", text)
CLAIMS: dict[str, Callable[[str], bool]] = {
    "attribution": lambda text: column(0, text) > 2 * column(1, text),  # without the named digits, and random ones
    "language_model": lambda text: len(losses := numbers(r"loss ([\d.]+) nats", text)) == 4 and max(losses) < 4.3,
    "language_model_ddp": lambda text: (
        falls(r"([\d.]+) bits per character", text, 0.8) and "2 processes end in the same parameters" in text
    ),
    "laplace_posterior": lambda text: all(85 < share <= 100 for share in numbers(r"(\d+)% are within", text)),
    "lightning_autoencoder": lambda text: falls(r"test error ([\d.]+) per pixel", text, 1, -2),  # the last is PCA's
    "poisson": lambda text: falls(r"loss ([\d.e+-]+),", text, 0.7),
    "private_training": lambda text: min(rates := accuracies(text)) > 40 and rates[0] > rates[-1],  # privacy costs
    "train_classifier": lambda text: (
        "the resumed run ends in the same parameters" in text and accuracies(text)[-1] > 80
    ),
    "trainer": lambda text: accuracies(text)[-1] > 40,
}


def run_script(name: str) -> None:
    sys.argv = [str(ROOT / "examples" / f"{name}.py"), *FAST[name]]
    if "DistributedDataParallel" not in Path(sys.argv[0]).read_text("utf-8"):
        runpy.run_path(sys.argv[0], run_name="__main__")
        return
    from torch.distributed.run import main

    os.environ["PYTHONPATH"] = str(ROOT)  # of the processes that it starts
    main(["--standalone", "--nproc-per-node", "2", *sys.argv])


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_runs(name: str, tmp_path: Path) -> None:
    for library in ["sklearn", *NEEDS.get(name, [])]:
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is missing: make test installs it")
    result = programs.run(run_script, name, folder=tmp_path)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert CLAIMS[name](result.stdout), result.stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_stored_output_shows_it_too(name: str) -> None:
    assert CLAIMS[name]((STORED / f"{name}.txt").read_text("utf-8"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_short(name: str) -> None:
    assert len((ROOT / "examples" / f"{name}.py").read_text("utf-8").splitlines()) <= 80


def test_the_gallery_has_every_script() -> None:
    page = (ROOT / "docs" / "examples.md").read_text("utf-8")
    assert sorted(re.findall(r"^\[examples/(\w+)\.py\]\(\.\./examples/\1\.py\)$", page, re.MULTILINE)) == SCRIPTS
    assert sorted(re.findall(r"^<!-- results: examples/(\w+) -->$", page, re.MULTILINE)) == SCRIPTS
