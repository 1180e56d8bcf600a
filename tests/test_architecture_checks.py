"""Each check of test_architecture.py can fail: small sources with one fault each, and their innocent neighbours."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest
from test_architecture import (
    Import,
    curvature_faults,
    cycle_of,
    imports_of,
    modules_of,
    optimizer_faults,
    size_faults,
    top_level,
    undocumented,
)


def modules(root: Path, **sources: str) -> dict[str, Path]:
    """Write `curvature__layers__linear="..."` as curvature/layers/linear.py and the empty __init__ files around it."""
    for name, source in sources.items():
        path = root.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        for folder in path.relative_to(root).parents[:-1]:
            (root / folder / "__init__.py").touch()
    return modules_of(root)


@pytest.mark.parametrize(
    ("name", "source", "fault"),
    [
        ("curvature__losses", "from .layers import linear", "(level 0) imports curvature.layers"),
        (
            "curvature__losses",
            "def f():\n    import curvature.layers.linear",
            "(level 0) imports curvature.layers.linear",
        ),
        ("curvature__losses", "from . import linalg", "(level 0) imports curvature.linalg (level 0)"),
        ("curvature__layers__linear", "from ..capture import capture", "(level 1) imports curvature.capture"),
        ("curvature__capture", "from . import something", "imports curvature (level 11)"),
        ("curvature__losses", "import numpy.linalg", "imports numpy"),
        ("curvature__matrices", "import matplotlib", "imports matplotlib"),
        ("curvature__plots", "from optimizers import kfac", "knows nothing of the optimizers"),
        ("curvature__unheard", "import torch", "add it to LEVELS in tests/test_architecture.py"),
    ],
)
def test_arrows_up_are_found(tmp_path: Path, name: str, source: str, fault: str) -> None:
    empty = dict.fromkeys(
        ["curvature__linalg", "curvature__capture", "curvature__layers__linear", "optimizers__kfac"], ""
    )
    (found,) = curvature_faults(modules(tmp_path, **{**empty, name: source}))
    assert fault in found


def test_arrows_down_are_fine(tmp_path: Path) -> None:
    sources = {
        "curvature__losses": "import math, torch.nn as nn\nfrom torch import Tensor",
        "curvature__layers__base": "from .. import losses",
        "curvature__layers__linear": "from .base import Rule\nfrom ..losses import reduction",
        "curvature__gradients": "from . import layers\nfrom tqdm import tqdm\nimport curvature.layers.linear",
        "curvature__plots": "import matplotlib.pyplot as plt",
        "optimizers__kfac": "",
    }
    found = modules(tmp_path, **sources)
    (tmp_path / "curvature/__init__.py").write_text("from .plots import show\nfrom . import gradients")
    assert not list(curvature_faults(found))
    assert not cycle_of(found)


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("from curvature import hidden", "hidden"),
        ("from curvature.matrices import kfac", "curvature.matrices"),
        ("import curvature.matrices", "curvature.matrices"),
        ("import curvature\ncurvature.hidden()", "curvature.hidden"),
        ("import curvature as c\nc.hidden", "curvature.hidden"),
        ("import numpy", "numpy"),
    ],
)
def test_private_names_are_found(tmp_path: Path, source: str, fault: str) -> None:
    (found,) = optimizer_faults(modules(tmp_path, optimizers__kfac=source), ["kfac"])
    assert fault in found


def test_public_names_are_fine(tmp_path: Path) -> None:
    source = "import curvature, math, torch\nfrom curvature import kfac\nfrom .updates import f\ncurvature.kfac()"
    assert not list(optimizer_faults(modules(tmp_path, optimizers__kfac=source), ["kfac"]))


def test_cycles_are_found(tmp_path: Path) -> None:
    late = "def f():\n    from . import a"
    assert set(cycle_of(modules(tmp_path, optimizers__a="from .b import x", optimizers__b=late))) == {
        "optimizers.a",
        "optimizers.b",
    }


def test_a_module_that_imports_its_own_package_is_a_cycle(tmp_path: Path) -> None:
    found = modules(tmp_path, optimizers__a="from . import version")
    (tmp_path / "optimizers/__init__.py").write_text("from .a import x\nversion = 1")
    assert cycle_of(found)


def test_relative_imports_are_made_absolute(tmp_path: Path) -> None:
    modules(tmp_path, p__q__r="from . import a\nfrom .b import c\nfrom ..d import e\nfrom .. import f")
    found = modules_of(tmp_path, ["p"])
    assert list(imports_of("p.q.r", found["p.q.r"])) == [
        Import("p.q", "a"),
        Import("p.q.b", "c"),
        Import("p.d", "e"),
        Import("p", "f"),
    ]
    (tmp_path / "p/q/__init__.py").write_text("from .r import s\nfrom .. import t")
    assert list(imports_of("p.q", found["p.q"])) == [Import("p.q.r", "s"), Import("p", "t")]


def test_sizes_are_found(tmp_path: Path) -> None:
    path = tmp_path / "long.py"
    path.write_text("def f():\n" + "    x = 1\n" * 59)
    assert not list(size_faults([path]))
    path.write_text("class A:\n    async def f(self):\n" + "        x = 1\n" * 60)
    assert list(size_faults([path])) == ["long.py:2 f has 61 lines, more than 60"]
    path.write_text("\n" * 401)
    assert list(size_faults([path])) == ["long.py has 401 lines, more than 400"]


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
