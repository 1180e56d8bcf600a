"""What came out of the races: tables and figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from _race_rivals import ENTRIES, OURS, RIVALS, Setting
from _race_run import Point, Run
from _report import markdown, words

OWN = {entry.name for entry in OURS}
PALETTE = ("black", "crimson", "royalblue", "C1", "C2", "C4", "C5", "C6", "C8", "C9")
DASHES = ("-", "--", "-.", "-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (1, 2)))
COLOURS = {entry.name: colour for entry, colour in zip((*OURS, *RIVALS), PALETTE, strict=True)}
LINES = {entry.name: dashes for entry, dashes in zip((*OURS, *RIVALS), DASHES, strict=True)}


@dataclass(frozen=True)
class Record:
    """A run that is over."""

    name: str
    setting: Setting
    seed: int
    end: str
    steps: int
    seconds: float
    reached: Point | None
    points: list[Point]

    @classmethod
    def of(cls, run: Run) -> Record:
        fields = run.entry.name, run.setting, run.seed, run.end, run.steps, run.seconds, run.reached, run.points
        return cls(*fields)

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> Record:
        def point(values: Sequence[float | None]) -> Point:
            return Point(*(math.nan if value is None else value for value in values))

        reached = None if saved["reached"] is None else point(saved["reached"])
        return cls(**{**saved, "reached": reached, "points": [point(values) for values in saved["points"]]})

    def plain(self) -> dict[str, Any]:
        """For JSON, which has no nan."""

        def values(point: Point) -> list[float | None]:
            return [value if math.isfinite(value) else None for value in astuple(point)]

        reached = None if self.reached is None else values(self.reached)
        return {**vars(self), "reached": reached, "points": [values(point) for point in self.points]}


@dataclass(frozen=True)
class Result:
    """The races of one problem, over all seeds."""

    title: str
    unit: str
    target: float
    clock: str
    machine: str
    records: list[Record]

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> Result:
        return cls(**{**saved, "records": [Record.read(record) for record in saved["records"]]})

    def plain(self) -> dict[str, Any]:
        return {**vars(self), "records": [record.plain() for record in self.records]}

    def grouped(self) -> dict[str, list[Record]]:
        """By contestant, in the order of the race."""
        found: dict[str, list[Record]] = {}
        for record in self.records:
            found.setdefault(record.name, []).append(record)
        return found

    def best_rivals(self) -> list[str]:
        """The two that come to the target first, in the median of the seeds."""
        seconds = {name: middle(seconds_of(records)) for name, records in self.grouped().items() if name not in OWN}
        return sorted(seconds, key=lambda name: seconds[name])[:2]


def grid_lines(tuned: Mapping[str, Mapping[str, Any]], title: str) -> Iterator[str]:
    """The grids of one problem, as they stand in the file of tuned settings."""
    yield f"**{title}**\n"
    for name, found in tuned.items():
        points = []
        for trial in sorted(found["grid"], key=lambda trial: [*reversed(trial["setting"].values())]):
            loss = "not finite" if trial["loss"] is None else f"{trial['loss']:.3g}"
            if trial["end"] == "reached":
                outcome = f"{trial['steps']:.0f} steps, {trial['seconds']:.1f} s"
            else:
                outcome = f"{loss} after {trial['steps']:.0f} steps, {trial['seconds']:.1f} s"
            mark = "**" if trial["setting"] == found["chosen"] else ""
            points.append(f"{mark}{words(trial['setting'])}: {outcome}{mark}")
        yield f"- {ENTRIES[name].label}: " + "; ".join(points)
    yield ""


def middle(values: Iterable[float]) -> float:
    """The median, where infinite values count as such; nan without values."""
    kept = [value for value in values if not math.isnan(value)]
    return statistics.median_low(kept) if math.inf in kept else statistics.median(kept) if kept else math.nan


def seconds_of(records: Sequence[Record]) -> list[float]:
    return [record.reached.seconds if record.reached else math.inf for record in records]


def cells(records: Sequence[Record], best: float, sgd_step: float) -> list[str]:
    """A row of the table; `best` is the median of the fastest rival, `sgd_step` milliseconds."""
    seconds = seconds_of(records)
    median, worst = middle(seconds), max(seconds)
    step = middle(1e3 * record.seconds / record.steps for record in records)
    first = [ENTRIES[records[0].name].label, words(records[0].setting)]
    last = [f"{step:.3g}", f"{step / sgd_step:.2f}" if sgd_step else "-"]
    if math.isinf(median):
        ends = [record.points[-1] for record in records]
        loss = middle(end.train if math.isfinite(end.train) else math.inf for end in ends)
        after = f"{loss:.3g} after {middle(end.seconds for end in ends):.3g} s"
        steps = f"{middle(record.steps for record in records):.0f}"
        return [*first, f"- (diverged after {steps} steps)" if math.isinf(loss) else f"- ({after})", "-", steps, *last,
                *outcome(ends)]  # fmt: skip
    ends = [record.reached for record in records if record.reached]
    span = f"{min(seconds):.3g} - {worst:.3g}" if math.isfinite(worst) else f"{len(ends)} of {len(records)} seeds"
    steps = middle(end.step for end in ends)
    ratio = f"{median / best:.2f}" if math.isfinite(best) else "-"
    return [*first, f"{median:.3g} ({span})", ratio, f"{steps:.0f}", *last, *outcome(ends)]


def outcome(ends: Sequence[Point]) -> list[str]:
    """Test loss and accuracy."""
    loss, accuracy = middle(end.test for end in ends), middle(end.accuracy for end in ends)
    return [f"{loss:.3g}" if math.isfinite(loss) else "-", "-" if math.isnan(accuracy) else f"{100 * accuracy:.1f} %"]


def table(result: Result) -> str:
    """Markdown; medians over the seeds."""
    groups = result.grouped()
    times = {name: middle(seconds_of(records)) for name, records in groups.items()}
    best = min((time for name, time in times.items() if name not in OWN), default=math.inf)
    sgd_step = middle(1e3 * record.seconds / record.steps for record in groups.get("sgd", []))
    head = ["contestant", "setting", f"{result.clock} to target (min - max)", "to best rival", "steps", "ms per step",
            "to SGD's", "test loss", "accuracy"]  # fmt: skip
    order = sorted(groups, key=lambda name: times[name])
    rows = [cells(groups[name], best, 0.0 if math.isnan(sgd_step) else sgd_step) for name in order]
    body = markdown(head, "llr", rows)
    seeds = len({record.seed for record in result.records})
    note = f"Training loss {result.target:g} {result.unit}; {seeds} seed(s); {result.machine}."
    return f"### {result.title}\n\n{note}\n\n{body}\n"


def figure(results: Mapping[str, Result], path: Path) -> None:
    """Training loss over seconds: a panel per problem, medians of the seeds and bands from least to most."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogFormatter

    columns = min(2, len(results))
    rows = -(-len(results) // columns)
    drawn, grid = plt.subplots(rows, columns, figsize=(6.4 * columns, 4.4 * rows + 1.1), squeeze=False)
    handles: dict[str, Any] = {}
    for axes in grid.flat[len(results) :]:
        axes.set_visible(False)
    for axes, result in zip(grid.flat, results.values(), strict=False):
        for name, records in result.grouped().items():
            at, curves = sampled(records)
            own, is_best = name in OWN, name in result.best_rivals()
            colour = COLOURS[name] if own or is_best else "0.75"
            style = {"color": colour, "ls": LINES[name], "lw": 2.8 if own else 1.3, "zorder": 3 if own else 2}
            (line,) = axes.plot(at, np.median(curves, 0), label=ENTRIES[name].label, **style)
            handles.setdefault(name, line)
            if own or is_best:
                handles[name] = line  # in the colour that it has where it is among the best
                axes.fill_between(at, curves.min(0), curves.max(0), color=colour, alpha=0.12, lw=0)
        axes.axhline(result.target, color="0.3", lw=0.8, ls=":")
        axes.set(xscale="log", yscale="log", xlabel=result.clock, ylabel=f"training loss [{result.unit}]")
        last = max(record.points[-1].seconds for record in result.records)
        axes.set_xlim(5e-3 * last, 1.2 * last)
        top = max(record.points[0].train for record in result.records)
        axes.set_ylim(0.8 * result.target, 1.5 * top)
        axes.set_title(result.title, fontsize=9, wrap=True)
        axes.grid(which="major", color="0.9", lw=0.6)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
            axis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
    drawn.legend(
        handles.values(),
        [ENTRIES[name].label for name in handles],
        loc="lower center",
        ncols=3 * columns,
        frameon=False,
        handlelength=3.5,
        title="medians of seeds, bands from best to worst; dotted: target; grey: all rivals but the best two",
    )
    drawn.tight_layout(rect=(0, 1.1 / (4.4 * rows + 1.1), 1, 1))
    drawn.savefig(path, dpi=130)
    plt.close(drawn)


def sampled(records: Sequence[Record]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds, and the losses of every seed at them: geometric between evaluations, the last value after the end."""
    paths = []
    for record in records:
        points = [point for point in record.points if point.seconds > 0 and 0 < point.train < math.inf]
        before = [point for point in points if not record.reached or point.seconds < record.reached.seconds]
        paths.append(before + ([record.reached] if record.reached else []))
    paths = [path for path in paths if path]
    if not paths:
        return np.ones(1), np.full((1, 1), np.nan)
    at = np.geomspace(min(path[0].seconds for path in paths), max(path[-1].seconds for path in paths), 300)
    curves = [
        np.exp(np.interp(np.log(at), np.log([p.seconds for p in path]), np.log([p.train for p in path])))
        for path in paths
    ]
    return at, np.stack(curves)
