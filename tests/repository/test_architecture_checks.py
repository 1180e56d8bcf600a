"""Each check of test_architecture.py can fail: small sources with one fault each, and their innocent neighbours."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

from support.architecture import (
    Import,
    arrow_faults,
    cycle_of,
    device_faults,
    imports_of,
    modules_of,
    size_faults,
    top_level,
    undocumented,
)

pytestmark = pytest.mark.fast


def modules(root: Path, **sources: str) -> dict[str, Path]:
    """Write `curvature__layers__linear="..."` as curvature/layers/linear.py and the empty __init__ files around it."""
    for name, source in sources.items():
        path = root.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        for folder in path.relative_to(root).parents[:-1]:
            (root / folder / "__init__.py").touch()
    return modules_of(root)


def faults(found: dict[str, Path], **exported: list[str]) -> list[str]:
    return list(arrow_faults(found, lambda package: exported.get(package.replace(".", "__"), [])))


@pytest.mark.parametrize(
    ("name", "source", "fault"),
    [
        ("curvature__terms__basic", "from curvature.layers import Rule", "1) imports curvature.layers (floor 2)"),
        ("curvature__terms__basic", "def f():\n    import curvature.layers", "imports curvature.layers (floor 2)"),
        ("curvature__terms__basic", "from curvature.linalg import eigh", "1) imports curvature.linalg (floor 1)"),
        ("curvature__gradients__batch", "from ..layers.base import Rule", "which curvature.layers does not export"),
        ("curvature__gradients__batch", "from curvature.layers import hidden", "curvature.layers does not export"),
        ("curvature__gradients__batch", "import curvature.layers", "which curvature.layers does not export"),
        ("curvature__gradients__batch", "from curvature import something", "imports curvature (floor 7)"),
        ("curvature__terms__basic", "import numpy.linalg", "imports numpy"),
        ("curvature__matrices__builders", "import matplotlib", "imports matplotlib"),
        ("curvature__plots__style", "from optimizers import kfac", "imports optimizers (floor 8)"),
        ("curvature__unheard", "import torch", "add it to FLOORS in tests/support/architecture.py"),
        ("optimizers__kfac", "from curvature.layers.base import Rule", "which curvature.layers does not export"),
        ("optimizers__kfac", "import numpy", "imports numpy"),
    ],
)
def test_arrows_up_are_found(tmp_path: Path, name: str, source: str, fault: str) -> None:
    rooms = dict.fromkeys(["curvature__layers__base", "curvature__linalg__eigen", "optimizers__kfac"], "")
    found = modules(tmp_path, **{**rooms, name: source})
    (message,) = faults(found, curvature__layers=["Rule"], curvature__linalg=["eigh"])
    assert fault in message


def test_arrows_down_are_fine(tmp_path: Path) -> None:
    sources = {
        "curvature__terms__basic": "import math, torch.nn as nn\nfrom torch import Tensor",
        "curvature__layers__base": "from ..terms import Outer",
        "curvature__layers__linear": "from .base import Rule\nfrom curvature import terms",
        "curvature__matrices__builders": "from tqdm import tqdm\nfrom curvature.layers import Rule",
        "curvature__plots__style": "import matplotlib.pyplot as plt",
        "optimizers__kfac": "from curvature.layers import Rule",
    }
    found = modules(tmp_path, **sources)
    assert not faults(found, curvature__terms=["Outer"], curvature__layers=["Rule"])
    assert not cycle_of(found)


def test_cycles_are_found(tmp_path: Path) -> None:
    found = modules(tmp_path, optimizers__a="from .b import x", optimizers__b="def f():\n    from . import a")
    assert set(cycle_of(found)) == {"optimizers.a", "optimizers.b"}


def test_a_module_that_imports_its_own_package_is_a_cycle(tmp_path: Path) -> None:
    found = modules(tmp_path, optimizers__a="from . import version")
    (tmp_path / "optimizers/__init__.py").write_text("from .a import x\nversion = 1")
    assert cycle_of(found)


def test_relative_imports_are_made_absolute(tmp_path: Path) -> None:
    modules(tmp_path, p__q__r="from . import a\nfrom .b import c\nfrom ..d import e\nfrom .. import f")
    found = modules_of(tmp_path, ["p"])
    expected = [Import("p.q", "a"), Import("p.q.b", "c"), Import("p.d", "e"), Import("p", "f")]
    assert list(imports_of("p.q.r", found["p.q.r"])) == expected
    (tmp_path / "p/q/__init__.py").write_text("from .r import s\nfrom .. import t")
    assert list(imports_of("p.q", found["p.q"])) == [Import("p.q.r", "s"), Import("p", "t")]


def test_sizes_are_found(tmp_path: Path) -> None:
    path = tmp_path / "long.py"
    path.write_text("def f():\n" + "    x = 1\n" * 59)
    assert not list(size_faults([path]))
    path.write_text("class A:\n    async def f(self):\n" + "        x = 1\n" * 60)
    assert list(size_faults([path])) == ["long.py:2 f has 61 lines, more than 60"]
    path.write_text("\n" * 601)
    assert list(size_faults([path])) == ["long.py has 601 lines, more than 600"]


def test_tensors_without_a_device_are_found(tmp_path: Path) -> None:
    path = tmp_path / "made.py"
    path.write_text("torch.eye(3, device=x.device), torch.ones(2, **like), x.new_zeros(1), torch.ones_like(x)")
    assert not list(device_faults([path]))
    path.write_text("x = 1\ny = torch.randn(\n    3, generator=g)")
    assert list(device_faults([path])) == ["made.py:2 torch.randn without a device is wherever the user's default is"]


def test_top_level_lists_what_git_would_add(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "stray").mkdir()
    (tmp_path / "stray/file").touch()
    (tmp_path / "ignored").touch()
    (tmp_path / ".gitignore").write_text("ignored\n")
    assert top_level(tmp_path) == {".gitignore", "stray"}


def test_missing_docstrings_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "from dataclasses import dataclass\n__all__ = ['a', 'b', 'C', 'D', 'E']\n"
        "def a(): 'says'\ndef b(): pass\nclass C: 'says'\nclass D(C): pass\n@dataclass\nclass E:\n    x: int\n"
    )
    package = types.ModuleType("package")
    monkeypatch.setitem(sys.modules, "package", package)
    exec(source, package.__dict__)
    assert undocumented(package) == ["b", "D", "E"]
