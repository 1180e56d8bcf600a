"""Quick runs of benchmarks, and the networks that they are of."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

from support.architecture import ROOT

MINE = """
from torch import nn, rand

def net():
    return nn.Sequential(nn.Linear(3, 2)), (rand(5, 3), rand(5, 2)), nn.MSELoss()

def other():
    return nn.Linear(3, 2), rand(5, 3)
"""
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("path"),
]


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pytorch_optimizer", reason="a peer of the bench extra is missing: make test installs it")
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "benchmarks"))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, path: None) -> ModuleType:
    module = importlib.import_module("gpu")
    small = {
        "gpt": lambda: module.gpt("GPT-2", 20, 6, 4, d=8, layers=1, heads=2),
        "nanogpt": lambda: module.gpt("nanoGPT", 20, 6, 4, d=8, layers=1, heads=2),
    }
    monkeypatch.setattr(module, "SMALL", small)
    monkeypatch.setattr(module, "WARM", 2)
    return module


def table(text: str) -> dict[str, list[str]]:
    """The cells of each row but the head, by the first."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {name: cells for name, *cells in rows[2:]}


def test_steps_on_a_gpu(gpu: ModuleType, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main([
        "--small", "--device", device, "--only", "gpt", "--precisions", "bf16", "--threads", "1", "--rounds", "10",
    ])  # fmt: skip
    text = capsys.readouterr().out
    assert f"torch {torch.__version__}" in text and "**GPT-2 1 x 8, 20 words, 4 x 6 tokens, bf16**" in text
    found = table(text)
    assert list(found) == ["SGD", "AdamW", "Muon", "SOAP", "KFAC", "EKFAC"]
    for name, (median, ratio, mean, _, renewing, ordinary, share, *_) in found.items():
        assert min(float(cell) for cell in (median, ratio, mean, ordinary)) > 0
        assert (renewing != "-") == (share != "-") == ("KFAC" in name)
    assert found["SGD"][-1] == "0"  # waits
    assert gpu.peak_of("AdamW", gpu.SMALL["gpt"], device) > gpu.peak_of("SGD", gpu.SMALL["gpt"], device)  # two buffers


def test_curvature_on_a_gpu(gpu: ModuleType, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main(["curvature", "--small", "--only", "nanogpt", "--device", device, "--threads", "1", "--rounds", "1"])
    found = table(capsys.readouterr().out)
    assert list(found) == ["gradient", *gpu.PUBLISHED["nanogpt"]]
    assert all(min(map(float, cells[:2])) > 0 for cells in found.values())
    assert found["gradient"][1] == "1.00"


def test_networks_have_the_sizes_of_the_papers(gpu: ModuleType) -> None:
    """In millions of parameters, positions of the GPTs aside."""
    made = {name: gpu.on(network, "meta").model for name, network in gpu.FULL.items()}
    counts = {name: sum(p.numel() for p in model.parameters()) / 1e6 for name, model in made.items()}
    papers = {"resnet": 11.2, "vit": 21.4, "gpt": 123.8, "gpt2": 124.4, "nanogpt": 124.4}
    papers |= {"resnet50": 25.6, "resnet18": 11.2}
    assert counts == pytest.approx(papers, abs=0.1)


def test_a_run_that_did_not_train_is_refused(gpu: ModuleType) -> None:
    run = gpu.Run("KFAC", gpu.SMALL["gpt"], "cpu")
    run.step()
    run.opt.monitor.skipped = 1
    with pytest.raises(RuntimeError, match="KFAC: 1 steps were skipped"):
        run.check()
    run.opt.monitor.skipped = 0
    with pytest.raises(RuntimeError, match="KFAC: an ordinary step inverted something"):
        run.check()
    run.rest()
    run.step()
    run.check()
    next(run.model.parameters()).data.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="KFAC: parameters are not finite"):
        run.check()


def test_models_that_are_handed_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_handed_in.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    handed_in, script = (importlib.import_module(name) for name in ("_networks", "per_sample"))
    workload = handed_in.handed_in("mine_handed_in:net", "cpu")
    monkeypatch.setitem(script.QUANTITIES, "norms", {"curvature": script.NORMS["curvature"]})
    reference = script.one_by_one(workload.model, workload.loss, workload.x, workload.y)
    row = script.row("norms", workload, reference)
    assert set(row.methods) == {"plain", "curvature"} and row.labels[0] == "mine_handed_in:net"
    with pytest.raises(ValueError, match=r"--model mine_handed_in:other: expected \(model, \(x, y\), loss\)"):
        handed_in.handed_in("mine_handed_in:other", "cpu")
