"""The peers' own tests over this package, where they are at hand: each suite in a process, with a plugin as adapter.

They take minutes, so PEERS asks for them: it names the folder with unpacked sdists. Opacus has its tests in its wheel.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Suite:
    """A part of a peer's tests.

    Attributes:
        plugin: the adapter, a module beside this file.
        needs: packages that the tests import.
        folder: where they are: a package, or a pattern of a folder in PEERS.
        options: of pytest.
        theirs: beginnings of names of tests that fail for reasons of the peer's.
    """

    plugin: str
    needs: tuple[str, ...]
    folder: str
    options: tuple[str, ...]
    theirs: tuple[str, ...] = ()


EXTENSIONS = "test/extensions/"
SUITES = {
    "opacus": Suite("opacus_plugin", ("opacus", "hypothesis"), "opacus", ("tests/grad_samples",)),
    "backpack": Suite(
        "backpack_plugin",
        ("backpack", "unfoldNd", "einops"),
        "backpack_for_pytorch-*",
        (
            *(f"{EXTENSIONS}firstorder", f"{EXTENSIONS}secondorder/diag_ggn", f"{EXTENSIONS}secondorder/diag_hessian"),
            *("-k", "not montecarlo and not mc and not ResNet2"),  # its reference takes minutes for ResNet2
        ),
    ),
    "curvlinops": Suite(
        "curvlinops_plugin", ("curvlinops", "einops"), "curvlinops_for_pytorch-*", ("test/test_ggn.py", "-k", "not cnn")
    ),
}


def folder_of(suite: Suite) -> Path:
    """Skips where something is missing, and says what."""
    if "PEERS" not in os.environ:
        pytest.skip("PEERS is not set: it names the folder with the unpacked sdists of the peers")
    for name in suite.needs:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"the peer's tests need {name}, which is not installed")
    if "*" not in suite.folder:
        package = importlib.util.find_spec(suite.folder)
        assert package is not None and package.origin is not None
        return Path(package.origin).parent
    found = [path for path in Path(os.environ["PEERS"]).glob(suite.folder) if path.is_dir()]
    if not found:
        pytest.skip(f"no {suite.folder} in PEERS={os.environ['PEERS']}")
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", SUITES)
def test_suite(name: str):
    """All tests pass but those whose failures are the peer's; the summary has their numbers."""
    suite = SUITES[name]
    folder = folder_of(suite)
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "-p", f"peers.{suite.plugin}", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, *suite.options], cwd=folder, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    failed = re.findall(r"^FAILED (\S+)", run.stdout, re.MULTILINE)
    print(name, run.stdout.rstrip().rsplit("\n", 1)[-1])
    assert run.returncode in (0, 1), run.stdout[-2000:] + run.stderr[-2000:]
    ours = [test for test in failed if not test.startswith(suite.theirs or ("nothing",))]
    assert not ours, run.stdout[-4000:]
