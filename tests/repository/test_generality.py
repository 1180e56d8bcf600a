"""The sixteen families: their loops train, and what is said of ours beside the rivals follows from the curves."""

from __future__ import annotations

import dataclasses
import importlib
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
NAMES = (
    "vit", "resnet", "batchnorm", "lstm", "gpt", "dropout", "tabular", "siren", "vae", "variance", "modular", "ratings",
    "softmax", "gan", "policy", "noise",
)  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def generality(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for peer in ("sklearn", "mlxtend", "pytorch_optimizer", "singd"):
        pytest.importorskip(peer, reason="a peer of the bench extra is missing: make test installs it")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("generality")


@pytest.fixture
def scores(generality: ModuleType) -> ModuleType:
    return importlib.import_module("_contest_report")


def test_every_family_is_tested(generality: ModuleType) -> None:
    assert tuple(generality.FAMILIES) == NAMES
    assert all(generality.FAMILIES[name]().name == name for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_loop_of_a_family_trains_all_of_its_models(generality: ModuleType, name: str) -> None:
    family = generality.FAMILIES[name]()
    run = generality.Run(family, generality.ENTRIES["adamw"], {"lr": 3e-3}, seed=0)
    before = [{key: p.detach().clone() for key, p in model.named_parameters()} for model in run.models]
    for _ in range(20):
        run.step()
    run.evaluate()
    assert not run.end
    if name != "gan":  # where the models go in circles first
        assert run.points[-1].loss < run.points[0].loss
    for model, old in zip(run.models, before, strict=True):
        assert not [key for key, p in model.named_parameters() if torch.equal(p, old[key])]


@pytest.mark.parametrize("name", ["dropout", "gan"])
def test_neither_turns_nor_evaluations_change_a_run(generality: ModuleType, name: str) -> None:
    family, state = generality.FAMILIES[name](), torch.random.get_rng_state()
    alone, watched = (generality.Run(family, generality.ENTRIES["sgd"], {"lr": 1e-4}, seed=0) for _ in range(2))
    for _ in range(3):
        alone.step()
    for _ in range(3):
        torch.rand(3)
        watched.step()
        watched.evaluate(whole=True)
    for one, other in zip(alone.models, watched.models, strict=True):
        assert other.training
        assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))
    torch.random.set_rng_state(state)


def test_a_run_that_fails_says_so_and_ends(generality: ModuleType) -> None:
    family = generality.FAMILIES["softmax"]()
    run = generality.Run(family, generality.ENTRIES["sgd"], {"lr": 0.1}, seed=0)
    run.models[0].weight.data.fill_(math.nan)
    run.advance(10.0)
    assert (run.end, run.steps, run.points[-1].loss) == ("diverged", 1, math.inf)

    class Broken:
        def zero_grad(self) -> None:
            raise RuntimeError("broken")

    run = generality.Run(family, generality.ENTRIES["sgd"], {"lr": 0.1}, seed=0)
    run.optimizers = [Broken()]
    run.advance(10.0)
    assert (run.end, run.points[-1].loss) == ("RuntimeError: broken", math.inf)


def test_the_cost_to_come_on_the_board(generality: ModuleType) -> None:
    """A policy that always goes right, and one that draws among all moves, by simulation."""
    loops = importlib.import_module("_generality_families")
    torch.manual_seed(0)
    grid = loops.Grid(side=3, horizon=8)
    right = lambda x: 1e6 * torch.tensor([1.0, 0, 0, 0]).expand(len(x), 4)
    # Right of the start in the same row: found after 1, 1 or 2 steps, three rows; on the spot: at once; else never.
    assert grid.excess(right) + grid.best == pytest.approx((3 * (1 + 1 + 2) + 8 * (81 - 9 - 9)) / 81)
    evenly = lambda x: torch.zeros(len(x), 4)
    states = grid.states.repeat(300, 1)
    simulated = grid.play(evenly, states)[2][0].mean().item()
    assert grid.excess(evenly) + grid.best == pytest.approx(simulated, rel=0.01)  # 0.3 % is one standard error


def test_the_excess_of_a_variance_model(generality: ModuleType) -> None:
    """Against the mean of the loss itself over many targets."""
    families = data = importlib.import_module("_generality_families")
    torch.manual_seed(0)
    family = generality.FAMILIES["variance"]()
    (model,) = family.make()
    x = data.heteroscedastic()[0][0][:4000]
    mean, deviation = data.law(x)
    with torch.no_grad():
        truth, found = torch.stack([mean, 2 * deviation.log()], -1), model(x)
        draws = [mean + deviation * torch.randn(len(x)) for _ in range(200)]
        excess = sum((families.gaussian(found, y) - families.gaussian(truth, y)).item() for y in draws) / len(draws)
    assert family.evaluate([model], True)[0] == pytest.approx(excess, rel=0.01)


def curve(scores: ModuleType, rate: float, count: int = 40, cost: float = 0.01, scale: float = 1.0) -> list[Any]:
    """Losses that fall as a power of the steps, evaluated at steps 1.1 apart."""
    steps = [0.0, *(1.1**i for i in range(count))]
    return [scores.Point(t, cost * t, scale * max(t, 0.5) ** -rate, t) for t in steps]


def record(scores: ModuleType, name: str, points: list[Any], pace: float = 1.0, end: str = "stopped") -> Any:
    setting = {} if name == "kfac" else {"lr": 0.1}
    last = points[-1]
    return scores.Record(name, setting, 0, end, int(last.step), last.seconds, points, pace)


def test_scores_follow_from_the_curves(scores: ModuleType) -> None:
    """Ours needs a quarter of the steps, each twice as dear: twice as fast, whatever the smoothing."""
    rivals = [record(scores, "adamw", curve(scores, 1.0)), record(scores, "sgd", curve(scores, 1.0, scale=1.2))]
    budget = rivals[0].seconds
    ours = record(scores, "kfac", curve(scores, 1.0, cost=0.02, scale=0.25))
    found = scores.score(ours, rivals, budget)
    assert found.rival == "adamw" and found.holds and not found.slower and not found.more
    assert found.speed == pytest.approx(2.0, rel=0.02)  # interpolation between evaluations
    assert found.steps == pytest.approx(0.25, rel=0.02)
    assert found.loss == pytest.approx(0.5, rel=0.02)
    slow = scores.score(record(scores, "kfac", curve(scores, 1.0, cost=0.02, scale=0.25), pace=2.0), rivals, budget)
    assert slow.speed == pytest.approx(4.0, rel=0.02)  # the machine was half as fast
    assert slow.steps == pytest.approx(0.25, rel=0.02)


def test_what_does_not_come_to_the_target_is_a_bound(scores: ModuleType) -> None:
    rivals = [record(scores, "adamw", curve(scores, 1.0))]
    budget = rivals[0].seconds
    found = scores.score(record(scores, "kfac", curve(scores, 0.1)), rivals, budget)
    assert found.slower and found.more and not found.holds
    assert found.speed == pytest.approx(0.5, rel=0.01)
    assert found.steps == pytest.approx(2.0, rel=0.01)
    assert found.loss > 10


def test_what_diverges_after_its_targets_does_not_hold(scores: ModuleType) -> None:
    rivals = [record(scores, "adamw", curve(scores, 1.0))]
    points = curve(scores, 1.0, scale=0.1)
    points[-1] = scores.Point(points[-1].step, points[-1].seconds, math.inf, math.inf)
    found = scores.score(record(scores, "kfac", points, end="diverged"), rivals, rivals[0].seconds)
    assert found.speed > 5 and not found.slower
    assert math.isinf(found.loss) and not found.holds


def test_records_survive_their_file(scores: ModuleType) -> None:
    points = [*curve(scores, 1.0, count=3), scores.Point(9.0, 0.09, math.inf, math.inf)]
    kept = record(scores, "sgd", points, end="diverged")
    read = scores.Record.read(kept.plain())
    assert [p.loss for p in read.points] == pytest.approx([p.loss for p in points])
    assert (read.setting, read.end, read.pace) == (kept.setting, kept.end, kept.pace)


def test_bad_rates_are_abandoned_half_way(generality: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """At three times the loss that the best trial had there."""
    losses = iter([1.0, 0.5, 3.1, 3.1, 2.9, 2.0])
    monkeypatch.setattr(generality, "level", lambda points, seconds: next(losses))
    attempt = generality.trial_of(generality.FAMILIES["softmax"](), generality.ENTRIES["sgd"], 0.05)
    best = attempt({"lr": 0.01}, None)
    ends = [best.end, *(attempt({"lr": lr}, best).end for lr in (0.02, 0.03))]
    assert ends == ["stopped", "abandoned", "stopped"]


def test_each_momentum_has_its_own_grid(generality: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    made = lambda *given: lambda setting, best: generality.Trial(setting, "stopped", 1, 1.0, abs(setting["lr"] - 1e-3))
    monkeypatch.setattr(generality, "trial_of", made)
    family = dataclasses.replace(generality.FAMILIES["softmax"](), momenta=(0.9, 0.5))
    trials = [trial.setting for trial in generality.grid(family, generality.ENTRIES["adamw"], 1.0)]
    assert [setting["momentum"] for setting in trials] == [0.9] * 4 + [0.5] * 4
    assert sorted(setting["lr"] for setting in trials[:4]) == [3e-4, 1e-3, 3e-3, 1e-2]


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon", "soap"])
def test_the_momentum_of_a_setting_is_used(generality: ModuleType, name: str) -> None:
    runs, models = importlib.import_module("_contest"), importlib.import_module("_networks")
    optimizer = runs.built(generality.ENTRIES[name], models.mlp(3, 4, 2), None, {"lr": 0.1, "momentum": 0.25})
    groups = [group for part in getattr(optimizer, "parts", [optimizer]) for group in part.param_groups]
    assert all((group["betas"][0] if "betas" in group else group["momentum"]) == 0.25 for group in groups)
    assert all(group["lr"] == 0.1 for group in groups)


def test_tuned_raced_and_reported(generality: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: str(tmp_path / f"generality.{name}") for name in ("tuned", "json", "png", "rivals")}
    common = ["--problem", "softmax", "--tuned", files["tuned"], "--scale", "0.02"]
    with pytest.raises(SystemExit, match="--tune --problem softmax --only adamw"):
        generality.main([*common, "--only", "adamw", "kfac"])
    generality.main([*common, "--only", "adamw", "sgd", "--tune"])
    generality.main([*common, "--only", "adamw", "sgd", "--seeds", "2", "--json", files["rivals"]])
    out = ["--json", files["json"], "--figure", files["png"]]
    ours = [*common, "--only", "kfac", "--rivals", files["rivals"]]
    with pytest.raises(SystemExit, match="no runs of rivals on softmax with seed 2"):
        generality.main([*ours, "--seeds", "3"])
    capsys.readouterr()
    generality.main([*ours, "--seeds", "2", *out])
    text = capsys.readouterr().out
    assert "### KFAC" in text and "| softmax regression 196-10" in text and "Ahead in CPU seconds on " in text
    assert "| softmax | cross-entropy, nats | " in text
    assert Path(files["png"]).read_bytes().startswith(b"\x89PNG")
    stored = generality.load(Path(files["json"]))["softmax"]
    assert generality.family_table({"softmax": generality.FamilyResult.read(stored)}) in text
