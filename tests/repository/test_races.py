"""Races: all loops train, rivals are what they are called, data held out stay unseen, and what is said follows."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support.architecture import ROOT
from support.combinations import member

PEERS = "sklearn", "mlxtend", "pytorch_optimizer", "schedulefree", "singd"
Load = Callable[[str], ModuleType]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """Imports a file of tests/benchmarks."""
    for peer in PEERS:
        pytest.importorskip(peer, reason="a peer of the bench extra is missing: make test installs it")
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "benchmarks"))
    return importlib.import_module


class Even:
    """A pace that brings every step to one second."""

    now = staticmethod(lambda: 1.0)
    scaled = staticmethod(lambda seconds: 1.0)


def held_out_run(load: Load, name: str, which: str, **rest: Any) -> Any:
    held_out = load("held_out")
    entry = next(one for one in held_out.CONTESTANTS if one.name == which)
    setting = {"lr": 1e-3, "decay": 0.0} if entry.lrs else {}
    return held_out.PacedRun((held_out.PROBLEMS | held_out.TABLES)[name](), entry, setting, 0, Even(), **rest)


def test_every_loop_trains_all_of_its_models(load: Load) -> None:
    generality, held_out = load("generality"), load("held_out")
    runs = {
        name: lambda make=make: generality.Run(make(), generality.ENTRIES["adamw"], {"lr": 3e-3}, seed=0)
        for name, make in generality.FAMILIES.items()
    } | {
        f"{name}, held out": lambda name=name: held_out_run(load, name, "adamw", budget=100.0)
        for name in held_out.PROBLEMS | held_out.TABLES
    }
    for name, start in runs.items():
        with member(name):
            run = start()
            before = [{key: p.detach().clone() for key, p in model.named_parameters()} for model in run.models]
            for _ in range(5):
                run.step()
            run.look()
            first, last = ((point.loss, point.metric) for point in (run.points[0], run.points[-1]))
            assert not run.end and all(map(math.isfinite, last)) and first != last
            for model, old in zip(run.models, before, strict=True):
                assert not [key for key, p in model.named_parameters() if torch.equal(p, old[key])]


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon", "soap", "shampoo", "singd", "empirical", "kfac", "adaptive"])
def test_every_contestant_lowers_the_loss(load: Load, name: str) -> None:
    race = load("race")
    assert name in race.ENTRIES and len(race.ENTRIES) == 10
    entry = race.ENTRIES[name]
    setting = {"lr": entry.lrs[1], **{axis: values[0] for axis, values in entry.axes.items()}} if entry.lrs else {}
    run = race.Run(race.PROBLEMS["cnn"](channels=(3, 4), batch=32), entry, setting, seed=0)
    before = [p.clone() for p in run.models[0].parameters()]
    for _ in range(30):
        run.step()
    run.evaluate()
    assert run.points[-1].loss < run.points[0].loss
    assert not any(map(torch.equal, run.models[0].parameters(), before))


def test_muon_is_that_of_torch(load: Load) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(12, 7, bias=False), nn.Linear(12, 7, bias=False)]
    layers[1].load_state_dict(layers[0].state_dict())
    ours = load("_race_rivals").Muon([layers[0].weight], 0.1, decay=2.0)
    theirs = torch.optim.Muon([layers[1].weight], 0.1, weight_decay=2.0, adjust_lr_fn="match_rms_adamw")
    start = layers[0].weight.detach().clone()
    for _ in range(3):
        gradient = torch.randn(7, 12)
        for layer, optimizer in zip(layers, (ours, theirs), strict=True):
            layer.weight.grad = gradient.clone()
            optimizer.step()
    moved = (layers[1].weight - start).norm()
    assert moved > 0.1
    assert (layers[0].weight - layers[1].weight).norm() < 0.03 * moved  # bfloat16 there


def test_factors_of_the_empirical_kfac(load: Load) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(27, 4))
    x, y = torch.randn(5, 2, 6, 6), torch.tensor([0, 1, 2, 3, 0])
    optimizer = load("_race_rivals").EmpiricalKFAC(model, 0.1, 0.1)
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


def test_held_out_text_is_not_trained_on(load: Load) -> None:
    """Some pages of the help are sections of others."""
    texts, _ = load("_held_out_problems").pages()
    joined = ["".join(map(chr, text.tolist())) for text in texts]
    for i, text in enumerate(joined):
        assert not any(i != j and text[len(text) // 2 :][:300] in other for j, other in enumerate(joined))


def test_rates_follow_the_clock(load: Load) -> None:
    """Steps of one second each, of a budget of four; a pace of half the seconds, and a step of SGD after eight."""
    for which, wanted in {"kfac": (1, 1, 1), "kfac_cosine": (1, 0.5, 0), "kfac_linear": (1, 0.5, 0)}.items():
        run = held_out_run(load, "diabetes", which, budget=4.0)
        usual, rates = run.groups[0][1], []
        for _ in range(6):
            run.step()
            rates.append(run.groups[0][0]["lr"] / usual)
        assert (rates[0], rates[2], rates[5]) == pytest.approx(wanted) and run.seconds == 6.0
    pace = load("held_out").Pace(load("held_out").TABLES["diabetes"]())
    pace.usual.durations, pace.reference = [0.02] * 30, 0.01  # twice as fast
    assert pace.scaled(0.05) == pytest.approx(0.025)
    pace.scaled(8 * 0.02)
    assert pace.usual.steps == 31


def test_a_schedule_free_model_is_judged_at_its_average(load: Load) -> None:
    """With BatchNorm's statistics of that place; training goes on where it was."""
    run = held_out_run(load, "resnet", "schedulefree")
    for _ in range(3):
        run.step()
    (model,) = run.models
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with run._averaged():
        assert any(not torch.allclose(state[key], p) for key, p in model.named_parameters())
        norm = next(layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d))
        assert norm.num_batches_tracked == load("held_out").RENEWED
    assert all(torch.allclose(state[key], value, atol=1e-6) for key, value in model.state_dict().items())
    assert run.optimizers[0].param_groups[0]["train_mode"]


def curve(scores: ModuleType, rate: float = 1.0, cost: float = 0.01, scale: float = 1.0) -> list[Any]:
    """Losses that fall as a power of the steps, evaluated at steps 1.1 apart."""
    steps = [0.0, *(1.1**i for i in range(40))]
    return [scores.Point(t, cost * t, scale * max(t, 0.5) ** -rate, t) for t in steps]


def record(scores: ModuleType, name: str, points: list[Any], pace: float = 1.0, end: str = "stopped") -> Any:
    setting = {} if name.startswith("kfac") else {"lr": 0.1}
    return scores.Record(name, setting, 0, end, int(points[-1].step), points[-1].seconds, points, pace)


def test_scores_follow_from_the_curves(load: Load) -> None:
    """Ours needs a quarter of the steps, each twice as dear: twice as fast, whatever the smoothing."""
    scores = load("_contest_report")
    rivals = [record(scores, "adamw", curve(scores)), record(scores, "sgd", curve(scores, scale=1.2))]
    score = lambda points, **rest: scores.score(record(scores, "kfac", points, **rest), rivals, rivals[0].seconds)
    found = score(curve(scores, cost=0.02, scale=0.25))
    assert found.rival == "adamw" and not found.slower and not found.more
    # to within the interpolation between evaluations
    assert (found.speed, found.steps, found.loss) == pytest.approx((2.0, 0.25, 0.5), rel=0.02)
    slow = score(curve(scores, cost=0.02, scale=0.25), pace=2.0)  # the machine was half as fast
    assert (slow.speed, slow.steps) == pytest.approx((4.0, 0.25), rel=0.02)
    bound = score(curve(scores, 0.1))  # does not come to its target
    assert bound.slower and bound.more and bound.loss > 10
    assert (bound.speed, bound.steps) == pytest.approx((0.5, 2.0), rel=0.01)
    points = curve(scores, scale=0.1)
    points[-1] = scores.Point(points[-1].step, points[-1].seconds, math.inf, math.inf)
    gone = score(points, end="diverged")
    assert gone.speed > 5 and not gone.slower and math.isinf(gone.loss)


def test_a_rival_under_a_schedule_counts_with_its_last_loss(load: Load) -> None:
    """No mean over the last evaluations, which would be higher; rivals at a constant rate are judged apart."""
    scores = load("_contest_report")
    rivals = [
        record(scores, "adamw", curve(scores)),
        record(scores, "adamw_cosine", curve(scores, scale=0.5), pace=2.0),
    ]
    budget, last = rivals[0].seconds, curve(scores, scale=0.5)[-1]
    ours = record(scores, "kfac", curve(scores, scale=0.25, cost=0.02))
    saved = scores.FamilyResult("an MLP", "2 x CPU", [*rivals, ours], "nats", "accuracy", budget).plain()
    result = scores.FamilyResult.read(json.loads(json.dumps(saved, allow_nan=False)))
    (constant,), (annealed,) = (result.scores(which)["kfac"] for which in (False, True))
    assert (constant.rival, annealed.rival) == ("adamw", "adamw_cosine")
    assert annealed.loss == pytest.approx(scores.level(ours.points, budget) / last.loss)
    steps, _ = scores.crossing(ours.points, last.loss)
    assert (annealed.steps, annealed.speed) == pytest.approx((steps / last.step, budget / (0.02 * steps)))
    assert constant.loss == pytest.approx(0.5, rel=0.02)
    _, (row,) = scores.family_table({"vit": result}, "kfac")
    assert row[1] == row[5] == "AdamW" and row[6] == f"{annealed.speed:.2f}" and row[7] == f"{annealed.steps:.2f}"


def test_ours_beside_the_best_tuned_rival(load: Load) -> None:
    """On data held out: schedule-free AdamW is no tuned rival; ours is at its best before the end, and diverges."""
    report = load("_held_out_report")
    ends = {
        "adamw": [2.0, 1.5, 1.0], "sgd": [2.0, 1.0, 0.8], "schedulefree": [2.0, 0.5, 0.5], "kfac": [2.0, 0.4, 1.2],
        "kfac_cosine": [2.0, 1.0, 0.84], "kfac_linear": [2.0, 1.0, math.inf],
    }  # fmt: skip
    points = {
        name: [report.Point(10 * i, float(i), 0.5, loss, 0.9) for i, loss in enumerate(held)]
        for name, held in ends.items()
    }
    records = [record(report, name, of_name) for name, of_name in points.items()]
    saved = report.HeldOutResult("an MLP", "2 x CPU", records, "nats", "accuracy", 2.0).plain()
    one = report.HeldOutResult.read(json.loads(json.dumps(saved, allow_nan=False)))
    assert one.best() == "sgd"
    assert report.ratio(one, "kfac") == pytest.approx(1.5) and report.ratio(one, "kfac", True) == pytest.approx(0.5)
    seconds = math.log(2.0 / 0.8) / math.log(2.0 / 0.4)
    assert report.seconds_to(one.of("kfac")[0], 0.8) == pytest.approx(seconds)
    assert math.isinf(report.seconds_to(one.of("adamw")[0], 0.8)) and math.isinf(report.ratio(one, "kfac_linear"))
    text = report.held_out_tables({"vit": one})
    below = report.beside_each({"vit": one}, "kfac_cosine")
    assert below.startswith("below AdamW's on 1 of 1, SGD's on 0 of 1") and "schedule-free AdamW's on 0 of 1" in below
    assert "| ViT | SGD | 1.50 | 1.05 | not finite | 0.50 |" in text


def test_grids_widen(load: Load) -> None:
    """The middle rate first, other settings with the best rate, and on while it lies at the end of the grid."""
    race = load("race")

    def attempt(setting: dict[str, float], best: Any) -> Any:
        needed = 10 * (1 + abs(math.log10(setting["lr"] / 1e-4))) + setting.get("every", 0)  # the best is 1e-4
        return race.Trial(setting, "reached", needed, needed, 1.0)

    trials = list(race.tune(race.ENTRIES["adamw"], (1e-3, 3e-3, 1e-2), attempt))
    assert [trial.setting["lr"] for trial in trials] == [3e-3, 1e-3, 1e-2, 3e-4, 1e-4, 3e-5]
    assert min(trials, key=lambda trial: trial.rank).setting == {"lr": 1e-4}
    trials = list(race.tune(race.ENTRIES["singd"], (1e-5, 1e-4, 1e-3), attempt))
    tried = [(1e-4, 10), (1e-5, 10), (1e-3, 10), (1e-4, 1)]
    assert [(trial.setting["lr"], trial.setting["every"]) for trial in trials[:4]] == tried
    failed = lambda setting, best: race.Trial(setting, "diverged", 1, 1.0, math.inf)
    rates = [trial.setting["lr"] for trial in race.tune(race.ENTRIES["sgd"], (1e-2, 3e-2, 1e-1), failed)]
    assert rates[3:5] == [3e-3, 1e-3]  # lower


@pytest.mark.parametrize(
    ("script", "problem", "scale", "said"),
    [
        ("race", "tanh", "0.01", "| contestant | setting |"),
        ("generality", "softmax", "0.02", "| family | best rival | times as fast ↑ |"),
        ("held_out", "table", "0.005", "### KFAC, times the best tuned rival's"),
    ],
)
def test_quick_run(
    load: Load, script: str, problem: str, scale: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rivals are tuned and raced into a file, then ours into the same."""
    main, tuned, file = load(script).main, tmp_path / "tuned.json", tmp_path / "runs.json"
    common = ["--problem", problem, "--tuned", str(tuned), "--scale", scale, "--seeds", "1"]
    with pytest.raises(SystemExit, match=f"--tune --problem {problem} --only adamw"):
        main([*common, "--only", "adamw"])
    main([*common, "--only", "adamw", "sgd", "--tune"])
    grid = json.loads(tuned.read_text())[problem]["adamw"]["grid"]
    assert len({json.dumps(trial["setting"]) for trial in grid}) == len(grid) >= 3
    out = [*common, "--json", str(file)]
    main([*out, "--only", "adamw"])
    rivals = json.loads(file.read_text())[problem]["records"]
    capsys.readouterr()
    main([*out, "--only", *(["adamw", "kfac"] if script == "race" else ["kfac"])])
    assert said in capsys.readouterr().out
    records = json.loads(file.read_text())[problem]["records"]
    assert {one["name"].split("_")[0] for one in records} == {"adamw", "kfac"}
    if script != "race":
        assert records[0] == rivals[0]


def test_rivals_under_a_cosine_are_raced_beside_the_runs_that_are_there(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tuned from the best constant rate upwards, and annealed over the time that all have."""
    generality, tuned, file = load("generality"), tmp_path / "tuned.json", tmp_path / "runs.json"
    common = ["--problem", "softmax", "--tuned", str(tuned), "--scale", "0.05", "--seeds", "1"]
    read = lambda path: json.loads(path.read_text())["softmax"]
    generality.main([*common, "--only", "sgd", "adamw", "--tune"])
    generality.main([*common, "--only", "adamw", "kfac", "--json", str(file)])
    before = read(file)["records"]
    generality.main([*common, "--only", "adamw_cosine", "--tune"])
    first, second, *_ = [trial["setting"]["lr"] for trial in read(tuned)["adamw_cosine"]["grid"]]
    lr = read(tuned)["adamw"]["chosen"]["lr"]
    assert {first, second} == {lr, generality.half_decade(lr, up=True)}
    runs: list[Any] = []
    make = generality.Run
    monkeypatch.setattr(generality, "Run", lambda *args, **rest: runs.append(make(*args, **rest)) or runs[-1])
    capsys.readouterr()
    generality.main([*common, "--only", "adamw_cosine", "--json", str(file)])
    assert "| AdamW, cosine |" in capsys.readouterr().out
    records = read(file)["records"]
    assert records[:-1] == before and records[-1]["name"] == "adamw_cosine"
    (run,) = [run for run in runs if run.entry.name == "adamw_cosine"]
    assert all(group["lr"] < 0.3 * peak for group, peak in run.groups)
