"""The demo runs from its first line to its picture, and says what the numbers say, ahead or behind."""

from __future__ import annotations

import importlib
import json
import math
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NUMBER = r"(?:diverged|\d+\.\d\d)"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("demo")


def run_of(demo: ModuleType, kind: str, *losses: float) -> Any:
    """A run of a second a step, with these losses after its steps."""
    run = demo.Run(demo.digits(torch.device("cpu")), kind, 0.1, seed=0)
    point = importlib.import_module("_demo_race").Point
    run.points += [point(k + 1, float(k + 1), loss) for k, loss in enumerate(losses)]
    run.steps, run.failed = len(losses), math.inf in losses
    run.seconds, run.reached = float(len(losses)), math.inf if run.failed else float(len(losses))
    return run


def test_quick_run_prints_two_tables_and_draws(
    demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str
) -> None:
    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    picture, file = tmp_path / "picture.png", tmp_path / "demo.json"
    assert demo.main(["--quick", "--out", str(picture), "--json", str(file), "--device", device]) == 0
    text = capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG") and str(picture) in text
    assert len(text.splitlines()) <= 25
    for row in (r"KFAC +", r"SGD, lr [\d.]+ +", r"AdamW, lr [\d.]+ +"):
        assert len(re.findall(rf"^{row}{NUMBER}(?: +{NUMBER})+$", text, re.MULTILINE)) == 2
    assert set(json.loads(file.read_text())["tuning"]) == {"SGD", "AdamW"}
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), state)


def test_sentences_say_what_the_numbers_say(demo: ModuleType) -> None:
    runs = [run_of(demo, "KFAC", 5.0, 2.0), run_of(demo, "SGD", 4.0, 1.0), run_of(demo, "AdamW", 7.0, 6.0)]
    assert demo.by_step(runs, [1, 2]).endswith(
        "KFAC needs more than all its steps for what SGD reaches in 2, and 1 steps for what AdamW reaches in 2."
    )
    assert demo.by_time(runs, 2).endswith("KFAC is ahead of AdamW, behind SGD after 2.00 s.")


def test_a_diverged_rival_is_reported(demo: ModuleType) -> None:
    runs = [run_of(demo, "KFAC", 5.0, 2.0), run_of(demo, "SGD", 4.0, math.inf), run_of(demo, "AdamW", 7.0, 6.0)]
    assert "diverged" in demo.by_step(runs, [1, 2])
    assert demo.by_time(runs, 2).endswith("ahead of SGD and AdamW after 2.00 s.")


@pytest.mark.parametrize(
    ("lr", "above", "below"), [(0.01, 0.03, 0.003), (0.03, 0.1, 0.01), (1.0, 3.0, 0.3), (3.0, 10.0, 1.0)]
)
def test_grids_grow_by_half_decades(demo: ModuleType, lr: float, above: float, below: float) -> None:
    race = importlib.import_module("_demo_race")
    assert race.half_decade(lr, up=True) == above
    assert race.half_decade(lr, up=False) == below
