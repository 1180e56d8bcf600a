"""Pages show what benchmarks have stored, and nothing else between the marks."""

from __future__ import annotations

import importlib
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


def test_results_that_are_missing_are_named(monkeypatch):
    monkeypatch.setattr(bench_all.Stored, "read", staticmethod(lambda name: None))
    with pytest.raises(KeyError, match="bench_all.py --only x"):
        figures.rendered("<!-- results: x -->\n<!-- end of results -->")


@pytest.mark.parametrize("name", bench_all.COMMANDS)
def test_commands_are_of_scripts_that_are_there(name):
    assert (ROOT / bench_all.COMMANDS[name][0].split()[0]).exists()
