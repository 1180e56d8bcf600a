"""The GPU benchmark in its smallest form: all contestants train, and its tables and files say what was measured."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch

from optimizers import KFAC

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("pytorch_optimizer", reason="a peer of the bench extra is missing: make test installs it")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("gpu")
    small = {
        "resnet": lambda: module.images("ResNet-18", module.resnet18, 32, 4, 100, width=2),
        "vit": lambda: module.images("ViT", module.ViT, 32, 4, 100, d=8, layers=1, heads=2, patch=16),
        "gpt": lambda: module.gpt("GPT-2", 20, 6, 4, d=8, layers=1, heads=2),
        "resnet18": lambda: module.images("ResNet-18", module.resnet18, 32, 32, 3, width=2),
    }
    monkeypatch.setattr(module, "SMALL", small)
    monkeypatch.setattr(module, "WARM", 2)
    return module


def table(text: str) -> dict[str, list[str]]:
    """The cells of each row but the head, by the first."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {name: cells for name, *cells in rows[2:]}


def test_it_runs(gpu: ModuleType, device: str, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_the_peak_is_that_of_the_optimizers_buffers_too(gpu: ModuleType, device: str) -> None:
    """AdamW has two of them, SGD one."""
    peaks = [gpu.peak_of(name, gpu.SMALL["gpt"], device) for name in ("SGD", "AdamW")]
    assert peaks[1] > peaks[0] > 0


def test_networks(gpu: ModuleType) -> None:
    """The sizes of the papers, in millions of parameters, positions of the GPTs aside."""
    made = {name: gpu.on(network, "meta").model for name, network in gpu.FULL.items()}
    counts = {name: sum(p.numel() for p in model.parameters()) / 1e6 for name, model in made.items()}
    papers = {"resnet": 11.2, "vit": 21.4, "gpt": 123.8, "gpt2": 124.4, "nanogpt": 124.4} | {
        "resnet50": 25.6,
        "resnet18": 11.2,
    }
    assert counts == pytest.approx(papers, abs=0.1)


@pytest.mark.parametrize("name", ["resnet", "vit", "gpt"])
def test_kfac_knows_the_layers(gpu: ModuleType, name: str) -> None:
    work = gpu.on(gpu.SMALL[name], "cpu")
    model = work.model
    opt = KFAC(model)
    gpu.LOSS(model(work.x), work.y).backward()
    opt.step()
    blocks = {k: b.structure for b in opt.store.blocks for k in b.names}
    matrices = {k for k, p in model.named_parameters() if p.ndim in (2, 4) and k.endswith("weight")}
    assert {k for k in matrices if blocks[k] != "kronecker"} == set()
    assert blocks.keys() == dict(model.named_parameters()).keys()


def test_waits_are_counted(gpu: ModuleType, device: str) -> None:
    x = torch.ones(3, device=device)
    assert gpu.waits_of(lambda: x.sum(), device) == 0
    assert gpu.waits_of(lambda: [bool(x[0] > 0), float(x.sum()), x[1].item()], device) == 3


def test_a_run_that_did_not_train_is_refused(gpu: ModuleType) -> None:
    network = gpu.SMALL["gpt"]
    run = gpu.Run("SGD", network, "cpu")
    run.check()
    next(run.model.parameters()).data.fill_(torch.nan)
    with pytest.raises(RuntimeError, match="SGD: parameters are not finite"):
        run.check()
    ours = gpu.Run("KFAC", network, "cpu")
    ours.step()
    ours.opt.monitor.skipped = 1
    with pytest.raises(RuntimeError, match="KFAC: 1 steps were skipped"):
        ours.check()
    ours.opt.monitor.skipped = 0
    with pytest.raises(RuntimeError, match="KFAC: an ordinary step inverted something"):
        ours.check()
    ours.rest()
    ours.step()
    ours.check()


def test_curvature(gpu: ModuleType, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    gpu.main(["curvature", "--small", "--only", "resnet18", "--device", device, "--threads", "1", "--rounds", "2"])
    found = table(capsys.readouterr().out)
    assert list(found) == ["gradient", *gpu.PUBLISHED["nanogpt"]]
    assert all(min(map(float, cells[:2])) > 0 for cells in found.values())
    assert found["gradient"][1] == "1.00" and float(found["H v"][2]) > float(found["gradient"][2]) > 0
