"""What came out on data held out: medians over the seeds, beside the best tuned rival; tables, a summary, a picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from _contest import Point, Record, Result, met
from _contest_report import dot_figure
from _held_out_problems import CHOSEN, PATIENCE, TABLES
from _report import markdown

TUNED = ("adamw", "sgd", "muon", "soap")
LABELS = {
    "adamw": "AdamW", "sgd": "SGD", "muon": "Muon", "soap": "SOAP", "schedulefree": "schedule-free AdamW",
    "kfac": "KFAC", "kfac_cosine": "KFAC, cosine", "kfac_linear": "KFAC, linear",
    "ekfac": "EKFAC", "ekfac_cosine": "EKFAC, cosine", "ekfac_linear": "EKFAC, linear",
}  # fmt: skip
NAMES = {
    "cnn": "CNN with BatchNorm", "vit": "ViT", "dropout": "MLP with dropout", "gpt": "GPT", "ratings": "ratings",
    "table": "noisy table", "lstm": "LSTM", "photograph": "photograph", "vae": "VAE", "resnet": "ResNet with BatchNorm",
    "labels": "wrong labels", "text": "text windows, GRU", "diabetes": "diabetes, standardised",
    "units": "diabetes, in its own units", "cancer": "breast cancer", "flipped": "make_classification, wrong labels",
    "friedman": "make_friedman1 with noise",
}  # fmt: skip
COLOURS = {"schedulefree": "0.6", "kfac": "black", "kfac_cosine": "C0", "kfac_linear": "C2", "ekfac": "crimson",
           "ekfac_cosine": "C1", "ekfac_linear": "C4"}  # fmt: skip


def loss_of(point: Point) -> float:
    """The held-out one; infinite where it is not finite."""
    return point.metric if math.isfinite(point.metric) and math.isfinite(point.loss) else math.inf


@dataclass(frozen=True)
class HeldOutResult(Result):
    """The runs of one problem, whose points have the training loss, and the held-out loss and metric as `metric` and
    `accuracy`.

    Attributes:
        objective: unit of the losses.
        metric: what is measured beside the loss.
        budget: seconds of a run; 0 where it stopped early.
    """

    objective: str
    metric: str
    budget: float

    def of(self, name: str) -> list[Record]:
        return [record for record in self.records if record.name == name]

    def best(self) -> str | None:
        """The tuned rival whose held-out loss is the lowest at the end."""
        losses = {name: middle([loss_of(record.last) for record in self.of(name)]) for name in TUNED}
        kept = {name: loss for name, loss in losses.items() if not math.isnan(loss)}
        return min(kept, key=kept.__getitem__, default=None)


def read(saved: Mapping[str, Any]) -> dict[str, HeldOutResult]:
    """Of a file, in the order of the table."""
    return {name: HeldOutResult.read(saved[name]) for name in NAMES if name in saved}


def parted(results: Mapping[str, HeldOutResult]) -> tuple[dict[str, HeldOutResult], dict[str, HeldOutResult]]:
    """Problems, and tables that stopped early."""
    tables = {name: one for name, one in results.items() if name in TABLES}
    return {name: one for name, one in results.items() if name not in TABLES}, tables


def middle(values: Sequence[float]) -> float:
    """The median; nan of none."""
    return statistics.median(values) if values else math.nan


def lowest(record: Record) -> Point:
    """The moment at which a user would have kept the model."""
    return min(record.points, key=loss_of)


def seconds_to(record: Record, target: float) -> float:
    """When the held-out loss first comes to the target; infinite if never."""
    points = [replace(point, loss=loss_of(point)) for point in record.points]
    for first, second in zip(points, points[1:], strict=False):
        if second.loss <= target:
            return second.seconds if math.isinf(first.loss) else met(first, second, target)[1]
    return math.inf


def shown(value: float, form: str = ".3g") -> str:
    return "-" if math.isnan(value) else f"{value:{form}}" if math.isfinite(value) else "not finite"


def ratio(result: HeldOutResult, name: str, at_best: bool = False) -> float:
    """The median of the seeds."""
    return middle(ratios(result, name, at_best))


def ratios(result: HeldOutResult, name: str, at_best: bool) -> list[float]:
    """Held-out loss at the end, or at both best moments, over the best tuned rival's; of each seed."""
    rival = result.best()
    end = (lambda record: loss_of(lowest(record))) if at_best else (lambda record: loss_of(record.last))
    theirs = {record.seed: end(record) for record in result.of(rival)} if rival else {}
    return [end(record) / theirs[record.seed] for record in result.of(name) if record.seed in theirs]


def losses(results: Mapping[str, HeldOutResult]) -> str:
    """Markdown: held-out loss at the end, of everyone."""
    names = [name for name in LABELS if any(result.of(name) for result in results.values())]
    rows = []
    for problem, result in results.items():
        cells = [shown(middle([loss_of(record.last) for record in result.of(name)])) for name in names]
        rows.append([NAMES[problem], "choices" if problem in CHOSEN else "unseen", result.title, *cells])
    return markdown(["problem", "half", "what", *(LABELS[name] for name in names)], rows)


def beside(results: Mapping[str, HeldOutResult], ours: str) -> Iterator[list[str]]:
    """A row for each problem: one of ours beside the best tuned rival."""
    for problem, result in results.items():
        rival, runs = result.best(), result.of(ours)
        if rival is None or not runs:
            continue
        theirs = result.of(rival)
        target = {record.seed: loss_of(record.last) for record in theirs}
        times = [seconds_to(record, target[record.seed]) for record in runs if record.seed in target]
        time = statistics.median_low(times) if times else math.nan
        pair = lambda what, of_all=(runs, theirs): " / ".join(
            shown(middle([what(r.last) for r in of])) for of in of_all
        )
        yield [
            NAMES[problem], LABELS[rival],
            *(shown(ratio(result, name), ".2f") for name in (ours, f"{ours}_cosine", f"{ours}_linear")),
            shown(ratio(result, ours, at_best=True), ".2f"),
            "not reached" if math.isinf(time) else f"{shown(time)} of {result.budget:g}",
            result.metric, pair(lambda point: point.accuracy), pair(lambda point: point.loss),
        ]  # fmt: skip


def stopped(results: Mapping[str, HeldOutResult]) -> str:
    """Markdown: the tables at their best epoch."""
    names = [name for name in ("adamw", "kfac", "ekfac") if any(result.of(name) for result in results.values())]
    rows = []
    for table, result in results.items():
        cells = []
        for name in names:
            ends = [lowest(record) for record in result.of(name)]
            loss, metric, step, seconds = (
                middle([what(end) for end in ends])
                for what in (loss_of, lambda e: e.accuracy, lambda e: e.step, lambda e: e.seconds)
            )
            epoch = shown(step / TABLES[table]().epoch, ".0f")
            cells.append(f"{shown(loss)} ({shown(metric)}; {epoch}; {shown(seconds, '.2f')} s)")
        rows.append([NAMES[table], result.metric, *cells])
    label = lambda name: "AdamW, 1e-3" if name == "adamw" else LABELS[name]
    return markdown(["table", "metric", *map(label, names)], rows)


def beside_each(results: Mapping[str, HeldOutResult], ours: str) -> str:
    """On how many problems the held-out loss at the end is below that of each rival."""
    end = lambda one, name: middle([loss_of(record.last) for record in one.of(name)])
    counts = []
    for rival in (*TUNED, "schedulefree"):
        both = [one for one in results.values() if one.of(ours) and one.of(rival)]
        lower = sum(end(one, ours) < end(one, rival) for one in both)
        counts.append(f"{LABELS[rival]}'s on {lower} of {len(both)}")
    return f"below {', '.join(counts)}"


def held_out_tables(results: Mapping[str, HeldOutResult]) -> str:
    """Markdown: the losses of all, ours beside the best tuned rival, and the tables that stopped early."""
    problems, tables = parted(results)
    head = ["problem", "best tuned rival", "constant lr ↓", "cosine ↓", "linear ↓", "best moments ↓",
            "CPU s to its loss ↓", "metric", "metric, ours / its", "training loss ↓, ours / its"]  # fmt: skip
    text = ""
    if problems:
        text += f"### Held-out loss at the end\n\n{losses(problems)}\n\n"
    for ours in ("kfac", "ekfac"):
        rows = list(beside(problems, ours))
        if rows:
            body = markdown(head, rows)
            text += f"### {LABELS[ours]}, times the best tuned rival's held-out loss\n\n{body}\n\n"
    if tables:
        title = f"Tables, stopped after {PATIENCE} epochs: held-out loss (metric; epoch; seconds)"
        text += f"### {title}\n\n{stopped(tables)}\n\n"
    machines = "; ".join(sorted({one.machine for one in results.values()}))
    seeds = len({record.seed for one in results.values() for record in one.records})
    return f"{text}Medians of {seeds} seed(s); {machines}.\n"


def held_out_figure(results: Mapping[str, HeldOutResult], path: Path) -> None:
    """Held-out loss over the best tuned rival's, at the end and at the best moment."""
    raced = {name: one for name, one in parted(results)[0].items() if one.best()}
    marked = lambda at_best, name, row: [(value, "o") for value in ratios(raced[row], name, at_best)]
    dot_figure(
        path,
        {title: partial(marked, at_best) for title, at_best in (("at the end", False), ("at the best moment", True))},
        {name: (LABELS[name], COLOURS[name]) for name in COLOURS if any(one.of(name) for one in raced.values())},
        {name: NAMES[name] + ("" if name in CHOSEN else " *") for name in raced},
        (0.3, 0.5, 0.7, 0.8, 1, 1.3, 1.6, 2, 3, 5, 10),
        "times the best tuned rival's held-out loss",
        "* no constant was chosen on it; left of 1 is better",
    )
