"""docs/coming_from.md: the calls of other libraries beside ours, and the numbers that its blocks compare."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from support.architecture import ROOT
from support.cases.case import seeded
from support.documents import run_here, sections, text_of

PAGE = "coming_from.md"
PEERS = {
    "BackPACK": "backpack",
    "Opacus": "opacus",
    "curvlinops": "curvlinops",
    "nngeometry": "nngeometry",
    "laplace-torch": "laplace",
}


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of random numbers and precision, which blocks change, and the path to the examples."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    before = torch.get_default_dtype()
    with seeded(0):
        yield
    torch.set_default_dtype(before)


@pytest.mark.filterwarnings("ignore")  # what peers and torch say about hooks
@pytest.mark.parametrize("title", PEERS)
def test_a_section_runs(title: str):
    pytest.importorskip(PEERS[title], reason="a peer of the bench extra is missing: make test installs it")
    run_here(PAGE, sections(text_of(PAGE))[title])


def test_every_section_with_blocks_is_run():
    assert sections(text_of(PAGE)).keys() == PEERS.keys()


def test_a_section_keeps_its_lines_and_what_stands_above_all():
    found = sections("above\n\n## One\n```python\n1\n```\n## Two\ntext\n## Three\n```python\n3\n```\n")
    assert found.keys() == {"One", "Three"}
    assert found["Three"].splitlines() == ["above", *[""] * 7, "## Three", "```python", "3", "```"]
