"""Tables, sentences and pictures of the pages, from what benchmarks have stored in docs/results/: `make figures`.

A page says where a table belongs by two comments, between which nobody writes by hand:

    <!-- results: per_sample -->          the first table of docs/results/per_sample.json; `per_sample 1` is the second
    <!-- end of results -->

`standing` is the table of where KFAC is ahead, level and behind; `families_of_kfac` and `race_tables` are what was run;
`gpu_line` and `price_line` are sentences; `rows_of_per_sample` says on which rows of the tables ours is the fastest;
`headline`, `peers` and `demo_losses` are what README and the demo show; `examples/trainer` is what that
script has printed (`make examples`). Where a benchmark has not been run yet, the page says so.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent))

import _contest_report as contest
import _held_out_report as held
import _report
from bench_all import COMMANDS, RESULTS, ROOT, Stored, Table

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
REGION = re.compile(
    r"(<!-- results: (?P<what>\S+)(?: (?P<index>\d+))? -->\n)(?P<body>.*?)(<!-- end of results -->)", re.S
)
# of the table in coming_from.md, for each peer: what is here as well, the case of silently_wrong.py, and their call
PEERS = {
    "BackPACK": ("rows, norms, diagonals, factors for any model", 'padding_mode="circular"', "BatchGrad"),
    "Opacus": ("private gradients in one backward pass (no accountant)", "reads the embedding", "GradSampleModule"),
    "curvlinops": ("operators, exact diagonals and blocks, `solve`", "data in two batches", "GGNLinearOperator"),
    "nngeometry": ("Fisher matrices in several forms", "that scales its features", "FIM(..., PMatDense)"),
    "laplace-torch": ("posteriors, and a backend for theirs", "target is -100", 'Laplace(..., "all", "kron")'),
    "singd": ("every parameter trained, nothing to tune", 'padding_mode="circular"', "SINGD"),
    "torch": ("Laplacians, Hessians", "Laplacian of a network with", "backward pass of the Laplacian"),
}
LEVEL = 1.1  # ratios of times up to this count as level ...
LEVEL_LOSS = 1.05  # ... and of losses
GROUPS = ("Ahead", "Level", "Behind")
PICTURES = {
    "generality": (contest.FamilyResult, contest.family_figure),
    "race": (contest.RaceResult, contest.race_figure),
    "held_out": (held.HeldOutResult, held.held_out_figure),
}
middle = lambda scores, what: sorted(scores, key=lambda score: getattr(score, what))[len(scores) // 2]


def markdown(table: Table) -> str:
    """Why something fails is what the benchmark says, not the page."""
    short = lambda cell: re.sub(r"^(unsupported|wrong)\b.*", r"\1", cell)
    return _report.markdown(table.columns, [[row[0], *map(short, row[1:])] for row in table.rows]) + "\n"


def origin(stored: Stored) -> str:
    return (
        f"*`{stored.command}`; {stored.date}, commit `{stored.commit}`, {stored.machine}, torch {stored.torch}, "
        f"Python {stored.python}.*\n"
    )


def rows_of(name: str) -> str:
    """On how many rows ours is the fastest, and by how much it is behind on the others."""
    stored = stored_of(name)
    total, behind = 0, []
    for table in stored.tables:
        peers = table.columns[table.columns.index("curvature") :]
        for row in table.rows:
            ratios = [re.match(r"\d[\d.]*", cell) for cell in row[-len(peers) :]]
            ours, others = ratios[0], [float(one[0]) for one in ratios[1:] if one]
            if ours is None or not others:
                continue
            total += 1
            if (ratio := float(ours[0]) / min(others)) > 1:
                behind.append((ratio, f"{row[0].split(',')[0]}, {row[1]} ({ratio:.2f} times the best)"))
    listed = "; ".join(text for _, text in sorted(behind, reverse=True))
    return f"The fastest on {total - len(behind)} of {total} rows{f'. Behind: {listed}' if behind else ''}.\n"


def demo() -> str:
    """Losses of the demo after some steps, and after the seconds that all of a rival's steps take."""
    runs = runs_of("demo")
    points = {name: np.array(run["points"]) for name, run in runs["runs"].items()}
    steps = runs["steps"]
    at_step = lambda curve, step: float(curve[curve[:, 0] == step, 2][0])
    ends = sorted(float(curve[curve[:, 0] == steps, 1][0]) for curve in points.values())
    times = ends[0], ends[-1]
    columns = [
        "",
        *(f"{step} steps" for step in (steps // 4, steps // 2, steps)),
        *(f"{seconds:.2f} s" for seconds in times),
    ]
    rows = [
        [name]
        + [f"{at_step(curve, step):.2f}" for step in (steps // 4, steps // 2, steps)]
        + [f"{np.interp(seconds, curve[:, 1], curve[:, 2]):.2f}" for seconds in times]
        for name, curve in points.items()
    ]
    return f"\n{markdown(Table(columns, rows))}\n{origin(stored_of('demo'))}"


def families_run() -> dict[str, Any]:
    return {name: contest.FamilyResult.read(result) for name, result in runs_of("generality").items()}


def scores_of_kfac(annealed: bool = False) -> tuple[dict[str, list[Any]], dict[str, float], float]:
    """By family; the median speeds; the geometric mean of the median ratios of steps."""
    scores = {name: result.scores(annealed)["kfac"] for name, result in families_run().items()}
    speeds = {name: middle(of_family, "speed").speed for name, of_family in scores.items()}
    return scores, speeds, contest.geometric([middle(of_family, "steps").steps for of_family in scores.values()])


def grouped(speeds: Mapping[str, float], level: float = LEVEL) -> dict[str, list[str]]:
    """Names by whether ours is ahead there, level or behind, the fastest first."""
    names = sorted(speeds, key=lambda name: -speeds[name])
    group = lambda speed: "Ahead" if speed > level else "Behind" if speed < 1 / level else "Level"
    return {title: [name for name in names if group(speeds[name]) == title] for title in GROUPS}


def families_mean() -> str:
    scores, speeds, steps = scores_of_kfac()
    _, beside_annealed, fewer = scores_of_kfac(annealed=True)
    every = [score for of_family in scores.values() for score in of_family]
    near, diverged = (sum(map(of, every)) for of in (lambda s: s.loss <= LEVEL, lambda s: s.end != "stopped"))
    return (
        f"In the geometric mean {contest.geometric(speeds.values()):.2f} times as fast as the best rival at a constant "
        f"rate, with {steps:.2f} of tuned AdamW's steps, and {contest.geometric(beside_annealed.values()):.2f} times "
        f"as fast as the best under a cosine, with {fewer:.2f} of AdamW's steps there. The loss at equal time is at "
        f"most {LEVEL} times that of the best rival at a constant rate in "
        f"{near} of {len(every)} runs, and {diverged or 'none'} of them diverged.\n"
    )


def speed_of(family: str, scores: Mapping[str, list[Any]], speeds: Mapping[str, float]) -> str:
    return f"{'below ' if middle(scores[family], 'speed').slower else ''}{speeds[family]:.2g}"


def family_table(ours: str) -> str:
    return f"\n{markdown(Table(*contest.family_table(families_run(), ours)))}\n{origin(stored_of('generality'))}"


def race_results() -> list[Any]:
    return [contest.RaceResult.read(result) for result in runs_of("race").values()]


def race_speeds() -> dict[str, float]:
    """Of the median seconds to the target, the best rival's over KFAC's; zero where that did not reach it."""
    speeds = {}
    for result in race_results():
        seconds = {name: contest.middle(contest.seconds_of(records)) for name, records in result.grouped().items()}
        best = min(time for name, time in seconds.items() if name not in contest.OWN)
        speeds[result.title.split(",")[0]] = best / seconds["kfac"] if math.isfinite(seconds["kfac"]) else 0.0
    return speeds


def race_tables() -> str:
    """A table for each problem of the race."""
    tables = "\n".join(map(contest.race_table, race_results()))
    return f"\n{tables}\n{origin(stored_of('race'))}"


def standing() -> str:
    """Where KFAC is ahead, level and behind, in training and on data held out: a row for each benchmark."""
    names = contest.NAMES
    races = race_speeds()
    losses, stopped = held_out_ratios()
    shown = lambda ratios: {name: f"{ratio:.2f}" for name, ratio in ratios.items()}
    rows = [
        *(
            [
                f"**training**, sixteen families: times as fast as the best of four tuned rivals {schedule} ↑",
                *standing_cells(
                    {names[family]: one for family, one in speeds.items()},
                    {names[family]: speed_of(family, scores, speeds) for family in speeds},
                    LEVEL,
                ),
            ]
            for schedule, (scores, speeds, _) in (
                ("at a constant rate", scores_of_kfac()),
                ("under a cosine", scores_of_kfac(annealed=True)),
            )
        ),
        [
            "**training**, race: times as fast at a constant rate, best of seven tuned rivals ↑",
            *standing_cells(races, {name: f"{one:.2g}" for name, one in races.items()}, LEVEL),
        ],
        [
            "**held out**, twelve problems, cosine: loss, of the best of four tuned rivals ↓",
            *standing_cells(inverted(losses), shown(losses), LEVEL_LOSS),
        ],
        [
            "**held out**, five tables with early stopping: loss, of AdamW's ↓",
            *standing_cells(inverted(stopped), shown(stopped), LEVEL_LOSS),
        ],
    ]
    return f"\n{_report.markdown(['', *map(str.lower, GROUPS)], rows)}\n"


def inverted(ratios: Mapping[str, float]) -> dict[str, float]:
    return {name: 1 / ratio for name, ratio in ratios.items()}


def held_out_ratios() -> tuple[dict[str, float], dict[str, float]]:
    """KFAC's held-out loss: under a cosine, over the best tuned rival's; on tables with early stopping, over AdamW's.

    Raises:
        NotStored: ours have not been run.
    """
    problems, tables = held.parted(held.read(runs_of("held_out")))
    losses = {held.NAMES[name]: held.ratio(one, "kfac_cosine") for name, one in problems.items() if one.best()}
    best = lambda one, name: held.middle([held.loss_of(held.lowest(record)) for record in one.of(name)])
    stopped = {held.NAMES[name]: best(one, "kfac") / best(one, "adamw") for name, one in tables.items()}
    if any(map(math.isnan, [*losses.values(), *stopped.values()])):
        raise NotStored("held_out")
    return losses, stopped


def held_out_line() -> str:
    losses, stopped = held_out_ratios()
    ahead, level, behind = grouped(inverted(losses), LEVEL_LOSS).values()
    below = held.beside_each(held.parted(held.read(runs_of("held_out")))[0], "kfac_cosine")
    lower = [ratio for ratio in stopped.values() if ratio < 1]  # as in "below AdamW's on"
    near = sum(ratio * LEVEL_LOSS > 1 for ratio in lower)
    return (
        f"On data **held out**, under a cosine and with nothing set, its loss is below that of the best of four tuned "
        f"rivals on {len(ahead)} of {len(losses)} problems, level with it (within 5 %) on {len(level)}, and above it "
        f"on {len(behind)}, most on {', '.join(f'{name} ({losses[name]:.2f} times)' for name in behind[:-4:-1])}. "
        f"It is {below}. With early stopping it is below AdamW's on {len(lower)} of {len(stopped)} tables, on "
        f"{near} of them by less than 5 %."
    )


def standing_cells(speeds: Mapping[str, float], shown: Mapping[str, str], level: float) -> list[str]:
    groups = grouped(speeds, level).values()
    return [f"{len(names)}: {', '.join(f'{n} {shown[n]}' for n in names)}" if names else "0" for names in groups]


def times(cells: list[float]) -> str:
    return f"{min(cells):.1f} to {max(cells):.1f} times"


def gpu_line() -> str:
    """What a step costs and takes beside SGD's, and the race there."""
    tables = dict(zip(("ViT", "ResNet-18", "GPT-2 small"), stored_of("gpu_steps").tables[::2], strict=True))
    rows = {name: {row[0]: row for row in table.rows} for name, table in tables.items()}
    prices = {name: float(of["KFAC"][4]) for name, of in rows.items()}
    memory = [float(of["KFAC"][8]) / float(of["SGD"][8]) for of in rows.values()]
    cheapest, dearest = min(prices, key=prices.__getitem__), max(prices, key=prices.__getitem__)
    beside_muon = {}
    for title, table in zip(("autoencoder", "GPT", "tanh network"), stored_of("gpu_race").tables, strict=True):
        seconds = {row[0]: float(row[2].split()[0]) for row in table.rows if not row[2].startswith("-")}
        beside_muon[title] = seconds["Muon + AdamW"] / seconds["KFAC"]
    said = lambda one: f"{one:.1f} times as fast" if one >= 1 else f"{1 / one:.1f} times as slow"
    listed_races = ", ".join(f"{title} {said(one)}" for title, one in beside_muon.items())
    return (
        f"On an H100 a step of `KFAC` takes **{prices[cheapest]:.1f} ({cheapest}) to {prices[dearest]:.1f} times "
        f"({dearest})** as long as one of SGD in the mean, and {times(memory)} its memory.\nIt is ahead of Muon on "
        f"{sum(one > 1 for one in beside_muon.values())} of {len(beside_muon)} races there, one seed each "
        f"({listed_races}).\n"
    )


def price_line() -> str:
    """What a mean step costs on the sixteen families."""
    (table,) = stored_of("prices").tables
    prices = [float(row[table.columns.index("mean")]) for row in table.rows]
    return f"In small models a mean step of `KFAC` takes {times(prices)} as long as SGD's.\n"


def rows_by(name: str, columns: int, table: int = 0) -> dict[Any, list[str]]:
    """The rest of each row of a stored table, by its first columns."""
    return {tuple(row[:columns]): row[columns:] for row in stored_of(name).tables[table].rows}


def steps_line() -> str:
    scores, speeds, steps = scores_of_kfac(annealed=True)
    _, _, of_constant = scores_of_kfac()
    ahead, level, behind = grouped({contest.NAMES[name]: speed for name, speed in speeds.items()}).values()
    return (
        f"`KFAC`, untuned, needs **{100 * steps:.0f} % of the steps of AdamW**, tuned and under a cosine schedule, to "
        f"its final training loss, in the geometric mean over {len(scores)} families of problems "
        f"({100 * of_constant:.0f} % of AdamW's at a constant rate). In CPU time it is ahead of the best rival under a "
        f"cosine on {len(ahead)}, level on {len(level)}, and behind on {len(behind)}: {', '.join(behind)}."
    )


def pruning_line() -> str:
    right = {name: rest[1] for name, rest in rows_by("compression", 2).items()}
    magnitude = right["90% zeros", "magnitude (torch.nn.utils.prune)"]
    return (
        f"`prune` removes **90 % of the weights** of a digit classifier; its accuracy is then "
        f"{right['90% zeros', 'prune, kfac']} % ({right['-', 'as trained']} % before, {magnitude} % by magnitude)."
    )


def influence_line() -> str:
    ours, theirs, *_ = rows_by("influence", 1)["MLP 784-512-256-10",]
    return f"Kronecker factors of an MLP, for influence functions, in **{ours} s**; kronfluence takes {theirs} s."


def forgetting_line() -> str:
    accuracies = {name: rest for (name, strength), rest in rows_by("forgetting", 2).items() if strength in ("-", "1")}
    (before, _), (free, second), (kept, with_penalty) = (
        accuracies[name] for name in ("the first task alone", "no penalty", "kfac")
    )
    return (
        f"A network that learns a second task under `quadratic_penalty` keeps **{kept} % accuracy on the first** "
        f"({before} % before, {free} % without the penalty), with {with_penalty} % on the second ({second} % without)."
    )


def poisson_line() -> str:
    short = lambda cell: f"{float(cell.split()[0]):.0e}".replace("e-0", "e-")
    solved = {method: short(rest[0]) for (size, method), rest in rows_by("poisson", 2).items() if size == "2-64-1"}
    return (
        f"`NaturalGradient` solves a Poisson equation to an error of **{solved['NaturalGradient']}** in 40 CPU "
        f"seconds; Adam, with the best of three rates, to {solved['Adam']}."
    )


def headline() -> str:
    """What README begins with; a line whose results are not stored is left out."""
    lines = []
    for line in (steps_line, held_out_line, pruning_line, influence_line, forgetting_line, poisson_line):
        with contextlib.suppress(NotStored):
            lines.append(f"- {line()}\n")
    return "".join(lines)


def peers() -> str:
    """The table of coming_from.md: one case for each peer, and how many there are of all."""
    counts, cases = stored_of("silently_wrong").tables
    _, _, calls, right, refused, *_ = counts.rows[-1]
    rows = []
    for peer, (here, case, call) in PEERS.items():
        row = next(row for row in cases.rows if row[0].startswith(f"{peer} ") and case in row[1])
        of_call = next(part for part in row[2].split("; ") if part.lstrip("`").startswith(call))
        rows.append([row[0].split("+")[0], here, f"{row[1]}: {' '.join(of_call.split()[-2:])} off"])
    table = markdown(Table(["package", "what this package has of it", "silently wrong there"], rows))
    cases_run = len({run["case"] for run in runs_of("silently_wrong")["results"]})
    return (
        f"{table}\nThis package gave the right number in {right} of {calls} calls ({cases_run} cases) and raised an "
        f"error that names the cause in {refused}.\n"
    )


class NotStored(Exception):
    """A benchmark that bench_all.py knows has not been run."""

    def __init__(self, name: str) -> None:
        super().__init__(f"Not run yet: `python tests/benchmarks/bench_all.py --only {name}`.")


def stored_of(name: str) -> Stored:
    """
    Raises:
        NotStored: the benchmark has not been run.
        KeyError: there is no such benchmark.
    """
    stored = Stored.read(name)
    if stored is None:
        raise NotStored(name) if name in COMMANDS else KeyError(f"{name}: neither in {RESULTS} nor in bench_all.py")
    return stored


def runs_of(name: str) -> dict[str, Any]:
    """What a benchmark has written with --json.

    Raises:
        NotStored: the benchmark has not been run.
    """
    path = RESULTS / f"{name}.runs.json"
    if not path.exists():
        raise NotStored(name)
    return json.loads(path.read_text("utf-8"))


SENTENCES: dict[str, Callable[[], str]] = {
    "demo_losses": demo,
    "families_mean": families_mean,
    "families_of_ekfac": partial(family_table, "ekfac"),
    "families_of_kfac": partial(family_table, "kfac"),
    "gpu_line": gpu_line,
    "headline": headline,
    "peers": peers,
    "price_line": price_line,
    "race_tables": race_tables,
    "standing": standing,
    **{f"rows_of_{name}": partial(rows_of, name) for name in ("per_sample", "larger", "matrices")},
}


def rendered(page: str) -> str:
    """A page with its results as they are stored, and a sentence where there are none yet.

    Raises:
        KeyError: the page has a place for results of a benchmark that does not exist.
    """

    def fill(match: re.Match[str]) -> str:
        what, index = match["what"], int(match["index"] or 0)
        try:
            if what in SENTENCES:
                body = SENTENCES[what]()
            elif what.startswith("examples/"):
                body = f"\n```text\n{(RESULTS / f'{what}.txt').read_text('utf-8')}```\n"
            else:
                stored = stored_of(what)
                body = f"\n{markdown(stored.tables[index])}\n{origin(stored)}"
        except NotStored as missing:
            body = f"*{missing}*\n"
        return match[1] + body + match[5]

    return REGION.sub(fill, page)


def main() -> None:
    for path in PAGES:
        text = path.read_text("utf-8")
        if (new := rendered(text)) != text:
            path.write_text(new, "utf-8")
            print(path.relative_to(ROOT))
    for name, (kind, draw) in PICTURES.items():
        with contextlib.suppress(NotStored):
            draw({title: kind.read(result) for title, result in runs_of(name).items()}, ROOT / "docs" / f"{name}.png")


if __name__ == "__main__":
    main()
