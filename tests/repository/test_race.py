"""The race: its rivals train, its clock and its randomness are each run's own, and its tables say what happened."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
TINY: dict[str, dict[str, Any]] = {
    "autoencoder": {"widths": (784, 32, 16), "batch": 100},
    "cnn": {"channels": (3, 4), "batch": 32},
    "gpt": {"d": 16, "layers": 1, "heads": 2, "length": 12, "batch": 8},
    "tanh": {"width": 16, "depth": 3, "batch": 64},
}
# A step that is not too long for the problem; the race itself finds better ones.
LRS = {"sgd": {"autoencoder": 1e-4}, "singd": {"autoencoder": 1e-4}}
NAMES = ("sgd", "adamw", "muon", "soap", "shampoo", "singd", "empirical")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def race(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for peer in ("sklearn", "mlxtend", "pytorch_optimizer", "singd"):
        pytest.importorskip(peer, reason="a peer of the bench extra is missing: make test installs it")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("race")


def started(race: ModuleType, problem: str, name: str, **setting: float) -> Any:
    entry = race.ENTRIES[name]
    lr = LRS.get(name, {}).get(problem, entry.lrs[1] if entry.lrs else 0)
    usual = {name: values[0] for name, values in entry.axes.items()}
    chosen = {"lr": lr, **usual, **setting} if entry.lrs else {}
    return race.Run(race.PROBLEMS[problem](**TINY[problem]), entry, chosen, seed=0)


# Every rival on two of the four problems, every problem with three or four of the rivals.
CELLS = [(problem, name) for i, problem in enumerate(TINY) for j, name in enumerate(NAMES) if (i + j) % 2 == 0]


@pytest.mark.parametrize("problem, name", CELLS)
def test_every_rival_lowers_the_loss(race: ModuleType, problem: str, name: str) -> None:
    run = started(race, problem, name)
    before = {key: value.clone() for key, value in run.models[0].named_parameters()}
    for _ in range(30):
        run.step()
    run.evaluate()
    assert run.points[-1].loss < run.points[0].loss
    still = [key for key, value in run.models[0].named_parameters() if torch.equal(value, before[key])]
    assert not still, f"not trained: {still}"


def test_every_rival_is_tested(race: ModuleType) -> None:
    assert tuple(entry.name for entry in race.ENTRIES.values() if entry.lrs) == NAMES


@pytest.mark.parametrize("decay", [0.0, 2.0])
def test_muon_is_that_of_torch(race: ModuleType, decay: float) -> None:
    torch.manual_seed(0)
    rivals = importlib.import_module("_race_rivals")
    layers = [nn.Linear(12, 7, bias=False), nn.Linear(12, 7, bias=False)]
    layers[1].load_state_dict(layers[0].state_dict())
    ours = rivals.Muon([layers[0].weight], 0.1, decay=decay)
    theirs = torch.optim.Muon([layers[1].weight], 0.1, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    start = layers[0].weight.detach().clone()
    for _ in range(3):
        gradient = torch.randn(7, 12)
        for layer, optimizer in zip(layers, (ours, theirs), strict=True):
            layer.weight.grad = gradient.clone()
            optimizer.step()
    moved = (layers[1].weight - start).norm()
    assert moved > 0.1
    assert (layers[0].weight - layers[1].weight).norm() < 0.03 * moved  # bfloat16 there


def test_factors_of_the_empirical_kfac(race: ModuleType) -> None:
    torch.manual_seed(0)
    rivals = importlib.import_module("_race_rivals")
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(27, 4))
    x, y = torch.randn(5, 2, 6, 6), torch.tensor([0, 1, 2, 3, 0])
    optimizer = rivals.EmpiricalKFAC(model, 0.1, 0.1)
    hidden = model[0](x)
    hidden.retain_grad()
    F.cross_entropy(model[1:](hidden), y).backward()
    patches = F.unfold(x, 3, padding=1, stride=2)  # (5, 18, 9)
    a = torch.cat([patches, torch.ones(5, 1, 9)], 1)
    b = 5 * hidden.grad.flatten(2)  # of each sample's own loss
    wanted = torch.einsum("nit,njt->ij", a, a) / 45, torch.einsum("nit,njt->ij", b, b) / 5
    for found, factor in zip(optimizer.factors[model[0]], wanted, strict=True):
        torch.testing.assert_close(found, 0.95 * torch.eye(len(factor)) + 0.05 * factor)
    gradient = torch.cat([model[3].weight.grad, model[3].bias.grad[:, None]], 1)
    A, B = optimizer.factors[model[3]]
    product = torch.kron(B, A) + 0.1 * torch.eye(len(A) * len(B))
    direction = torch.linalg.solve(product, gradient.flatten()).view_as(gradient)
    optimizer.step()
    scaled = torch.cat([model[3].weight.grad, model[3].bias.grad[:, None]], 1)
    ratio = scaled.norm() / direction.norm()
    torch.testing.assert_close(scaled, ratio * direction, rtol=1e-3, atol=1e-5)
    assert ratio <= 1


def test_the_target_is_met_between_evaluations(race: ModuleType) -> None:
    contest = importlib.import_module("_contest")
    assert contest.met(contest.Point(10, 1.0, 4.0), contest.Point(20, 3.0, 1.0), 2.0) == (15.0, 2.0)


def test_a_run_that_comes_to_its_target(race: ModuleType) -> None:
    """Far from it an evaluation is a quick look, near it whole."""
    problem = race.PROBLEMS["tanh"](**TINY["tanh"])
    far = race.Run(replace(problem, target=0.5), race.ENTRIES["adamw"], {"lr": 3e-3}, seed=0)
    assert math.isnan(far.points[0].metric) and not far.end
    run = race.Run(replace(problem, target=2.0), race.ENTRIES["adamw"], {"lr": 3e-3}, seed=0)
    run.advance(20.0)
    assert run.end == "reached" and run.reached.loss == 2.0 and run.reached.accuracy > 0.1
    assert run.points[-2].loss > 2.0 >= run.points[-1].loss
    assert run.points[-2].step < run.reached.step <= run.points[-1].step


def test_grids_widen(race: ModuleType) -> None:
    """The middle rate first, other settings with the best rate, and on while it lies at the end of the grid."""
    best_so_far = []

    def attempt(setting: dict[str, float], best: Any) -> Any:
        best_so_far.append(best and best.setting["lr"])
        needed = 10 * (1 + abs(math.log10(setting["lr"] / 1e-4))) + setting.get("every", 0)  # the best is 1e-4
        return race.Trial(setting, "reached", needed, needed, 1.0)

    trials = list(race.tune(race.ENTRIES["adamw"], (1e-3, 3e-3, 1e-2), attempt))
    assert [trial.setting["lr"] for trial in trials] == [3e-3, 1e-3, 1e-2, 3e-4, 1e-4, 3e-5]
    assert best_so_far == [None, 3e-3, 1e-3, 1e-3, 3e-4, 1e-4]
    assert min(trials, key=lambda trial: trial.rank).setting == {"lr": 1e-4}
    trials = list(race.tune(race.ENTRIES["singd"], (1e-5, 1e-4, 1e-3), attempt))
    tried = [(1e-4, 10), (1e-5, 10), (1e-3, 10), (1e-4, 1)]
    assert [(trial.setting["lr"], trial.setting["every"]) for trial in trials[:4]] == tried
    failed = lambda setting, best: race.Trial(setting, "diverged", 1, 1.0, math.inf)
    rates = [trial.setting["lr"] for trial in race.tune(race.ENTRIES["sgd"], (1e-2, 3e-2, 1e-1), failed)]
    assert rates[3:5] == [3e-3, 1e-3]  # lower


def test_points_of_a_grid_are_abandoned(race: ModuleType) -> None:
    problem, entry = race.PROBLEMS["tanh"](**TINY["tanh"]), race.ENTRIES["sgd"]
    attempt = race.trial_of(replace(problem, target=0.0), entry, 0.5)
    good = race.Trial({"lr": 0.1}, "reached", 5, 0.01, 0.0)
    assert 0.013 < attempt({"lr": 1e-3}, good).seconds < 0.25
    assert attempt({"lr": 1e-3}, None).seconds > 0.5
    ends = [("stopped", 2.0), ("reached", 9.0), ("stopped", 1.0), ("abandoned", 0.5), ("diverged", math.inf)]
    ranked = sorted((race.Trial({}, end, 9, 9.0, loss) for end, loss in ends), key=lambda trial: trial.rank)
    assert [trial.end for trial in ranked] == ["reached", "stopped", "stopped", "diverged", "abandoned"]
    assert ranked[1].loss == 1.0


def test_a_race_is_run_and_reported(
    race: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = race.PROBLEMS["tanh"](**TINY["tanh"])
    easy = replace(problem, target=2.0, budget=0.5)
    monkeypatch.setitem(race.PROBLEMS, "tanh", lambda device: easy)
    files = {name: tmp_path / f"race.{name}" for name in ("json", "png", "tuned")}
    common = ["--problem", "tanh", "--tuned", str(files["tuned"])]
    with pytest.raises(SystemExit, match="--tune --problem tanh --only adamw"):
        race.main([*common, "--only", "adamw"])
    race.main([*common, "--only", "adamw", "sgd", "--tune", "--scale", "0.2"])
    report = importlib.import_module("_report")
    tuned = report.load(files["tuned"])["tanh"]
    tuned["sgd"]["chosen"] = {"lr": 1e-9}  # one that does not come to the target
    report.save(files["tuned"], {"tanh": tuned})
    capsys.readouterr()
    out = ["--json", str(files["json"]), "--figure", str(files["png"])]
    race.main([*common, *out, "--only", "adamw", "sgd", "kfac", "--seeds", "2"])
    text = capsys.readouterr().out
    rows = {line.split(" | ")[0][2:]: line.split(" | ") for line in text.splitlines() if line.startswith("| ")}
    assert rows["AdamW"][3] == "1.00"
    assert float(rows["KFAC"][3]) > 0
    assert rows["SGD, Nesterov 0.9"][2].startswith("- (2.3")
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    stored = race.RaceResult.read(report.load(files["json"])["tanh"])
    assert race.race_table(stored) in text


def test_batch_sizes(
    race: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    """One row for each size; what does not come to the target says so."""

    def sized(device: str, batch: int = 64) -> Any:
        problem = importlib.import_module("_problems").tanh(device, **(TINY["tanh"] | {"batch": batch}))
        return replace(problem, target=2.0 if batch == 128 else -1.0, budget=0.5)

    monkeypatch.setitem(race.PROBLEMS, "tanh", sized)
    race.main(["--batches", "64", "128", "--problem", "tanh", "--only", "kfac", "adaptive", "--seeds", "1"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| tanh")]
    assert [row[1] for row in rows] == ["64", "128"]
    assert rows[0][2:4] == ["-", "not in 0"] and float(rows[1][2]) > 0 and float(rows[1][3]) > 0
