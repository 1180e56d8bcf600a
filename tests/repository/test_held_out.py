"""Problems with data held out: nothing leaks, schedules follow the clock, and what is said follows from the runs."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
NAMES = (
    "cnn", "vit", "dropout", "gpt", "ratings", "table", "lstm", "photograph", "vae", "resnet", "labels", "text",
)  # fmt: skip
TABLES = ("diabetes", "units", "cancer", "flipped", "friedman")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture
def held_out(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for peer in ("sklearn", "mlxtend", "pytorch_optimizer", "schedulefree"):
        pytest.importorskip(peer, reason="a peer of the bench extra is missing: make test installs it")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("held_out")


@pytest.fixture
def report(held_out: ModuleType) -> ModuleType:
    return importlib.import_module("_held_out_report")


class Even:
    """A pace that brings every step to so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def now(self) -> float:
        return self.seconds

    def scaled(self, seconds: float) -> float:
        return self.seconds


def run_of(held_out: ModuleType, name: str, which: str, **rest: Any) -> Any:
    entry = next(one for one in held_out.CONTESTANTS if one.name == which)
    problem = {**held_out.PROBLEMS, **held_out.TABLES}[name]()
    setting = {"lr": 1e-3, "decay": 0.0} if entry.lrs else {}
    return held_out.ScheduledRun(problem, entry, setting, 0, Even(1.0), **rest)


def test_half_of_the_problems_are_unseen(held_out: ModuleType, report: ModuleType) -> None:
    data = importlib.import_module("_held_out_problems")
    assert (*data.CHOSEN, *data.UNSEEN) == tuple(held_out.PROBLEMS) == NAMES
    assert len(data.CHOSEN) == len(data.UNSEEN)
    assert tuple(held_out.TABLES) == TABLES
    assert set(report.NAMES) == {*NAMES, *TABLES}
    assert set(report.LABELS) == {one.name for one in held_out.CONTESTANTS}
    assert all(held_out.PROBLEMS[name]().name == name for name in NAMES) and set(held_out.PACES) == set(NAMES)


@pytest.mark.parametrize("name", (*NAMES, *TABLES))
def test_the_loop_of_a_problem_trains_and_is_judged(held_out: ModuleType, name: str) -> None:
    run = run_of(held_out, name, "adamw", budget=100.0)
    before = {key: p.detach().clone() for key, p in run.models[0].named_parameters()}
    for _ in range(4):
        run.step()
    run.look()
    first, last = run.points[0], run.points[-1]
    assert not run.end and all(math.isfinite(value) for value in (last.loss, last.metric, last.accuracy))
    assert first.metric != last.metric
    still = [key for key, p in run.models[0].named_parameters() if torch.equal(p, before[key])]
    assert not still, f"not trained: {still}"


def test_held_out_text_is_not_trained_on(held_out: ModuleType) -> None:
    """Some pages of the help are sections of others."""
    data = importlib.import_module("_held_out_problems")
    texts, count = data.pages()
    assert max(int(text.max()) for text in texts) == count - 1
    joined = ["".join(map(chr, text.tolist())) for text in texts]
    assert not [
        (i, j)
        for i, text in enumerate(joined)
        for j, other in enumerate(joined)
        if i != j and text[len(text) // 2 :][:300] in other
    ]


def test_shifts_move_whole_images(held_out: ModuleType) -> None:
    data = importlib.import_module("_held_out_problems")
    x = torch.zeros(200, 2, 6, 6)
    x[:, 0, 2, 3], x[:, 1, 3, 2] = 1, 2
    moved = data.shifted(2)(x, torch.Generator().manual_seed(0))
    first, second = (moved[:, channel].flatten(1).nonzero()[:, 1] for channel in (0, 1))
    assert torch.equal(moved.flatten(1).sum(1), torch.full((200,), 3.0)) and torch.equal(second - first, 5 + 0 * first)
    rows, columns = first // 6, first % 6
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (0, 4, 1, 5)


@pytest.mark.parametrize(
    "which, wanted", [("kfac", (1, 1, 1)), ("kfac_cosine", (1, 0.5, 0)), ("kfac_linear", (1, 0.5, 0))]
)
def test_rates_follow_the_clock(held_out: ModuleType, which: str, wanted: tuple[float, ...]) -> None:
    """Four steps of one second each, of a budget of two, four and eight."""
    run = run_of(held_out, "diabetes", which, budget=4.0)
    usual, rates = run.groups[0][1], []
    for _ in range(6):
        run.step()
        rates.append(run.groups[0][0]["lr"] / usual)
    assert (rates[0], rates[2], rates[5]) == pytest.approx(wanted) and run.seconds == 6.0


def test_seconds_are_those_of_the_other_machine(held_out: ModuleType) -> None:
    problem = held_out.TABLES["diabetes"]()
    pace = held_out.Pace(problem)
    pace.usual.durations = [0.02] * 30
    pace.reference = 0.01  # twice as fast
    assert pace.scaled(0.05) == pytest.approx(0.025)
    steps = pace.usual.steps
    pace.scaled(8 * 0.02)
    assert pace.usual.steps == steps + 1


def test_a_schedule_free_model_is_judged_at_its_average(held_out: ModuleType) -> None:
    """With BatchNorm's statistics of that place; training goes on where it was."""
    runs = [run_of(held_out, "resnet", "schedulefree") for _ in range(2)]
    for run in runs:
        for _ in range(3):
            run.step()
    state = {key: value.clone() for key, value in runs[0].models[0].state_dict().items()}
    runs[0].evaluate()
    assert all(torch.allclose(state[key], value, atol=1e-6) for key, value in runs[0].models[0].state_dict().items())
    with runs[1]._averaged():
        model = runs[1].models[0]
        assert any(not torch.allclose(state[key], p) for key, p in model.named_parameters())
        norm = next(layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d))
        assert norm.momentum == 0.1 and norm.num_batches_tracked == held_out.RENEWED
    assert runs[1].optimizers[0].param_groups[0]["train_mode"]


def record(report: ModuleType, name: str, held: list[float], seed: int = 0, train: float = 0.5) -> Any:
    points = [report.Point(10 * i, float(i), train, loss, 0.9) for i, loss in enumerate(held)]
    return report.Record(name, {}, seed, "stopped", 10 * (len(held) - 1), len(held) - 1.0, points)


def result(report: ModuleType, *records: Any) -> Any:
    return report.HeldOutResult("an MLP", "2 x CPU", list(records), "nats", "accuracy", 2.0)


def test_ours_beside_the_best_tuned_rival(report: ModuleType) -> None:
    """Schedule-free AdamW is no tuned rival; ours is at its best before the end."""
    one = result(
        report, record(report, "adamw", [2.0, 1.5, 1.0]), record(report, "sgd", [2.0, 1.0, 0.8]),
        record(report, "schedulefree", [2.0, 0.5, 0.5]), record(report, "kfac", [2.0, 0.4, 1.2]),
        record(report, "kfac_cosine", [2.0, 1.0, 0.84]), record(report, "kfac_linear", [2.0, 1.0, 2.4]),
    )  # fmt: skip
    assert one.best() == "sgd"
    assert report.ratio(one, "kfac") == pytest.approx(1.5) and report.ratio(one, "kfac", True) == pytest.approx(0.5)
    seconds = math.log(2.0 / 0.8) / math.log(2.0 / 0.4)
    assert report.seconds_to(one.of("kfac")[0], 0.8) == pytest.approx(seconds)
    assert math.isinf(report.seconds_to(one.of("adamw")[0], 0.8))
    lines = report.summary({"vit": one})
    assert "within 5% of the best tuned rival's on 0 of 1, at worst 1.50 times (ViT)" in lines
    assert "on 1 of 1, at worst 1.05 times (ViT)" in lines  # under a cosine
    assert (
        "KFAC, cosine: held-out loss below AdamW's on 1 of 1, SGD's on 0 of 1, schedule-free AdamW's on 0 of 1."
        in lines
    )
    assert "in 1 of 2 cases, at worst 2.00 times (ViT, linear)" in lines
    text = report.held_out_tables({"vit": one})
    assert "| ViT | SGD | 1.50 | 1.05 | 3.00 | 0.50 |" in text


def test_what_diverges_is_worst_and_survives_its_file(report: ModuleType) -> None:
    gone = record(report, "kfac", [2.0, 1.0])
    points = [*gone.points, report.Point(20, 2.0, math.inf, math.inf)]
    gone = report.replace(gone, points=points, end="diverged")
    one = result(report, record(report, "adamw", [2.0, 1.5, 1.0]), gone)
    read = report.HeldOutResult.read(json.loads(json.dumps(one.plain(), allow_nan=False)))
    assert math.isinf(report.ratio(read, "kfac")) and "not finite" in report.held_out_tables({"vit": read})


def test_trials_are_given_up_and_not_made_again(held_out: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where their held-out loss is far above the best one's at a quarter or half of the budget."""
    entry, problem = held_out.CONTESTANTS[0], held_out.PROBLEMS["table"]()
    values = iter([1.0, 0.5, 0.3, 1.7, 1.5, 0.7, 1.5, 0.6, 0.2])
    monkeypatch.setattr(held_out, "loss_of", lambda point: next(values))
    attempt = held_out.trial_of(problem, entry, 4.0, Even(1.0))
    best = attempt({"lr": 1e-3}, None)
    trials = [best, *(attempt({"lr": lr}, best) for lr in (1e-4, 1e-5, 1e-2))]
    assert [(one.end, one.loss, one.steps) for one in trials] == [
        ("stopped", 0.3, 4), ("abandoned", 1.7, 1), ("abandoned", 0.7, 2), ("stopped", 0.2, 4),
    ]  # fmt: skip
    saved = json.loads(json.dumps([vars(one) for one in trials]))
    again = held_out.trial_of(problem, entry, 4.0, Even(1.0), saved)
    assert again({"lr": 1e-2}, best).loss == 0.2  # no value is left for another run


def test_a_table_stops_after_its_patience(held_out: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_out, "loss_of", lambda point: abs(point.step - 3 * 6) if point.step else 100.0)
    table = held_out.TABLES["diabetes"]()
    entry = held_out.STOPPED[0]
    assert (entry.family, table.epoch) == ("adamw", 6)
    done = held_out.trained(table, entry, {}, 0, Even(1.0), math.inf)
    assert done.steps == (3 + held_out.PATIENCE) * 6 and len(done.points) == 1 + 3 + held_out.PATIENCE


def test_tuned_raced_merged_and_reported(
    held_out: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {name: str(tmp_path / f"held.{name}") for name in ("tuned", "json", "png")}
    common = ["--tuned", files["tuned"], "--scale", "0.005", "--problem", "table"]
    with pytest.raises(SystemExit, match="--tune --problem table --only adamw"):
        held_out.main([*common, "--only", "adamw"])
    held_out.main([*common, "--only", "adamw", "--tune"])
    grid = held_out.load(Path(files["tuned"]))["table"]["adamw"]["grid"]
    assert len({held_out.words(trial["setting"]) for trial in grid}) == len(grid) >= 6
    stored = [*common, "--json", files["json"], "--seeds", "1"]
    held_out.main([*stored, "--only", "adamw", "schedulefree"])
    rivals = held_out.load(Path(files["json"]))["table"]["records"]
    capsys.readouterr()
    held_out.main([*stored, "--only", "kfac", "--figure", files["png"]])
    text = capsys.readouterr().out
    assert "### KFAC, times the best tuned rival's" in text and "| noisy table | AdamW |" in text
    assert Path(files["png"]).read_bytes().startswith(b"\x89PNG")
    records = held_out.load(Path(files["json"]))["table"]["records"]
    assert records[:2] == rivals
    assert [one["name"] for one in records[2:]] == ["kfac", "kfac_cosine", "kfac_linear"]
    held_out.main([*stored, "--only", "kfac", "--keep"])
    assert held_out.load(Path(files["json"]))["table"]["records"] == records
