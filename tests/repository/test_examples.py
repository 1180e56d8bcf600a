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

ELSEWHERE = {"demo", "demo_picture", "demo_race", "laplace_backend"}  # have tests of their own
SCRIPTS = sorted({path.stem for path in (ROOT / "examples").glob("*.py")} - ELSEWHERE)
STORED = ROOT / "docs" / "results" / "examples"  # what they print with all their steps: make examples
FAST = {
    "attribution": ["--steps", "200"],
    "language_model_ddp": ["--steps", "20"],
    "laplace_posterior": ["--steps", "20"],
    "lightning_autoencoder": ["--epochs", "5"],
    "poisson": ["--steps", "5"],
    "private_training": ["--steps", "40"],
    "train_classifier": ["--epochs", "2"],
    "trainer": ["--epochs", "1"],
}
NEEDS = {
    "lightning_autoencoder": ["lightning"],
    "private_training": ["opacus"],
    "trainer": ["transformers", "accelerate"],
}


def numbers(pattern: str, text: str) -> list[float]:
    return [float(number) for number in re.findall(pattern, text)]


def leaving_out_the_named_digits_costs_more(text: str) -> bool:
    rises = re.findall(r"\] +(-?[\d.]+) +(-?[\d.]+)$", text, re.MULTILINE)
    return sum(float(named) for named, _ in rises) > 2 * sum(float(random) for _, random in rises)


def fewer_bits(text: str) -> bool:
    bits = numbers(r"([\d.]+) bits per character", text)
    return bits[-1] < 0.8 * bits[0] and "2 processes end in the same parameters" in text


def error_bars_hold_most(text: str) -> bool:
    return all(85 < share <= 100 for share in numbers(r"(\d+)% are within", text))


def the_test_error_falls(text: str) -> bool:
    errors = numbers(r"test error ([\d.]+) per pixel", text)
    return errors[-2] < errors[0]  # the last is that of PCA


def the_loss_falls(text: str) -> bool:
    losses = numbers(r"loss ([\d.e+-]+),", text)
    return losses[-1] < 0.7 * losses[0]


def privacy_costs(text: str) -> bool:
    accuracies = numbers(r"accuracy ([\d.]+)%", text)
    return min(accuracies) > 40 and accuracies[0] > accuracies[-1]


def the_resumed_run_is_equal(text: str) -> bool:
    return "the resumed run ends in the same parameters" in text and numbers(r"accuracy ([\d.]+)%", text)[-1] > 80


def most_digits_are_right(text: str) -> bool:
    return numbers(r"accuracy ([\d.]+)%", text)[-1] > 40


CLAIMS: dict[str, Callable[[str], bool]] = {
    "attribution": leaving_out_the_named_digits_costs_more,
    "language_model_ddp": fewer_bits,
    "laplace_posterior": error_bars_hold_most,
    "lightning_autoencoder": the_test_error_falls,
    "poisson": the_loss_falls,
    "private_training": privacy_costs,
    "train_classifier": the_resumed_run_is_equal,
    "trainer": most_digits_are_right,
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
