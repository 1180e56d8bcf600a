"""Tables, sentences and pictures of the pages, from what benchmarks have stored in docs/results/: `make figures`.

A page says where a table belongs by two comments, between which nobody writes by hand:

    <!-- results: per_sample -->          the first table of docs/results/per_sample.json; `per_sample 1` is the second
    <!-- end of results -->

`families` is the list of families where KFAC is ahead, level and behind; `rows_of_per_sample` says on which rows of the
tables ours is the fastest; `headline`, `peers` and `demo_losses` are what README and the demo show.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent))

from bench_all import RESULTS, ROOT, Stored, Table

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
REGION = re.compile(
    r"(<!-- results: (?P<what>\S+)(?: (?P<index>\d+))? -->\n)(?P<body>.*?)(<!-- end of results -->)", re.S
)
NUMBER = re.compile(r"[<>]?\d[\d,.]*(e-?\d+)?( †)?( \(.*\))?|-|wrong.*|no .*|unsupported.*")
# of README, for each peer: what is here as well, the case of silently_wrong.py, and their call in it
PEERS = {
    "BackPACK": ("rows, norms, diagonals, factors for any model", 'padding_mode="circular"', "BatchGrad"),
    "Opacus": ("private gradients in one backward pass; no accountant", "reads the embedding", "GradSampleModule"),
    "curvlinops": ("operators, exact diagonals and blocks, `solve`", "data in two batches", "GGNLinearOperator"),
    "nngeometry": ("Fisher matrices in several forms", "that scales its features", "FIM(..., PMatDense)"),
    "laplace-torch": ("posteriors, and a backend for theirs", "target is -100", 'Laplace(..., "all", "kron")'),
    "singd": ("every parameter trained, nothing to tune", 'padding_mode="circular"', "SINGD"),
    "torch": ("Laplacians, Hessians", "Laplacian of a network with", "backward pass of the Laplacian"),
}
LEVEL = 1.1  # ratios up to this count as level
PICTURES = {  # commands that draw what is stored
    "generality": "generality.py --report --json {runs} --figure docs/generality.png",
    "race": "race.py --report --json {runs} --figure docs/race.png",
}


def markdown(table: Table) -> str:
    """Columns of numbers are set to the right; why something fails is what the benchmark says, not the page."""
    table = Table(
        table.columns, [[re.sub(r"^(unsupported|wrong)\b.*", r"\1", cell) for cell in row] for row in table.rows]
    )
    columns = list(zip(*table.rows, strict=True))
    rules = ["---:" if all(map(NUMBER.fullmatch, column)) else "---" for column in columns]
    return "".join(f"| {' | '.join(row)} |\n" for row in [table.columns, rules, *table.rows])


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
            found = [re.match(r"\d[\d.]*", cell) for cell in row[-len(peers) :]]
            ours, others = found[0], [float(one[0]) for one in found[1:] if one]
            if ours is None or not others:
                continue
            total += 1
            if (ratio := float(ours[0]) / min(others)) > 1:
                behind.append((ratio, f"{row[0].split(',')[0]}, {row[1]} ({ratio:.2f} times the best)"))
    listed = "; ".join(text for _, text in sorted(behind, reverse=True))
    return f"The fastest on {total - len(behind)} of {total} rows{f'. Behind: {listed}' if behind else ''}.\n"


def demo() -> str:
    """Losses of the demo after some steps, and after the seconds that all of a rival's steps take."""
    runs = json.loads((RESULTS / "demo.runs.json").read_text("utf-8"))
    points = {name: np.array(run["points"]) for name, run in runs["runs"].items()}
    steps = runs["steps"]
    at_step = lambda own, step: float(own[own[:, 0] == step, 2][0])
    ends = sorted(float(own[own[:, 0] == steps, 1][0]) for own in points.values())
    times = ends[0], ends[-1]
    columns = [
        "",
        *(f"{step} steps" for step in (steps // 4, steps // 2, steps)),
        *(f"{seconds:.2f} s" for seconds in times),
    ]
    rows = [
        [name]
        + [f"{at_step(own, step):.2f}" for step in (steps // 4, steps // 2, steps)]
        + [f"{np.interp(seconds, own[:, 1], own[:, 2]):.2f}" for seconds in times]
        for name, own in points.items()
    ]
    return f"\n{markdown(Table(columns, rows))}\n{origin(stored_of('demo'))}"


def results_of_families() -> dict[str, Any]:
    from _generality_report import Result

    saved = json.loads((RESULTS / "generality.runs.json").read_text("utf-8"))
    return {name: Result.read(result) for name, result in saved.items()}


def middle(scores: Sequence[Any], what: str) -> Any:
    return sorted(scores, key=lambda score: getattr(score, what))[len(scores) // 2]


def families() -> str:
    """KFAC beside the best rival, by family, in one line each."""
    from _generality_report import NAMES
    from _generality_scores import geometric

    scores = {name: result.scores()["kfac"] for name, result in results_of_families().items()}
    medians = {name: middle(own, "speed") for name, own in scores.items()}
    said = lambda name: f"{NAMES[name]} ({'below ' if medians[name].slower else ''}{medians[name].speed:.2g})"
    ordered = sorted(medians, key=lambda name: -medians[name].speed)
    groups = {
        "Ahead": [name for name in ordered if medians[name].speed > LEVEL],
        "Level, within a tenth": [name for name in ordered if 1 / LEVEL <= medians[name].speed <= LEVEL],
        "Behind": [name for name in ordered if medians[name].speed < 1 / LEVEL],
    }
    lines = [
        f"- **{title}** on {len(names)}: {', '.join(map(said, names))}.\n" for title, names in groups.items() if names
    ]
    mean = geometric([score.speed for score in medians.values()])
    steps = geometric([middle(own, "steps").steps for own in scores.values()])
    losses = [score.loss for own in scores.values() for score in own]
    return "".join(lines) + (
        f"- In the geometric mean {mean:.2f} times as fast as the best rival, with {steps:.2f} of tuned "
        f"AdamW's steps; the loss at equal time is at most {LEVEL} times the best rival's in "
        f"{sum(loss <= LEVEL for loss in losses)} of {len(losses)}.\n"
    )


def headline() -> str:
    """What README begins with."""
    from _generality_scores import geometric

    scores = [result.scores()["kfac"] for result in results_of_families().values()]
    ahead = sum(middle(own, "speed").speed > 1 for own in scores)
    steps = geometric([middle(own, "steps").steps for own in scores])
    pruned = {tuple(row[:2]): row[3] for row in stored_of("compression").tables[0].rows}
    short = lambda cell: f"{float(cell.split()[0]):.0e}".replace("e-0", "e-")
    solved = {row[1]: short(row[2]) for row in stored_of("poisson").tables[0].rows if row[0].count("-") == 2}
    magnitude = pruned["90% zeros", "magnitude (torch.nn.utils.prune)"]
    return (
        f"- `KFAC` with its defaults needs **{100 * steps:.0f} % of tuned AdamW's steps** in the geometric mean over "
        f"{len(scores)} families of problems, and is ahead of the best tuned rival in CPU time on {ahead} of them.\n"
        f"- `prune` takes **90 % of the weights** of a digit classifier and leaves "
        f"{pruned['90% zeros', 'prune, kfac']} % of its answers right ({pruned['-', 'as trained']} % before; by "
        f"magnitude {magnitude} %).\n"
        f"- A Poisson equation solved to an error of **{solved['NaturalGradient']}** in 40 seconds of one thread; Adam "
        f"with the best of three rates comes to {solved['Adam']}.\n"
    )


def peers() -> str:
    """README's table: one case for each peer, and how many there are of all."""
    counts, cases = stored_of("silently_wrong").tables
    _, _, calls, right, refused, *_ = counts.rows[-1]
    rows = []
    for peer, (here, case, call) in PEERS.items():
        row = next(row for row in cases.rows if row[0].startswith(f"{peer} ") and case in row[1])
        of_call = next(part for part in row[2].split("; ") if part.lstrip("`").startswith(call))
        rows.append([row[0], here, f"{row[1]}: {' '.join(of_call.split()[-2:])} off"])
    table = markdown(Table(["package", "here as well", "silently wrong there"], rows))
    return f"{table}\nOurs was right in {right} of {calls} calls, and refused the other {refused} by name.\n"


def stored_of(name: str) -> Stored:
    """
    Raises:
        KeyError: there are no such results.
    """
    stored = Stored.read(name)
    if stored is None:
        raise KeyError(f"{name}: no results in {RESULTS}; python tests/benchmarks/bench_all.py --only {name}")
    return stored


SENTENCES: dict[str, Callable[[], str]] = {
    "demo_losses": demo,
    "families": families,
    "headline": headline,
    "peers": peers,
    **{f"rows_of_{name}": partial(rows_of, name) for name in ("per_sample", "larger", "matrices")},
}


def rendered(page: str) -> str:
    """A page with its results as they are stored.

    Raises:
        KeyError: the page has a place for results that are not stored.
    """

    def fill(match: re.Match[str]) -> str:
        what = match["what"]
        if what in SENTENCES:
            return match[1] + SENTENCES[what]() + match[5]
        stored = stored_of(what)
        return f"{match[1]}\n{markdown(stored.tables[int(match['index'] or 0)])}\n{origin(stored)}{match[5]}"

    return REGION.sub(fill, page)


def main() -> None:
    for path in PAGES:
        text = path.read_text("utf-8")
        if (new := rendered(text)) != text:
            path.write_text(new, "utf-8")
            print(path.relative_to(ROOT))
    for name, command in PICTURES.items():
        runs = RESULTS / f"{name}.runs.json"
        if runs.exists():
            script, *rest = command.format(runs=runs).split()
            here = Path(__file__).parent
            subprocess.run([sys.executable, str(here / script), *rest], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
