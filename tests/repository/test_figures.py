"""Pages show what benchmarks have stored, and nothing else between the marks."""

from __future__ import annotations

import importlib
import re
import sys

import pytest

from support.architecture import ROOT

sys.path.append(str(ROOT / "tests" / "benchmarks"))
bench_all, figures = importlib.import_module("bench_all"), importlib.import_module("figures")

PRINTED = """\
MLP | norms | 8.0 | 0.71 †

| model | quantity | plain, ms | curvature |
| --- | --- | ---: | ---: |
| MLP | norms | 8.0 | 0.71 † |
| CNN | norms | 54.1 | wrong (max error 3) |

Ratios of processor time | on two threads
"""
NUMBERS = {"sixteen": 16, "race": 4, "twelve": 12, "five": 5}


@pytest.mark.parametrize("path", figures.PAGES, ids=lambda path: path.name)
def test_pages_show_what_is_stored(path):
    """make figures writes them anew."""
    text = path.read_text("utf-8")
    assert figures.rendered(text) == text


def test_tables_are_found_in_what_a_benchmark_prints():
    (table,) = bench_all.tables_of(PRINTED)
    assert table.columns == ["model", "quantity", "plain, ms", "curvature"]
    assert table.rows == [["MLP", "norms", "8.0", "0.71 †"], ["CNN", "norms", "54.1", "wrong (max error 3)"]]
    assert figures.markdown(table).splitlines()[1] == "| --- | --- | ---: | ---: |"


def test_a_figure_that_was_typed_is_replaced(monkeypatch):
    (table,) = bench_all.tables_of(PRINTED)
    stored = bench_all.Stored("python x.py", "abc1234", "2026-01-01", "2 x CPU", "2", "3", 1.0, [table])
    monkeypatch.setattr(bench_all.Stored, "read", staticmethod(lambda name: stored))
    page = "before\n<!-- results: x -->\n| typed |\n<!-- end of results -->\nafter\n"
    text = figures.rendered(page)
    assert "typed" not in text and "| MLP | norms | 8.0 | 0.71 † |" in text and "abc1234" in text
    assert text.startswith("before\n") and text.endswith("after\n")
    assert figures.rendered(text) == text


@pytest.mark.parametrize("name", figures.PICTURES)
def test_pictures_are_drawn(name, tmp_path):
    kind, draw = figures.PICTURES[name]
    title, *_ = stored = figures.runs_of(name)
    draw({title: kind.read(stored[title])}, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["race_tables", "influence", "standing"])
def test_a_page_says_which_results_are_missing(monkeypatch, tmp_path, name):
    for module in (bench_all, figures):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    page = f"<!-- results: {name} -->\n| old |\n<!-- end of results -->\n"
    text = figures.rendered(page)
    assert "old" not in text and "bench_all.py --only" in text
    assert figures.rendered(text) == text
    with pytest.raises(KeyError, match="typo"):
        figures.rendered("<!-- results: typo -->\n<!-- end of results -->")


def test_each_benchmark_is_ahead_level_or_behind():
    """Once on each row of the first table, by the ratio that stands beside its name."""
    for row in [row for row in figures.standing().splitlines() if row.startswith("| **")]:
        what, *cells = row.strip("| ").split(" | ")
        counts = [int(cell.split(":")[0]) for cell in cells]
        assert sum(counts) == next(n for word, n in NUMBERS.items() if word in what)
        ratios = [[float(x) for x in re.findall(r"(?<= )\d[\d.]*(?=,|$)", cell)] for cell in cells]
        assert [len(part) for part in ratios] == counts
        ahead, level, behind = ([1 / x for x in part] if "↓" in what else part for part in ratios)
        bound = figures.LEVEL_LOSS if "↓" in what else figures.LEVEL
        near = 1.02  # what two digits leave of a ratio
        assert all(x * near >= bound for x in ahead) and all(x <= near / bound for x in behind)
        assert all(1 / bound / near <= x <= bound * near for x in level)


@pytest.mark.parametrize("name", bench_all.COMMANDS)
def test_commands_are_of_scripts_that_are_there(name):
    assert (ROOT / bench_all.COMMANDS[name][0].split()[0]).exists()
