"""The public names: found where they are promised, and imported when one is first used."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.architecture import ROOT

IMPORTED = """
import sys, torch
before = set(sys.modules)
import curvature, optimizers
assert {"curvature", "optimizers"} <= (loaded := set(sys.modules) - before), loaded
print(*sorted(loaded))
"""


def test_an_import_costs_nothing():
    """Besides `torch` only the mechanism itself is loaded; all of it takes a fifth of a second when first used."""
    command = [sys.executable, "-c", IMPORTED]
    loaded = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert loaded == ["curvature", "curvature.lazy", "optimizers"]


@pytest.mark.parametrize("package", ["curvature", "optimizers"])
def test_names_are_found_listed_and_nothing_else_is(package: str):
    module = importlib.import_module(package)
    public = importlib.import_module(f"{package}.public")
    assert module.__all__ == public.__all__ and {*public.__all__, "__doc__"} <= {*dir(module)}
    assert all(getattr(module, name) is getattr(public, name) for name in module.__all__)
    names: dict[str, object] = {}
    exec(f"from {package} import *", names)
    assert names.keys() - {"__builtins__"} == {*public.__all__}
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


HIDDEN = """
import sys
sys.path[:0] = ["", sys.argv[1]]
import torch
from curvature.optimizers import EKFAC, KFAC, NaturalGradient
import curvature.optimizers
import optimizers
assert optimizers.MINE and not hasattr(optimizers, "KFAC") and not hasattr(curvature.optimizers, "MINE")
assert [name for name in sys.modules if name.startswith("optimizers")] == ["optimizers"]
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
for kind in (KFAC, EKFAC, NaturalGradient):
    opt = kind(model)
    for _ in range(3):
        opt.zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        opt.step()
    kind(model).load_state_dict(opt.state_dict())
    assert opt.report() and opt.summary()
print("trained")
"""


def test_optimizers_have_a_name_in_curvature():
    import curvature.optimizers
    import optimizers

    assert curvature.optimizers.__all__ == optimizers.__all__
    assert all(getattr(curvature.optimizers, name) is getattr(optimizers, name) for name in optimizers.__all__)
    assert curvature.optimizers.__version__ == optimizers.__version__ and "KFAC" in dir(curvature.optimizers)
    with pytest.raises(AttributeError, match=r"module 'curvature.optimizers' has no attribute 'KFACC'"):
        _ = curvature.optimizers.KFACC
    with pytest.raises(ModuleNotFoundError):  # of which there would be a second class of the same name
        importlib.import_module("curvature.optimizers.kfac")


@pytest.mark.parametrize("path", ["optimizers.py", "optimizers/__init__.py"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_file_or_folder_of_that_name_hides_nothing_there(path: str, is_first: bool, tmp_path: Path):
    """Neither before nor after the other module has been imported; it stays what `import optimizers` gives."""
    other = tmp_path / path
    other.parent.mkdir(exist_ok=True)
    other.write_text("MINE = True\n")
    code = ("import sys; sys.path.insert(0, sys.argv[1]); import optimizers\n" if is_first else "") + HIDDEN
    command = [sys.executable, "-c", code, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert done.stdout == "trained\n", done.stderr
