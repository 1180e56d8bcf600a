"""Every public name has one place in docs/reference, and the index of the reference names it."""

from __future__ import annotations

import importlib
import inspect
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


def documented(doc: str) -> list[str]:
    """What the section `Args` has an entry for."""
    section = re.search(r"^Args:\n(.*?)(?:\n\n\S|\Z)", inspect.cleandoc(doc), re.DOTALL | re.MULTILINE)
    return re.findall(r"^    (\S[^:\n]*):", section[1], re.MULTILINE) if section else []


@pytest.mark.parametrize("package", PUBLIC)
def test_each_argument_that_is_documented_has_its_name(package: str) -> None:
    """One entry for each: the site takes names from there."""
    wrong = []
    for name in importlib.import_module(package).__all__:
        thing = named(f"{package}.{name}")
        members = [f for f in vars(thing).values() if inspect.isfunction(f)] if inspect.isclass(thing) else []
        for one in [thing, *members] if callable(thing) else []:
            parameters = inspect.signature(one).parameters if inspect.getdoc(one) else {}
            wrong += [f"{name}: {entry}" for entry in documented(one.__doc__ or "") if entry not in parameters]
    assert not wrong
