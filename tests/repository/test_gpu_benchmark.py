"""The GPU benchmark in its smallest form: all contestants train, and its tables and files say what was measured."""

from __future__ import annotations

import importlib
import json
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
    module, networks = (importlib.import_module(name) for name in ("gpu", "gpu"))
    steps = {
        "resnet": networks.images("ResNet-18", networks.resnet18, 32, 4, 100, width=2),
        "vit": networks.images("ViT", networks.ViT, 32, 4, 100, d=8, layers=1, heads=2, patch=16),
        "gpt": networks.gpt("GPT-2", 20, 6, 4, d=8, layers=1, heads=2),
    }
    curvature = {"resnet18": networks.images("ResNet-18", networks.resnet18, 32, 2, 3, width=2)}
    monkeypatch.setattr(module, "SMALL", {"steps": steps, "curvature": curvature})
    monkeypatch.setattr(module, "WARM", 2)
    return module


def test_it_runs(gpu: ModuleType, tmp_path: Path, device: str) -> None:
    name, precision = "gpt", "bf16"
    files = {kind: tmp_path / f"gpu.{kind}" for kind in ("json", "md")}
    chosen = ["--small", "--device", device, "--only", name, "--precisions", precision, "--threads", "1"]
    gpu.main([*chosen, "--rounds", "10", "--json", str(files["json"]), "--out", str(files["md"])])
    saved = json.loads(files["json"].read_text())
    results = {result["optimizer"]: result for result in saved["results"]}
    assert list(results) == ["SGD", "AdamW", "Muon", "SOAP", "KFAC", "EKFAC"]
    for title, result in results.items():
        assert len(result["seconds"]) == 10 and min(result["seconds"] + result["ordinary"]) > 0, title
        assert len(result["renewing"]) == ("KFAC" in title), title
        assert len(result["ordinary"]) == 3 and result["precision"] == precision and result["peak"] > 0
    assert results["SGD"]["waits"] == 0
    assert results["AdamW"]["peak"] > results["SGD"]["peak"]  # two buffers, not one
    text = files["md"].read_text()
    assert f"torch {torch.__version__}" in text and "| KFAC | " in text and saved["machine"] in text


def test_networks(gpu: ModuleType) -> None:
    """The sizes of the papers, in millions of parameters, positions of the GPTs aside."""
    with torch.device("meta"):
        made = {name: network.make() for of in gpu.FULL.values() for name, network in of.items()}
    counts = {name: sum(p.numel() for p in model.parameters()) / 1e6 for name, model in made.items()}
    papers = {"resnet": 11.2, "vit": 21.4, "gpt": 123.8, "nanogpt": 124.4, "resnet50": 25.6, "resnet18": 11.2}
    assert counts == pytest.approx(papers, abs=0.1)


@pytest.mark.parametrize("name", ["resnet", "vit", "gpt"])
def test_kfac_knows_the_layers(gpu: ModuleType, name: str) -> None:
    model, x, y = gpu.SMALL["steps"][name].on("cpu")
    opt = KFAC(model)
    gpu.LOSS(model(x), y).backward()
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
    network = gpu.SMALL["steps"]["gpt"]
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


def test_mean_steps_of_gpt2(gpu: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.mean_step(ordinary=2.0, whole=12.0, interval=10) == 3.0
    sizes = ["--batch", "2", "--length", "8", "--rounds", "1", "--threads", "1"]
    gpu.main(["gpt2", "--small", "--device", "cpu", *sizes])
    assert "every 32 steps: " in capsys.readouterr().out


def test_curvature(gpu: ModuleType, tmp_path: Path, device: str) -> None:
    file = tmp_path / "curvature.json"
    gpu.main(["curvature", "--small", "--device", device, "--threads", "1", "--rounds", "2", "--json", str(file)])
    results = {result["quantity"]: result for result in json.loads(file.read_text())["results"]}
    assert list(results) == ["gradient", *gpu.PUBLISHED["nanogpt"]]
    assert all(len(result["seconds"]) == 2 and result["peak"] > 0 for result in results.values())
