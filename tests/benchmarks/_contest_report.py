"""What came out of the races: curves of the loss and what they say of ours beside the rivals, tables and figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from _contest import LEAD, Point, Record, Result, met
from _race_rivals import ANNEALED, ENTRIES, OURS, RIVALS
from _report import markdown, words

WINDOW = 1.3  # a loss is the geometric mean over the evaluations since this fraction of its steps
FLOOR = 1e-9  # losses below count as this: single precision has nothing to say there
ADAMW = "adamw"
geometric = lambda values: math.exp(statistics.fmean(math.log(value) for value in values))
seconds_of = lambda records: [record.reached.seconds if record.reached else math.inf for record in records]


def smoothed(points: Sequence[Point]) -> list[Point]:
    """The same with the geometric mean of the losses over the last part of the steps.

    Evaluations are spaced geometrically, so that all curves are smoothed alike however many steps they have.
    """
    found = []
    for i, point in enumerate(points):
        near = [math.log(max(p.loss, FLOOR)) for p in points[: i + 1] if p.step * WINDOW > point.step or p is point]
        mean = statistics.fmean(near)
        found.append(replace(point, loss=math.exp(mean) if mean < math.inf else math.inf))
    return found


def level(points: Sequence[Point], seconds: float) -> float:
    """The smoothed loss after so many seconds; the last one after the end."""
    curve = smoothed(points)
    after = next((i for i, point in enumerate(curve) if point.seconds >= seconds), len(curve))
    if after in (0, len(curve)):
        return curve[min(after, len(curve) - 1)].loss
    first, second = curve[after - 1], curve[after]
    if math.isinf(second.loss):
        return math.inf
    part = (seconds - first.seconds) / (second.seconds - first.seconds)
    return math.exp((1 - part) * math.log(first.loss) + part * math.log(second.loss))


def crossing(points: Sequence[Point], target: float) -> tuple[float, float] | None:
    """Steps and seconds at which the smoothed loss first comes to the target; None where it never does."""
    curve = smoothed(points)
    for first, second in zip(curve, curve[1:], strict=False):
        if second.loss <= target:
            return met(first, second, target)
    return None


def ended(name: str, points: Sequence[Point], seconds: float) -> float:
    """The loss after so many seconds; at the end of a schedule, which has no noise left, it is not smoothed."""
    return points[-1].loss if name in ANNEALED else level(points, seconds)


def alike(rivals: Sequence[Record], annealed: bool) -> list[Record]:
    """Those under a cosine, or those at a constant rate, at the pace of the first of all."""
    return [rival.at_pace(rivals[0].pace) for rival in rivals if (rival.name in ANNEALED) is annealed]


@dataclass(frozen=True)
class Targets:
    """What the rivals leave to ours, on one seed.

    Attributes:
        best: the rival with the lowest loss at the end of the budget.
        loss: that loss.
        seconds: when a rival first came to it.
        adamw: AdamW's loss at the end of the budget.
        steps: of AdamW, when it first came to it.
    """

    best: str
    loss: float
    seconds: float
    adamw: float
    steps: float

    @classmethod
    def of(cls, rivals: Sequence[Record], budget: float) -> Targets:
        """
        Raises:
            ValueError: no run of AdamW among them, or none that ended with a finite loss.
        """
        ends = {record.name: ended(record.name, record.points, budget) for record in rivals}
        adamw = next((record for record in rivals if record.name.startswith(ADAMW)), None)
        if adamw is None or not math.isfinite(ends[adamw.name]):
            raise ValueError("the rivals need a run of AdamW that ends with a finite loss")
        best = min(ends, key=ends.__getitem__)
        met = [crossing(record.points, ends[best]) for record in rivals]
        steps, _ = crossing(adamw.points, ends[adamw.name]) or (adamw.points[-1].step, budget)
        seconds = min((found[1] for found in met if found), default=budget)
        return cls(best, ends[best], seconds, ends[adamw.name], steps)


@dataclass(frozen=True)
class Score:
    """One of ours on one seed.

    Attributes:
        end: how it ended.
        speed: the best rival's CPU seconds to its own final loss over ours; above 1 is ahead.
        slower: ours did not come to it, so that the speed is below the number given.
        steps: ours to AdamW's final loss over AdamW's.
        more: ours did not come to it, so that the ratio is above the number given.
        loss: ours over the best rival's after the budget.
        metric: on the test part, after the budget.
        rival: the best rival, and its metric.
    """

    end: str
    speed: float
    slower: bool
    steps: float
    more: bool
    loss: float
    metric: float
    rival: str
    rival_metric: float


def score(record: Record, rivals: Sequence[Record], budget: float) -> Score:
    """Ours beside the rivals of the same family and seed."""
    targets = Targets.of(rivals, budget)
    record = record.at_pace(rivals[0].pace)
    fast, few = crossing(record.points, targets.loss), crossing(record.points, targets.adamw)
    last = record.points[-1]
    speed = targets.seconds / (fast[1] if fast else max(LEAD * budget, last.seconds))
    steps = (few[0] if few else max(last.step, LEAD * budget / last.seconds * last.step)) / targets.steps
    loss = level(record.points, budget) / max(targets.loss, FLOOR)
    best = next(rival for rival in rivals if rival.name == targets.best)
    return Score(
        record.end, speed, fast is None, steps, few is None, loss,
        at(record.points, budget), targets.best, at(best.points, budget),
    )  # fmt: skip


def at(points: Sequence[Point], seconds: float) -> float:
    """The metric at the evaluation nearest to that time."""
    return min(points, key=lambda point: abs(point.seconds - seconds)).metric


OWN = {entry.name for entry in OURS}
PALETTE = ("black", "crimson", "royalblue", "C1", "C2", "C4", "C5", "C6", "C8", "C9")
DASHES = ("-", "--", "-.", "-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (1, 2)))
COLOURS = {entry.name: colour for entry, colour in zip((*OURS, *RIVALS), PALETTE, strict=True)}
LINES = {entry.name: dashes for entry, dashes in zip((*OURS, *RIVALS), DASHES, strict=True)}
MORE = {"accuracy", "mean return"}  # metrics of which more is better
PANELS = (  # what, its mark as a bound, whether smaller is better, title
    ("speed", "slower", False, "times as fast as the best rival"),
    ("steps", "more", True, "times fewer steps than AdamW"),
)
NAMES = {
    "vit": "ViT", "resnet": "residual CNN", "batchnorm": "CNN with BatchNorm", "lstm": "LSTM", "gpt": "GPT",
    "dropout": "encoder with dropout", "tabular": "tabular regression", "siren": "coordinate network", "vae": "VAE",
    "variance": "mean-and-variance regression", "modular": "addition modulo 97", "ratings": "ratings",
    "softmax": "softmax regression", "gan": "GAN", "policy": "policy gradient",
    "noise": "fine-tuning with wrong labels",
}  # fmt: skip
TICKS = (0.001, 0.01, 0.03, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 100, 1000)
FAR = 1e3  # ratios beyond are drawn there


@dataclass(frozen=True)
class RaceResult(Result):
    """The races of one problem."""

    unit: str
    target: float
    clock: str

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


def middle(values: Iterable[float]) -> float:
    """The median, where infinite values count as such; nan without values."""
    kept = [value for value in values if not math.isnan(value)]
    return statistics.median_low(kept) if math.inf in kept else statistics.median(kept) if kept else math.nan


def race_cells(records: Sequence[Record], best: float, sgd_step: float) -> list[str]:
    """A row of the table; `best` is the median of the fastest rival, `sgd_step` milliseconds."""
    seconds = seconds_of(records)
    median, worst = middle(seconds), max(seconds)
    step = middle(1e3 * record.seconds / record.steps for record in records)
    first = [ENTRIES[records[0].name].label, words(records[0].setting)]
    last = [f"{step:.3g}", f"{step / sgd_step:.2f}" if sgd_step else "-"]
    if math.isinf(median):
        ends = [record.points[-1] for record in records]
        loss = middle(end.loss if math.isfinite(end.loss) else math.inf for end in ends)
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
    loss, accuracy = middle(end.metric for end in ends), middle(end.accuracy for end in ends)
    return [f"{loss:.3g}" if math.isfinite(loss) else "-", "-" if math.isnan(accuracy) else f"{100 * accuracy:.1f} %"]


def race_table(result: RaceResult) -> str:
    """Markdown; medians over the seeds."""
    groups = result.grouped()
    times = {name: middle(seconds_of(records)) for name, records in groups.items()}
    best = min((time for name, time in times.items() if name not in OWN), default=math.inf)
    sgd_step = middle(1e3 * record.seconds / record.steps for record in groups.get("sgd", []))
    clock = result.clock.replace("seconds", "s")
    head = ["contestant", "setting", f"{clock} to target ↓ (min - max)", "of the best rival's ↓", "steps ↓",
            "ms per step ↓", "to SGD's", "held-out loss ↓", "held-out accuracy ↑"]  # fmt: skip
    order = sorted(groups, key=lambda name: times[name])
    rows = [race_cells(groups[name], best, 0.0 if math.isnan(sgd_step) else sgd_step) for name in order]
    body = markdown(head, rows)
    seeds = len({record.seed for record in result.records})
    note = f"Training loss {result.target:g} {result.unit}; {seeds} seed(s); {result.machine}."
    return f"### {result.title}\n\n{note}\n\n{body}\n"


def race_figure(results: Mapping[str, RaceResult], path: Path) -> None:
    """Training loss over seconds: a panel per problem, medians of the seeds and bands from least to most."""
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
        top = max(record.points[0].loss for record in result.records)
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
        points = [point for point in record.points if point.seconds > 0 and 0 < point.loss < math.inf]
        before = [point for point in points if not record.reached or point.seconds < record.reached.seconds]
        paths.append(before + ([record.reached] if record.reached else []))
    paths = [path for path in paths if path]
    if not paths:
        return np.ones(1), np.full((1, 1), np.nan)
    at = np.geomspace(min(path[0].seconds for path in paths), max(path[-1].seconds for path in paths), 300)
    curves = [
        np.exp(np.interp(np.log(at), np.log([p.seconds for p in path]), np.log([p.loss for p in path])))
        for path in paths
    ]
    return at, np.stack(curves)


# -- the families


@dataclass(frozen=True)
class FamilyResult(Result):
    """The runs of one family."""

    objective: str
    metric: str
    budget: float

    def of(self, seed: int, ours: bool) -> list[Record]:
        return [record for record in self.records if record.seed == seed and bool(record.setting) is not ours]

    def scores(self, annealed: bool = False) -> dict[str, list[Score]]:
        """Ours by name, a score for each seed, beside rivals at a constant rate or under a cosine."""
        found: dict[str, list[Score]] = {}
        for seed in sorted({record.seed for record in self.records}):
            rivals = alike(self.of(seed, ours=False), annealed)
            for record in self.of(seed, ours=True) if rivals else []:
                found.setdefault(record.name, []).append(score(record, rivals, self.budget))
        return found


def said(value: float, bounded: bool, sign: str, form: str = ".2f") -> str:
    return f"{sign if bounded else ''}{value:{form}}"


def median(scores: Sequence[Score], what: str, bound: str, sign: str, least: bool) -> str:
    """Median of the seeds, and the range where there are several; bounds are marked."""
    values = sorted(scores, key=lambda found: getattr(found, what))
    middle = values[(len(values) - 1) // 2 if least else len(values) // 2]
    text = said(getattr(middle, what), getattr(middle, bound), sign)
    if len(values) > 1:
        text += f" ({said(getattr(values[0], what), getattr(values[0], bound), sign)} - "
        text += f"{said(getattr(values[-1], what), getattr(values[-1], bound), sign)})"
    return text


def family_table(results: Mapping[str, FamilyResult], ours: str) -> tuple[list[str], list[list[str]]]:
    """Head and rows: one of ours beside the best rival of each family, with what is measured on data held out."""
    head = ["family", "best rival", "times as fast ↑", "steps, of AdamW's ↓",
            "loss at equal time, of the best rival's ↓", "best under a cosine", "times as fast as it ↑",
            "steps, of AdamW's under a cosine ↓", "held out", "ours / its"]  # fmt: skip
    rows = []
    for family, result in results.items():
        scores, annealed = result.scores().get(ours, []), result.scores(annealed=True)
        metrics = [statistics.median(getattr(one, what) for one in scores) for what in ("metric", "rival_metric")]
        rows.append([
            NAMES[family],
            *pace_cells(scores),
            " / ".join(f"{one.loss:.2f}" if math.isfinite(one.loss) else "not finite" for one in scores),
            *(pace_cells(annealed[ours]) if ours in annealed else "---"),
            f"{result.metric} {'↑' if result.metric in MORE else '↓'}",
            " / ".join(f"{metric:.4g}" for metric in metrics),
        ])  # fmt: skip
    return head, rows


def pace_cells(scores: Sequence[Score]) -> list[str]:
    """The best rivals, times as fast, share of AdamW's steps."""
    return [
        ", ".join(sorted({ENTRIES[one.rival.split("_")[0]].label for one in scores})),
        median(scores, "speed", "slower", "<", least=True),
        median(scores, "steps", "more", ">", least=False),
    ]


def family_tables(results: Mapping[str, FamilyResult]) -> str:
    """Markdown: each of ours beside the best rivals, and the losses of all."""
    names = dict.fromkeys(name for result in results.values() for name in result.scores())
    text = ""
    for name in names:
        raced = {family: result for family, result in results.items() if name in result.scores()}
        text += f"### {ENTRIES[name].label}\n\n{markdown(*family_table(raced, name))}\n\n"
    machines = "; ".join(sorted({result.machine for result in results.values()}))
    text += f"### Losses at the end of the budget\n\n{losses(results)}\n"
    return text + f"{machines}; what did not come to its target after {LEAD:g} budgets counts as if it did then.\n"


def losses(results: Mapping[str, FamilyResult]) -> str:
    """Markdown: the loss of every contestant at the end of the budget, the median over seeds."""
    names = list(dict.fromkeys(record.name for result in results.values() for record in result.records))
    rows = []
    for family, result in results.items():
        pace = {record.seed: record.pace for record in reversed(result.records)}  # that of the rivals, who are first
        ends: dict[str, list[float]] = {name: [] for name in names}
        for record in result.records:
            ends[record.name].append(ended(record.name, record.at_pace(pace[record.seed]).points, result.budget))
        middle = [statistics.median(ends[name]) if ends[name] else math.nan for name in names]
        rows.append([NAMES[family], result.objective, *("-" if math.isnan(m) else f"{m:.3g}" for m in middle)])
    return markdown(["family", "objective", *((ENTRIES | ANNEALED)[name].label for name in names)], rows) + "\n"


def family_figure(results: Mapping[str, FamilyResult], path: Path) -> None:
    """Speeds and steps of ours, the family in which the first is fastest on top; bounds are arrows."""
    scores = {family: result.scores() for family, result in results.items()}
    names = list(dict.fromkeys(name for of_family in scores.values() for name in of_family))
    speed = lambda family: statistics.median(one.speed for one in scores[family][names[0]])
    order = sorted((family for family in scores if names[0] in scores[family]), key=speed, reverse=True)

    def dots(panel: tuple[str, str, bool, str], name: str, family: str) -> list[tuple[float, str]]:
        what, bound, is_inverted, _ = panel
        of_seeds = scores[family].get(name, [])
        values = [min(max(getattr(one, what), 1 / FAR), FAR) for one in of_seeds]
        marks = ["<" if getattr(one, bound) else "o" for one in of_seeds]
        return [(1 / value if is_inverted else value, mark) for value, mark in zip(values, marks, strict=True)]

    dot_figure(
        path,
        {panel[-1]: partial(dots, panel) for panel in PANELS},
        {name: (ENTRIES[name].label, COLOURS[name]) for name in names},
        {family: NAMES[family] for family in order},
        TICKS,
        "right of 1 is better",
        "rivals at a constant rate; bars: medians of the seeds; arrows: at most this",
    )


def dot_figure(
    path: Path, panels: Mapping[str, Callable[[str, str], list[tuple[float, str]]]],
    names: Mapping[str, tuple[str, str]], rows: Mapping[str, str], ticks: Sequence[float], xlabel: str, note: str,
) -> None:  # fmt: skip
    """Ratios: a dot for each seed, a bar for the median.

    Args:
        panels: by title; each gives the values of a name in a row, with their marks.
        names: label and colour of each.
        rows: label of each.
    """
    from matplotlib import pyplot as plt

    size = 10, 1.7 + (0.3 + 0.03 * len(names)) * len(rows)
    drawn, axes = plt.subplots(1, len(panels), figsize=size, sharey=True, layout="constrained")
    for panel, (title, dots) in zip(axes, panels.items(), strict=True):
        for shift, (name, (label, colour)) in enumerate(names.items()):
            for row, key in enumerate(rows):
                y = row + 0.8 * ((shift + 0.5) / len(names) - 0.5)
                found = dots(name, key)
                for value, mark in found:
                    panel.plot(value, y, mark, ms=3, alpha=0.6, color=colour)
                if found:
                    panel.plot(statistics.median(value for value, _ in found), y, "|", ms=9, mew=2.2, color=colour)
            panel.plot([], [], "|", ms=11, mew=2.5, label=label, color=colour)
        panel.axvline(1, color="0.3", lw=0.9, zorder=1)
        panel.set(xscale="log", title=title, xlabel=xlabel, ylim=(len(rows) - 0.4, -0.6))
        panel.set_yticks(range(len(rows)), list(rows.values()))
        low, high = panel.get_xlim()
        shown = [tick for tick in ticks if low <= tick <= high]
        panel.set_xticks(shown, [f"{tick:g}" for tick in shown])
        panel.minorticks_off()
        panel.grid(color="0.9", lw=0.7)
        panel.set_axisbelow(True)
    handles, labels = axes[0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=min(4, len(names)), frameon=False, title=note)
    drawn.savefig(path, dpi=130)
    plt.close(drawn)
