"""Every notebook of examples/ runs from its first cell to its last, with less time and fewer repetitions."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from support import programs
from support.architecture import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
SHORTER = [
    (r"^SECONDS = \d+", "SECONDS = 1"),
    (r"runs = 3 if count == 100 else 7$", "runs = 1"),  # of which a time is the median
    (r"^WAYS = .*Adam.*$", 'WAYS = {"reconfiguration": 0.5, "Adam 0.03": 0.03}'),  # of four
    (r"STEPS, EPSILON, LONGEST = 1000, 150,", "STEPS, EPSILON, LONGEST = 1000, 80,"),  # of Monte Carlo
    (r"range\(6\)$", "range(4)"),  # seeds of random diagonals
    (r"for k, n in \(\(1, 10\), \(30, 3\)\)$", "for k, n in ((1, 3), (30, 1))"),  # draws of an epoch
    (r"^left_out = (.*)\[:20\]$", r"left_out = \1[:4]"),  # digits without which the model is fitted again
    (r"^loss, SEEDS = (.*) range\(3\)$", r"loss, SEEDS = \1 range(1)"),  # networks that are pruned
]
MAGIC = (r"^%matplotlib inline$", "")


def cells_of(path: Path) -> list[tuple[str, str]]:
    """Names and sources of the cells with code."""
    cells = []
    for number, cell in enumerate(json.loads(path.read_text("utf-8"))["cells"]):
        source = "".join(cell["source"])
        for pattern, text in (*SHORTER, MAGIC):
            source = re.sub(pattern, text, source, flags=re.MULTILINE)
        if cell["cell_type"] == "code":
            cells.append((f"{path.name}, cell {number}", source))
    return cells


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_runs(path: Path, tmp_path: Path) -> None:
    result = programs.run(programs.run_cells, cells_of(path), folder=tmp_path)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]


def test_what_is_shorter_is_there() -> None:
    sources = ["".join(cell["source"]) for path in NOTEBOOKS for cell in json.loads(path.read_text("utf-8"))["cells"]]
    for pattern, _ in (*SHORTER, MAGIC):
        assert any(re.search(pattern, source, re.MULTILINE) for source in sources), pattern


def test_a_notebook_that_fails_is_seen(tmp_path: Path) -> None:
    result = programs.run(programs.run_cells, [("cell 0", "x = 1"), ("cell 1", "\nassert x == 2")], folder=tmp_path)
    assert result.returncode == 1 and 'cell 1", line 2' in result.stderr


def test_the_gallery_has_every_notebook() -> None:
    shown = re.findall(
        r"/examples/(\w+)\.ipynb\)$", (ROOT / "docs" / "notebooks" / "index.md").read_text("utf-8"), re.MULTILINE
    )
    assert sorted(shown) == [path.stem for path in NOTEBOOKS]
