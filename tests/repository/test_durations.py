"""How long the tests of each folder take."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.architecture import ROOT
from support.durations import folder_of, sum_by_folder


@pytest.mark.parametrize(
    ("nodeid", "folder"),
    [
        ("tests/curvature/losses/test_table.py::test_rows[a/b::c]", "curvature/losses"),
        ("tests/integration/devices/deep/test_x.py::test_y", "integration/devices"),
        ("tests/optimizers/test_private.py::test_noise", "optimizers"),
        ("tests/test_all.py::test_all", "tests"),
    ],
)
def test_folders(nodeid: str, folder: str) -> None:
    assert folder_of(nodeid) == folder


def test_sums() -> None:
    """A case has three phases; the longest folder comes first."""
    one, two = "tests/a/b/test_x.py::test_one", "tests/a/b/test_x.py::test_two"
    phases = [(one, 0.5), (one, 1.0), (two, 2.0), ("tests/c/test_y.py::test_three", 4.0)]
    assert sum_by_folder(phases) == {"c": {"cases": 1, "seconds": 4.0}, "a/b": {"cases": 2, "seconds": 3.5}}


def test_a_run_writes_them(tmp_path: Path) -> None:
    """Beside what other runs have written; with two processes, too."""
    path = tmp_path / "tests.json"
    path.write_text('{"sim": 1}')
    environment = os.environ | {"DURATIONS": str(path), "PYTHONPATH": "tests", "DEVICE": "cpu"}
    case = "tests/repository/test_durations.py::test_sums"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", case]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    stored = json.loads(path.read_text())
    assert stored["sim"] == 1 and stored["cpu"]["cases"] == 1 and list(stored["cpu"]["folders"]) == ["repository"]
    assert 0 <= stored["cpu"]["folders"]["repository"]["seconds"] < stored["cpu"]["wall_seconds"]
