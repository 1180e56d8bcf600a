"""Quick runs of benchmarks, and the networks that they are of."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch

from support.architecture import ROOT

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.usefixtures("path"),
]


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pytorch_optimizer", reason="a peer of the bench extra is missing: make test installs it")
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "benchmarks"))


@pytest.fixture
def gpu(path: None) -> ModuleType:
    return importlib.import_module("gpu")


@pytest.fixture
def small(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """With a small network in place of all others."""
    network = lambda: gpu.gpt("GPT-2", 20, 6, 4, d=8, layers=1, heads=2)
    monkeypatch.setattr(gpu, "NETWORKS", {"gpt": network, "resnet18": network})
    monkeypatch.setattr(gpu, "WARM", 2)
    return gpu


def table(text: str) -> dict[str, list[str]]:
    """The cells of each row but the head, by the first."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {name: cells for name, *cells in rows[2:]}


def test_steps_on_a_gpu(small: ModuleType, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    small.main(["--device", device, "--only", "gpt", "--rounds", "10"])
    text = capsys.readouterr().out
    assert f"torch {torch.__version__}" in text and "**GPT-2 1 x 8, 20 words, 4 x 6 tokens, fp32**" in text
    found = table(text)
    assert list(found) == ["SGD", "AdamW", "Muon", "SOAP", "KFAC", "EKFAC"]
    for name, (median, ratio, mean, _, renewing, ordinary, share, *_) in found.items():
        assert min(float(cell) for cell in (median, ratio, mean, ordinary)) > 0
        assert (renewing != "-") == (share != "-") == ("KFAC" in name)
    assert found["SGD"][-1] == "0"  # waits
    peaks = [small.peak_of(name, small.NETWORKS["gpt"], device) for name in ("SGD", "AdamW")]
    assert peaks[0] < peaks[1]  # two buffers


def test_curvature_on_a_gpu(small: ModuleType, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    small.main(["curvature", "--device", device, "--rounds", "1"])
    found = table(capsys.readouterr().out)
    assert list(found) == ["gradient", *small.PUBLISHED]
    assert all(min(map(float, cells[:2])) > 0 for cells in found.values())
    assert found["gradient"][1] == "1.00"


def test_networks_have_the_sizes_of_the_papers(gpu: ModuleType) -> None:
    """In millions of parameters, positions of the GPTs aside."""
    made = {name: gpu.on(network, "meta").model for name, network in gpu.NETWORKS.items()}
    counts = {name: sum(p.numel() for p in model.parameters()) / 1e6 for name, model in made.items()}
    papers = {"resnet": 11.2, "vit": 21.4, "gpt": 123.8, "gpt2": 124.4, "resnet18": 11.2}
    assert counts == pytest.approx(papers, abs=0.1)


def test_a_run_that_did_not_train_is_refused(small: ModuleType) -> None:
    run = small.Run("KFAC", small.NETWORKS["gpt"], "cpu")
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
