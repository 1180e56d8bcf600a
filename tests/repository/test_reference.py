"""Every public name has one place in docs/reference, and the index of the reference names it."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from pathlib import Path

import pytest

from support.architecture import ROOT

REFERENCE = ROOT / "docs" / "reference"
PAGES = sorted(path for path in REFERENCE.glob("*.md") if path.name != "index.md")
PUBLIC = ("curvature", "optimizers", "curvature.plots", "curvature.estimators")
entries = lambda text: re.findall(r"^::: (\S+)", text, re.MULTILINE)


def named(path: str) -> object:
    package, _, name = path.rpartition(".")
    return getattr(importlib.import_module(package), name)


def test_every_public_name_has_one_place() -> None:
    places = Counter(id(named(path)) for page in PAGES for path in entries(page.read_text("utf-8")))
    names = [f"{package}.{name}" for package in PUBLIC for name in importlib.import_module(package).__all__]
    assert {path: places[id(named(path))] for path in names if places[id(named(path))] != 1} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_index_has_the_names_of_each_page(page: Path) -> None:
    paths = entries(page.read_text("utf-8"))
    links = ", ".join(f"[`{path.removeprefix('curvature.')}`]({page.name}#{path})" for path in paths)
    title = page.read_text("utf-8").splitlines()[0].removeprefix("# ")
    assert f"| [{title}]({page.name}) | {links} |" in (REFERENCE / "index.md").read_text("utf-8").splitlines()
