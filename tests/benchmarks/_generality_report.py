"""Files, tables and the figure of the sixteen families."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _generality_scores import LEAD, TOLERANCE, Record, Score, geometric, level, score
from _race_report import COLOURS
from _race_rivals import ENTRIES
from _report import markdown

PANELS = (  # what, its mark as a bound, whether smaller is better, title
    ("speed", "slower", False, "times as fast as the best rival"),
    ("steps", "more", True, "times fewer steps than AdamW"),
)
NAMES = {
    "vit": "ViT",
    "resnet": "residual CNN",
    "batchnorm": "CNN with BatchNorm",
    "lstm": "LSTM",
    "gpt": "GPT",
    "dropout": "encoder with dropout",
    "tabular": "tabular regression",
    "siren": "coordinate network",
    "vae": "VAE",
    "variance": "mean-and-variance regression",
    "modular": "addition modulo 97",
    "ratings": "ratings",
    "softmax": "softmax regression",
    "gan": "GAN",
    "policy": "policy gradient",
    "noise": "fine-tuning with wrong labels",
}
TICKS = (0.001, 0.01, 0.03, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 100, 1000)
FAR = 1e3  # ratios beyond are drawn there


@dataclass(frozen=True)
class Result:
    """The runs of one family, over all seeds."""

    title: str
    objective: str
    metric: str
    budget: float
    machine: str
    records: list[Record]

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> Result:
        return cls(**{**saved, "records": [Record.read(record) for record in saved["records"]]})

    def plain(self) -> dict[str, Any]:
        return {**vars(self), "records": [record.plain() for record in self.records]}

    def of(self, seed: int, ours: bool) -> list[Record]:
        return [record for record in self.records if record.seed == seed and bool(record.setting) is not ours]

    def scores(self) -> dict[str, list[Score]]:
        """Ours by name, a score for each seed."""
        found: dict[str, list[Score]] = {}
        for seed in sorted({record.seed for record in self.records}):
            for record in self.of(seed, ours=True):
                found.setdefault(record.name, []).append(score(record, self.of(seed, ours=False), self.budget))
        return found


def said(value: float, bounded: bool, sign: str, form: str = ".2f") -> str:
    return f"{sign if bounded else ''}{value:{form}}"


def line(family: str, found: Score) -> str:
    """For the terminal, when a seed is done."""
    return (
        f"{family:10s} {found.name:8s} seed {found.seed}: {said(found.speed, found.slower, '<')} times as fast as "
        f"{found.rival}, {said(found.steps, found.more, '>')} of AdamW's steps, {found.loss:.3g} of the loss at equal "
        f"time ({found.half:.3g} half-way), test {found.metric:.4g} ({found.rival_metric:.4g})"
        + ("" if found.end == "stopped" else f"  {found.end}")
    )


def median(scores: Sequence[Score], what: str, bound: str, sign: str, least: bool) -> str:
    """Median of the seeds, and the range where there are several; bounds are marked."""
    values = sorted(scores, key=lambda found: getattr(found, what))
    middle = values[(len(values) - 1) // 2 if least else len(values) // 2]
    text = said(getattr(middle, what), getattr(middle, bound), sign)
    if len(values) > 1:
        text += f" ({said(getattr(values[0], what), getattr(values[0], bound), sign)} - "
        text += f"{said(getattr(values[-1], what), getattr(values[-1], bound), sign)})"
    return text


def cells(result: Result, scores: Sequence[Score]) -> list[str]:
    ends = {found.end for found in scores} - {"stopped"}
    test = statistics.median(found.metric for found in scores)
    rivals = statistics.median(found.rival_metric for found in scores)
    names = ", ".join(sorted({ENTRIES[found.rival].label for found in scores}))
    return [
        result.title,
        names,
        f"{result.budget:g}",
        median(scores, "speed", "slower", "<", least=True),
        median(scores, "steps", "more", ">", least=False),
        " / ".join(f"{found.loss:.2f}" if math.isfinite(found.loss) else "not finite" for found in scores),
        f"{test:.4g}",
        f"{rivals:.4g}",
        "; ".join(sorted(ends)) or "yes",
    ]


def medians(scores: Mapping[str, Sequence[Score]], what: str) -> dict[str, float]:
    return {family: statistics.median(getattr(found, what) for found in own) for family, own in scores.items()}


def summary(scores: Mapping[str, Sequence[Score]]) -> str:
    """Geometric means over families of the medians over seeds, and the worst case over all."""
    every = [(found, family) for family, own in scores.items() for found in own]
    speeds, steps, losses = (medians(scores, what) for what in ("speed", "steps", "loss"))
    slowest, loser = min(every, key=lambda e: e[0].speed), max(every, key=lambda e: e[0].loss)
    behind = {family: sum(not found.holds for found in own) for family, own in scores.items()}
    named = ", ".join(f"{family} {count}" for family, count in behind.items() if count)
    return (
        f"Ahead in CPU seconds on {sum(speed > 1 for speed in speeds.values())} of {len(speeds)} families: "
        f"{geometric(speeds.values()):.2f} times as fast in the geometric mean, at worst "
        f"{said(slowest[0].speed, slowest[0].slower, '<')} ({slowest[1]}). Steps: {geometric(steps.values()):.2f} of "
        f"AdamW's. Loss at equal time: {geometric(losses.values()):.2f} of the best rival's, at worst "
        f"{loser[0].loss:.3g} ({loser[1]}). Not finite: {sum(found.end != 'stopped' for found, _ in every)} of "
        f"{len(every)} runs. Behind by more than {TOLERANCE - 1:.0%}: {sum(behind.values())}"
        + (f" ({named})." if named else ".")
    )


def table(results: Mapping[str, Result], label: Callable[[str], str]) -> str:
    """Markdown: for each of ours a table with a row for each family."""
    scores = {family: result.scores() for family, result in results.items()}
    names = list(dict.fromkeys(name for own in scores.values() for name in own))
    head = ["family", "best rival", "budget, s", "times as fast", "steps to AdamW's loss, of its own",
            "loss at equal time, of the best rival's, by seed", "test", "test, best rival", "finite"]  # fmt: skip
    text = ""
    for name in names:
        own = {family: found[name] for family, found in scores.items() if name in found}
        body = markdown(head, "llrrrrrrl", [cells(results[family], found) for family, found in own.items()])
        text += f"### {label(name)}\n\n{summary(own)}\n\n{body}\n\n"
    machines = "; ".join(sorted({result.machine for result in results.values()}))
    text += f"### Losses at the end of the budget\n\n{losses(results, label)}\n"
    return text + f"{machines}; what did not come to its target after {LEAD:g} budgets counts as if it did then.\n"


def losses(results: Mapping[str, Result], label: Callable[[str], str]) -> str:
    """Markdown: the loss of every contestant at the end of the budget, the median over seeds."""
    names = list(dict.fromkeys(record.name for result in results.values() for record in result.records))
    rows = []
    for family, result in results.items():
        pace = {record.seed: record.pace for record in reversed(result.records)}  # that of the rivals, who are first
        ends: dict[str, list[float]] = {name: [] for name in names}
        for record in result.records:
            ends[record.name].append(level(record.at_pace(pace[record.seed]).points, result.budget))
        middle = [statistics.median(ends[name]) if ends[name] else math.nan for name in names]
        rows.append([family, result.objective, *("-" if math.isnan(m) else f"{m:.3g}" for m in middle)])
    return markdown(["family", "objective", *map(label, names)], "llr", rows) + "\n"


def figure(results: Mapping[str, Result], path: Path, label: Callable[[str], str]) -> None:
    """Two panels, right is better, a row for each family: a dot for each seed, an arrow for a bound, the median."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    scores = {family: result.scores() for family, result in results.items()}
    names = list(dict.fromkeys(name for own in scores.values() for name in own))
    first = lambda family: statistics.median(one.speed for one in scores[family][names[0]])
    order = sorted((family for family in scores if names[0] in scores[family]), key=first, reverse=True)
    drawn, axes = plt.subplots(1, len(PANELS), figsize=(10, 1.6 + 0.36 * len(order)), sharey=True, layout="constrained")
    for panel, (what, bound, is_inverted, title) in zip(axes, PANELS, strict=True):
        for shift, name in enumerate(names):
            style = {"color": COLOURS.get(name, "0.4"), "zorder": 3}
            for row, of_family in enumerate(scores[family].get(name, []) for family in order):
                y = row + 0.26 * (shift - (len(names) - 1) / 2)
                values = [min(max(getattr(one, what), 1 / FAR), FAR) for one in of_family]
                values = [1 / value if is_inverted else value for value in values]
                for one, value in zip(of_family, values, strict=True):
                    panel.plot(value, y, "<" if getattr(one, bound) else "o", ms=4, alpha=0.6, **style)
                if values:
                    panel.plot(statistics.median(values), y, "|", ms=11, mew=2.5, **style)
            panel.plot([], [], "|", ms=11, mew=2.5, label=label(name), **style)
        panel.axvline(1, color="0.3", lw=0.9, zorder=1)
        panel.set(
            xscale="log",
            title=title,
            xlabel="right of 1 is better",
            ylim=(len(order) - 0.4, -0.6),
        )
        panel.set_yticks(range(len(order)), [NAMES[family] for family in order])
        low, high = panel.get_xlim()
        ticks = [t for t in TICKS if low <= t <= high]
        panel.set_xticks(ticks, [f"{t:g}" for t in ticks])
        panel.minorticks_off()
        panel.grid(axis="x", color="0.88", lw=0.7)
        panel.grid(axis="y", color="0.93", lw=0.7)
        panel.set_axisbelow(True)
    handles, labels = axes[0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=len(names), frameon=False,
                 title="bars: medians of the seeds; arrows: at most this")  # fmt: skip
    drawn.savefig(path, dpi=130)
    plt.close(drawn)
