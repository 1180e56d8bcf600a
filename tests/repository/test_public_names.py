"""The public names: found where they are promised, and imported when one is first used."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import pytest

from support.architecture import ROOT

IMPORTED = """
import sys, torch
before = set(sys.modules)
import curvature, optimizers
assert {"curvature", "optimizers"} <= (found := set(sys.modules) - before), found
print(*sorted(found))
"""


def test_an_import_costs_nothing():
    """Besides `torch` only the mechanism itself is loaded; all of it takes a fifth of a second when first used."""
    command = [sys.executable, "-c", IMPORTED]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert found == ["curvature", "curvature.lazy", "optimizers"]


@pytest.mark.parametrize("package", ["curvature", "optimizers"])
def test_names_are_found_listed_and_nothing_else_is(package: str):
    module = importlib.import_module(package)
    public = importlib.import_module(f"{package}.public")
    assert module.__all__ == public.__all__ and {*public.__all__, "__doc__"} <= {*dir(module)}
    assert all(getattr(module, name) is getattr(public, name) for name in module.__all__)
    found: dict[str, object] = {}
    exec(f"from {package} import *", found)
    assert found.keys() - {"__builtins__"} == {*public.__all__}
    for name in ("no_such_name", "__wrapped__"):
        with pytest.raises(AttributeError, match=f"module '{package}' has no attribute '{name}'"):
            getattr(module, name)
    with pytest.raises(ImportError, match="cannot import name 'KFACC'"):
        exec(f"from {package} import KFACC")


def test_both_packages_have_the_version_of_the_distribution_and_the_changelog() -> None:
    import curvature
    import optimizers

    assert optimizers.__version__ is curvature.__version__
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    assert newest and newest[1] == curvature.__version__


def test_optimizers_load_no_more_of_curvature_than_they_need():
    code = "import sys; from optimizers import KFAC; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    loaded = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert not {"curvature.public", "curvature.matrices", "curvature.uses", "curvature.forward_laplacian"} & {*loaded}


def test_subpackages_need_no_import_of_their_own():
    code = "import curvature; curvature.plots.matrix, curvature.operators.Operator"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
