"""Where peers are silently wrong: what is stored is what they do, and ours is right, or refuses, in every row."""

from __future__ import annotations

import importlib
import json
from importlib import metadata
from types import ModuleType
from typing import Any

import pytest

from support.architecture import ROOT

STORED = json.loads((ROOT / "docs" / "results" / "silently_wrong.runs.json").read_text("utf-8"))
MODULES = {"backpack-for-pytorch": "backpack", "curvlinops-for-pytorch": "curvlinops", "laplace-torch": "laplace"}
MODULES |= {name: name for name in ("opacus", "nngeometry", "singd", "torch")}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "benchmarks"))
    return importlib.import_module("silently_wrong")


def outcome(script: ModuleType, call: str, case: str) -> dict[str, Any]:
    (found,) = (one for one in script.CALLS if one.name == call)
    with script.settings():
        return script.attempt(found, script.CASES[case])


@pytest.mark.parametrize("peer", MODULES)
def test_a_peer_does_what_is_stored_and_ours_is_right(script: ModuleType, peer: str) -> None:
    pytest.importorskip(MODULES[peer], reason="a peer of the bench extra is missing: make test installs it")
    is_the_same = metadata.version(peer).partition("+")[0] == STORED["versions"][peer].partition("+")[0]
    rows = [row for row in STORED["results"] if row["peer"] == peer and row["outcome"] == "wrong"]
    for row in rows:
        found = outcome(script, row["call"], row["case"])
        assert found["ours"] is None or found["ours"] < script.TOLERANCE, row
        if is_the_same:
            assert (found["outcome"], found["finding"]) == ("wrong", row["finding"]), row


SIDE_BY_SIDE = "sum of losses", "several outputs", "uneven batches", "label smoothing", "strided and dilated"


@pytest.mark.parametrize("peer", MODULES)
def test_every_call_is_right_somewhere(script: ModuleType, peer: str) -> None:
    """So that a difference is that of the case: peer, ours and the definition agree on a plain one, and on others."""
    pytest.importorskip(MODULES[peer], reason="a peer of the bench extra is missing: make test installs it")
    right = {(row["call"], row["case"]) for row in STORED["results"] if row["outcome"] == "right"}
    for call in script.CALLS:
        if call.peer == peer:
            is_laplacian = "Laplacian" in call.name or "by the inputs" in call.name
            plain = "physics informed network" if is_laplacian else "plain"
            for case in (plain, *(case for case in SIDE_BY_SIDE if (call.name, case) in right)):
                found = outcome(script, call.name, case)
                assert found["outcome"] == "right" and found["ours"] < script.TOLERANCE, (call.name, case)


def test_ours_was_right_or_refused_in_every_case_that_is_stored(script: ModuleType) -> None:
    assert all(
        row["ours_refused"] if row["ours"] is None else row["ours"] < script.TOLERANCE for row in STORED["results"]
    )
    assert {row["peer"] for row in STORED["results"]} == script.PEERS.keys() == MODULES.keys()
    assert {row["call"] for row in STORED["results"]} == {call.name for call in script.CALLS}


def test_notes_are_of_rows_that_are_there(script: ModuleType) -> None:
    assert script.NOTES.keys() <= {(row["call"], row["case"]) for row in STORED["results"] if row["outcome"] == "wrong"}
