"""Every ```python block of README.md and docs/**/*.md runs as printed, each file's blocks in order as one program."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from curvature.structures.structure import SHRINKAGE
from optimizers.preconditioner import DAMPING_SHARE
from optimizers.steps.directions import GROWTH, HORIZON, LONGEST_HORIZON
from optimizers.steps.trust_region import DECAY_SHARE, TrustRegionConstants
from support import guide_pictures, layer_table, page_outputs, programs
from support.architecture import ROOT
from support.documents import script_of

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PEERS = ["opacus"]  # that a page uses
ELSEWHERE = ["coming_from.md", "frameworks.md"]  # run by tests/integration, where what they need is imported anyway
SHOWN = page_outputs.PAGES  # run below, by what they print
FILES = [
    path
    for path in PAGES
    if path.name not in ELSEWHERE and path not in SHOWN and script_of(path.read_text("utf-8")).strip()
]


def run(script: str, name: str, folder: Path) -> SimpleNamespace:
    (folder / name).write_text(script, encoding="utf-8")
    return programs.run(run_script, name, folder=folder)


def run_script(name: str) -> None:
    runpy.run_path(name, run_name="__main__")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_blocks_run(path: Path, tmp_path: Path) -> None:
    script = script_of(path.read_text("utf-8"))
    result = run(script, path.name, tmp_path)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]


@pytest.mark.parametrize("path", SHOWN, ids=lambda path: path.name)
def test_blocks_print_what_the_page_shows(path: Path, tmp_path: Path) -> None:
    """python tests/support/page_outputs.py writes it anew."""
    for peer in PEERS:
        if f"from {peer}" in path.read_text("utf-8"):
            pytest.importorskip(peer, reason="a peer of the bench extra is missing: make test installs it")
    result = programs.run(write_outputs, path, folder=tmp_path)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    shown = page_outputs.outputs(path.read_text("utf-8"))
    printed = page_outputs.outputs((tmp_path / path.name).read_text("utf-8"))
    assert shown and page_outputs.agree(shown, printed), printed


def write_outputs(path: Path) -> None:
    Path(path.name).write_text(page_outputs.with_outputs(path.read_text("utf-8"), str(path)), "utf-8")


def test_outputs_agree_to_rounding_alone() -> None:
    agree = page_outputs.agree
    assert agree("loss 0.25, error 3e-16\n", "loss 0.30, error 4e-15\n") and not agree("loss 0.25", "loss 0.9")
    assert not agree("error 3e-16", "error 3e-13") and not agree("loss 1", "cost 1") and not agree("1 2", "1")


def test_some_lines_agree_in_their_order() -> None:
    agree = page_outputs.lines_agree
    assert agree("loss 1\nend\n", "log\nloss 1.2\nlog\nend\n") and not agree("end\nloss 1\n", "loss 1\nend\n")
    assert not agree("loss 1\n", "log\nloss 9\n")


def prose_of(path: Path) -> str:
    return re.sub(r"^ *```.*?^ *```", "", path.read_text("utf-8"), flags=re.S | re.M)


def anchors_of(path: Path) -> set[str]:
    """Of the headings of a page, as MkDocs and GitHub name them."""
    titles = re.findall(r"^#+ (.*)$", prose_of(path), re.M)
    headings = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading) for heading in titles]
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


def objects_of(path: Path) -> set[str]:
    """What a page of the reference has docstrings of, which are its anchors on the site."""
    return set(re.findall(r"^::: (\S+)$", path.read_text("utf-8"), re.M))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    """In the repository, where no site has been built."""
    missing = []
    for target in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", prose_of(path)):
        name, _, anchor = target.partition("#")
        page = (path.parent / name).resolve() if name else path
        if not page.exists() or anchor and page.suffix == ".md" and anchor not in anchors_of(page) | objects_of(page):
            missing.append(target)
    assert not missing


def test_lines_keep_their_numbers(tmp_path: Path) -> None:
    markdown = (
        "text\n```sh\nnot python\n```\n1. item\n   ```python\n   x = 2\n   ```\n\n```python\nassert x == 3\n```\n"
    )
    script = script_of(markdown)
    assert script.splitlines() == ["", "", "", "", "", "", "x = 2", "", "", "", "assert x == 3", ""]
    result = run(script, "page.md", tmp_path)
    assert result.returncode == 1
    assert 'page.md", line 11' in result.stderr


def test_text_without_blocks_gives_an_empty_script() -> None:
    assert not script_of("text\n```sh\nls\n```\n").strip()


def test_a_benchmark_starts_beside_folders_of_the_packages_names():
    """`tests` is on its path, where folders of the same names hide the installed packages."""
    script = ROOT / "tests" / "benchmarks" / "gpu.py"
    subprocess.run([sys.executable, str(script), "--help"], check=True, capture_output=True)


def test_the_page_about_the_step_has_its_constants() -> None:
    c = TrustRegionConstants()
    page = (ROOT / "docs" / "how" / "step.md").read_text("utf-8")
    said = [
        rf"$r < \min(\rho, 0) - {c.overshoot:g}$",
        f"and $|g|$ is over {c.long:g} times the sum of its running mean and standard deviation",
        rf"e^{{{c.growth:g} \rho / h_t}}$",
        rf"it is ${c.growth:g} \rho / {HORIZON:g}$ instead",
        f"is at least {100 * c.least:g} % times the smaller of two numbers",
        rf"$1 / \sqrt{{(1 + t / {c.early:g})(1 + t' / {c.early:g})}}$",
        f"at most {100 * c.top:g} % of the reach, and at most twice its running mean",
        rf"$\tau$ is {c.trust:g} over the root of the number of layers",
        rf"$h_t = {HORIZON:g} + t / {1 / GROWTH:g}$, at most {LONGEST_HORIZON:g}",
        rf"${DAMPING_SHARE:g} + {SHRINKAGE:g}\, d / n$",
    ]
    assert (c.most, c.quiet, c.far, c.even, DECAY_SHARE) == (2, 2 / 3, 100, 0.5, 0.2)  # in words there
    assert [text for text in said if text not in page] == []


@pytest.mark.filterwarnings("ignore")
def test_the_table_of_layers_says_what_the_package_does() -> None:
    """python tests/support/layer_table.py writes it anew."""
    text = layer_table.GUIDE.read_text("utf-8")
    assert text == layer_table.with_table(text, layer_table.table())


def test_the_guide_on_plots_has_its_pictures() -> None:
    """python tests/support/guide_pictures.py draws them anew."""
    folder = guide_pictures.GUIDE.parent
    sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in (folder / "plots").iterdir()}
    assert set(sizes) == set(guide_pictures.names())
    assert max(sizes.values()) < 60_000
