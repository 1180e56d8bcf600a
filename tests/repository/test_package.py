"""The sdist and the wheel: they build, hold what they should, and the wheel works without the checkout."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

from support.architecture import ROOT, modules_of
from support.versions import build

EACH_FIRST = """
import importlib, sys
for package in sys.argv[1:]:
    for name in [name for name in sys.modules if name.partition(".")[0] in ("curvature", "optimizers")]:
        del sys.modules[name]
    importlib.import_module(package)
"""
RUN = "import runpy, sys; sys.path.insert(0, sys.argv[1]); runpy.run_path(sys.argv[2], run_name='__main__')"


def test_the_wheel_of_the_sdist_works(tmp_path: Path) -> None:
    wheel = build(tmp_path / "dist", "--no-isolation")  # which setuptools is `make package`'s to ask
    (sdist,) = (tmp_path / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        parts = {Path(name).parts[1] for name in archive.getnames() if len(Path(name).parts) > 1}
    assert {"LICENSE", "README.md", "pyproject.toml", "curvature", "optimizers"} <= parts
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    sources = {str(path.relative_to(ROOT)) for path in modules_of(ROOT).values()}
    assert held == sources | {"curvature/py.typed", "optimizers/py.typed"}
    smoke = [sys.executable, "-I", "-c", RUN, tmp_path / "installed", ROOT / "tests/support/smoke.py"]
    printed = subprocess.run(smoke, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.split()
    assert printed[2:] == [str(tmp_path / "installed" / package) for package in ("curvature", "optimizers")]


def test_each_package_may_be_the_first_that_is_imported() -> None:
    packages = [name for name, path in modules_of(ROOT).items() if path.name == "__init__.py"]
    assert {"curvature.linalg", "optimizers.steps"} <= set(packages)
    subprocess.run([sys.executable, "-c", EACH_FIRST, *packages], cwd=ROOT, check=True)
