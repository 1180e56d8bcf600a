"""The arrows point down, files and functions stay small, the top level stays bare, public names are documented."""

from __future__ import annotations

import importlib
import importlib.metadata
from pathlib import Path

import pytest

from support.architecture import (
    PACKAGES,
    ROOT,
    TOP_LEVEL,
    arrow_faults,
    assert_none,
    cycle_of,
    device_faults,
    hidden_changes,
    hidden_imports,
    imports_of,
    modules_of,
    name_faults,
    size_faults,
    top_level,
    undocumented,
)

pytestmark = pytest.mark.fast


def test_arrows_point_down() -> None:
    assert_none(arrow_faults(modules_of(ROOT), lambda package: importlib.import_module(package).__all__))


def test_no_cycles() -> None:
    assert_none(cycle_of(modules_of(ROOT)))


def test_no_import_is_hidden() -> None:
    assert_none(hidden_imports(modules_of(ROOT)))


@pytest.mark.parametrize(
    "line",
    ["import importlib", "from importlib import import_module", "import importlib.util as u", "__import__('os')"],
)
def test_a_hidden_import_is_seen(line: str, tmp_path: Path) -> None:
    (path := tmp_path / "base.py").write_text(f"def late():\n    {line}\n")
    assert list(hidden_imports({"curvature.operators.base": path}))


def test_changes_and_errors_are_seen() -> None:
    assert_none(hidden_changes(modules_of(ROOT).values()))


@pytest.mark.parametrize(
    "line", ["vars(self).update(state)", "x = 1  # type: ignore[override]", "try: x = 1\n    except Exception: pass"]
)
def test_a_hidden_change_is_seen(line: str, tmp_path: Path) -> None:
    (path := tmp_path / "base.py").write_text(f"def load(self, state):\n    {line}\n")
    assert list(hidden_changes([path]))


def test_files_and_functions_are_small() -> None:
    folders = ("curvature", "optimizers", "tests", "examples")
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert_none(size_faults(paths))


def test_variables_say_what_they_hold() -> None:
    assert_none(name_faults(modules_of(ROOT).values()))


@pytest.mark.parametrize("line", ["found = 1", "own: int = 1", "for own in []: pass", "f = lambda found: 0"])
def test_a_vague_name_is_seen(line: str, tmp_path: Path) -> None:
    (path := tmp_path / "base.py").write_text(f"{line}\nowner = found_again = owner.own = owner.found\n")
    assert len(list(name_faults([path]))) == 1


def test_tensors_are_made_on_a_device_that_is_named() -> None:
    assert_none(device_faults(modules_of(ROOT).values()))


def test_top_level_is_bare() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    assert_none(sorted(top_level(ROOT) - TOP_LEVEL))


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_documented(package: str) -> None:
    assert_none(undocumented(importlib.import_module(package)))


def test_version_is_that_of_the_installed_package() -> None:
    try:
        installed = importlib.metadata.version("curvature-optimizers")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("a checkout that is not installed")
    assert importlib.import_module("curvature").__version__ == installed


def test_no_test_imports_another() -> None:
    for path in (ROOT / "tests").rglob("*.py"):
        names = {part for item in imports_of("tests", path) for part in f"{item.module}.{item.name}".split(".")}
        assert not [name for name in names if name.startswith("test_")], path


@pytest.mark.parametrize("folder", ["cases", "oracles"])
def test_cases_and_oracles_import_nothing_under_test(folder: str) -> None:
    """What is expected must not come from the code that is asked."""
    for path in (ROOT / "tests/support" / folder).rglob("*.py"):
        assert not {item.module.split(".")[0] for item in imports_of("support", path)} & {*PACKAGES}, path
