"""Benchmarks measure models that others hand in."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
MINE = """
from torch import nn, rand

def net():
    return nn.Sequential(nn.Linear(3, 2)), (rand(5, 3), rand(5, 2)), nn.MSELoss()

def other():
    return nn.Linear(3, 2), rand(5, 3)
"""


def test_models_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_handed_in.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    handed_in, script = (importlib.import_module(name) for name in ("_networks", "per_sample"))
    workload = handed_in.handed_in("mine_handed_in:net", "cpu")
    monkeypatch.setitem(script.QUANTITIES, "norms", {"curvature": script.NORMS["curvature"]})
    reference = script.one_by_one(workload.model, workload.loss, workload.x, workload.y)
    row = script.row("norms", workload, reference)
    assert set(row.methods) == {"plain", "curvature"} and row.labels[0] == "mine_handed_in:net"
    with pytest.raises(ValueError, match=r"--model mine_handed_in:other: expected \(model, \(x, y\), loss\)"):
        handed_in.handed_in("mine_handed_in:other", "cpu")
