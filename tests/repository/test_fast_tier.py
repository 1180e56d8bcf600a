"""`make check` has a case of every layer rule, builder, injection, solver and optimizer."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import pytest
import torch

import curvature
import optimizers
from curvature import matrices
from curvature.layers import RULES
from support.architecture import ROOT

FILES = (
    "curvature/layers/test_rules.py",
    "curvature/matrices/test_every_builder.py",
    "optimizers/test_every_optimizer.py",
)
is_optimizer = lambda thing: inspect.isclass(thing) and issubclass(thing, torch.optim.Optimizer)


@pytest.fixture(scope="module")
def collected() -> str:
    options = ["-m", "pytest", "-m", "fast", "--collect-only", "-q", "-p", "no:cacheprovider"]
    command = [sys.executable, *options, *(str(ROOT / "tests" / file) for file in FILES)]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout


def gives_an_injection(function: object) -> bool:
    return inspect.isfunction(function) and inspect.signature(function).return_annotation == "Injection"


def is_builder(function: object) -> bool:
    return inspect.isfunction(function) and "data" in inspect.signature(function).parameters


@pytest.mark.parametrize(
    ("test", "names"),
    [
        ("layers/test_rules.py::test_rule", {type(rule).__name__ for rule in RULES.values()}),
        (
            "matrices/test_every_builder.py::test_builder",
            [name for name in curvature.__all__ if name in matrices.__all__ and is_builder(getattr(curvature, name))],
        ),
        (
            "matrices/test_every_builder.py::test_injection",
            [name for name in curvature.__all__ if gives_an_injection(getattr(curvature, name))],
        ),
        (
            "optimizers/test_every_optimizer.py::test_the_loss_falls",
            [name for name in optimizers.__all__ if is_optimizer(getattr(optimizers, name))],
        ),
        (
            "optimizers/test_every_optimizer.py::test_a_step_points_to_the_minimum_of_a_linear_regression",
            {"KFAC", "EKFAC", *(f"NaturalGradient-{solver}" for solver in ("woodbury", "cg"))},
        ),
    ],
    ids=["rules", "builders", "injections", "optimizers", "solvers"],
)
def test_there_is_a_case_of_each(collected: str, test: str, names: set[str]) -> None:
    """With the device before the name."""
    is_there = lambda name: re.search(rf"{re.escape(test)}\[\w+-{re.escape(name)}\b", collected)
    assert not [name for name in sorted(names) if not is_there(name)]
