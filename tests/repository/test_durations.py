"""How long the tests of each folder take."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from support.architecture import ROOT
from support.durations import Durations


def test_sums_by_folder(tmp_path: Path) -> None:
    """A case has three phases; the longest folder comes first; other runs are beside this one."""
    path = tmp_path / "tests.json"
    path.write_text('{"sim": 1}')
    plugin = Durations(path, "cpu")
    for nodeid, duration in [
        ("tests/curvature/losses/deep/test_x.py::test_one[a/b::c]", 0.5),
        ("tests/curvature/losses/deep/test_x.py::test_one[a/b::c]", 1.0),
        ("tests/curvature/losses/test_y.py::test_two", 2.0),
        ("tests/optimizers/test_private.py::test_three", 4.0),
        ("tests/test_all.py::test_all", 0.0),
    ]:
        plugin.pytest_runtest_logreport(SimpleNamespace(nodeid=nodeid, duration=duration))
    plugin.pytest_terminal_summary()
    stored = json.loads(path.read_text())
    assert stored["sim"] == 1 and stored["cpu"]["cases"] == 4
    assert list(stored["cpu"]["folders"].items()) == [
        ("optimizers", {"cases": 1, "seconds": 4.0}),
        ("curvature/losses", {"cases": 2, "seconds": 3.5}),
        ("tests", {"cases": 1, "seconds": 0.0}),
    ]


def test_a_run_writes_them(tmp_path: Path) -> None:
    """Once, with two processes, too."""
    case = "tests/repository/test_durations.py::test_sums_by_folder"
    environment = os.environ | {"DURATIONS": str(tmp_path / "tests.json"), "PYTHONPATH": "tests", "DEVICE": "cpu"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", case]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    assert json.loads((tmp_path / "tests.json").read_text())["cpu"]["cases"] == 1
