"""The demo runs from its first line to its picture, and reports what happened, ahead or behind."""

from __future__ import annotations

import importlib
import math
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NUMBER = r"(?:diverged|[\d.]+(?:e[+-]\d+)?)"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("demo")


def stub(demo: ModuleType, kind: str, train: float, accuracy: float = math.nan) -> object:
    """A run of one step and one second that ended at a given training loss and accuracy."""
    problem = demo.problems(torch.device("cpu"))[1]
    run = demo.Run(problem, kind, 0.1, seed=0)
    run.points += [importlib.import_module("demo_race").Point(1, 1.0, train, train, accuracy)]
    run.steps, run.seconds, run.reached = 1, 1.0, 1.0
    return run


def test_quick_run_prints_tables_and_draws(
    demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str
) -> None:
    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    picture = tmp_path / "picture.png"
    assert demo.main(["--quick", "--out", str(picture), "--device", device]) == 0
    text = capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert str(picture) in text
    for title in ("training loss [nats per image]", "test loss [nats per label]", "test accuracy"):
        assert title in text
    for row in (r"KFAC +", r"SGD, lr [\d.]+ +", r"AdamW, lr [\d.]+ +"):
        assert len(re.findall(rf"^  {row}{NUMBER}(?: +{NUMBER})+$", text, re.MULTILINE)) == 4  # two losses each
    for kind in ("SGD", "AdamW"):
        assert len(re.findall(rf"{kind} +lr [\d.]+.*tuned in [\d.]+ s over {{", text)) == 2  # the grid, of each problem
    assert len(re.findall(r"comparisons KFAC is ahead in \d+, level in \d+, behind in \d+", text)) == 2
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), state)


def test_report_says_what_the_numbers_say(demo: ModuleType) -> None:
    runs = [stub(demo, "KFAC", 2.0, 0.5), stub(demo, "SGD", 1.0, 0.5), stub(demo, "AdamW", 3.0, 0.25)]
    score = demo.Counter()
    assert demo.compare(runs, 1, "train", score) == "KFAC (2) is ahead of AdamW (3), behind SGD (1)"
    assert (
        demo.compare(runs, 1, "accuracy", score) == "KFAC (50.0 %) is ahead of AdamW (25.0 %), level with SGD (50.0 %)"
    )
    assert dict(score) == {"ahead of": 2, "behind": 1, "level with": 1}
    assert demo.catch_up(runs[0], runs[1], 1).endswith("nowhere in this run")
    assert demo.catch_up(runs[0], runs[2], 1).endswith("KFAC has it by step 1, 1 s")


def test_a_diverged_rival_is_reported(demo: ModuleType) -> None:
    runs = [stub(demo, "KFAC", 2.0, 0.5), stub(demo, "SGD", math.inf), stub(demo, "AdamW", 3.0, 0.25)]
    runs[1].failed, runs[1].reached = True, math.inf
    assert "ahead of SGD (diverged)" in "\n".join(demo.verdict(runs, [1]))


@pytest.mark.parametrize(
    ("lr", "above", "below"), [(0.01, 0.03, 0.003), (0.03, 0.1, 0.01), (1.0, 3.0, 0.3), (3.0, 10.0, 1.0)]
)
def test_grids_grow_by_half_decades(demo: ModuleType, lr: float, above: float, below: float) -> None:
    race = importlib.import_module("demo_race")
    assert race.half_decade(lr, up=True) == above
    assert race.half_decade(lr, up=False) == below
