"""The table of how every parameter is preconditioned, and numbers of the curvature."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from textwrap import wrap
from typing import Any

from torch import Tensor, nn

from curvature.preconditioners import Block
from optimizers.schedule import Schedule

WIDTH = 100  # columns
MOST_KEPT = 30  # columns of "kept"
FROZEN = "requires_grad is False"


@dataclass(frozen=True)
class Row:
    """What the table says of some parameters."""

    names: Sequence[str]
    structure: str  # of their curvature, or why there is none, in two or three words
    kept: str = ""  # shapes
    megabytes: float | None = None  # that these take
    reason: str = ""  # a sentence for the notes below the table, if there is something to explain


def rows_of(
    blocks: Sequence[Block], model: nn.Module, trained: Mapping[str, Tensor], groups: Sequence[Mapping[str, Any]],
    has_stepped: bool,
) -> list[Row]:  # fmt: skip
    """A row for each block and each parameter that has none, in the order of the model, and for what all share."""
    given = {id(p) for group in groups for p in group["params"]}
    left_out = {name for name, p in model.named_parameters() if id(p) not in given}
    # what depends on the number of samples is not known before the first step
    sizes = [(block.bytes if block.is_ready else block.expected_bytes) / 1e6 or None for block in blocks]
    rows = [
        Row(block.names, block.structure, block.describe(), megabytes, block.reason)
        for block, megabytes in zip(blocks, sizes, strict=True)
        if not left_out.issuperset(block.names)  # a replaced layer's: measured, and not used
    ]
    seen = {name for block in blocks for name in block.names}
    for name, p in model.named_parameters():
        if name not in seen or name in left_out:
            rows.append(_without_block(name, p, name not in left_out, has_stepped))
    order = {name: k for k, (name, _) in enumerate(model.named_parameters())}
    rows.sort(key=lambda row: order.get(row.names[0], len(order)))
    momenta = 2 * sum(p.numel() * p.element_size() for p in trained.values()) / 1e6
    known = [size for size in sizes if size is not None]
    total = sum(known) + momenta if len(known) == len(sizes) else None
    return [*rows, Row(["momentum and last step"], "", "", momenta), Row(["in all"], "", "", total)]


def curvature_stats(blocks: Sequence[Block], schedule: Schedule) -> dict[str, Any]:
    """Intervals, samples left out of the averages, and condition numbers of blocks, by their first parameters."""
    pairs = ((block.names[0], block.condition()) for block in blocks if block.is_ready)
    conditions = {name: condition for name, condition in pairs if not math.isnan(condition)}
    every = schedule.factor_every or round(schedule.interval)
    intervals = {"factor_every": every, "decompose_every": schedule.decompose_every or every}
    return intervals | {"outliers": sum(block.outliers for block in blocks), "conditions": conditions}


def _without_block(name: str, p: Tensor, is_given: bool, has_stepped: bool) -> Row:
    if not p.requires_grad:
        return Row([name], "not trained", reason=FROZEN)
    if not is_given:
        return Row([name], "not trained", reason="in no parameter group: opt.add_param_group adds it")
    if not has_stepped:
        return Row([name], "nothing yet", reason="known after the model's first forward pass in training")
    why = "no output seen so far depends on it; a gradient, if one comes, is scaled by the mean of all others"
    return Row([name], "mean of others", reason=why)


def table(rows: Sequence[Row]) -> list[str]:
    """The rows as lines of at most 100 columns, unless one name alone is longer; reasons are notes below, each once."""
    notes = {reason: k + 1 for k, reason in enumerate(dict.fromkeys(row.reason for row in rows if row.reason))}
    cells = [
        (
            ", ".join(row.names),
            row.structure + (f" [{notes[row.reason]}]" if row.reason else ""),
            row.kept,
            "" if row.megabytes is None else f"{row.megabytes:.2f}",
        )
        for row in [Row(["parameters"], "preconditioner", "kept"), *rows]
    ]
    cells[0] = (*cells[0][:3], "MB")
    structure, megabytes = (max(len(cell[k]) for cell in cells) for k in (1, 3))
    most = WIDTH - structure - MOST_KEPT - megabytes - 6
    columns = [[_wrap(cell[k], width) for cell in cells] for k, width in ((0, most), (2, MOST_KEPT))]
    name, kept = (
        max((len(line) for lines in column for line in lines if len(line) <= width), default=0)
        for column, width in zip(columns, (most, MOST_KEPT), strict=True)
    )
    lines: list[str] = []
    for (_, what, _, size), names, shapes in zip(cells, *columns, strict=True):
        ahead = names if names and len(names[0]) > name else []  # too long to share its line
        rest = zip_longest([] if ahead else names, [what], shapes, [size], fillvalue="")
        lines += ahead + [f"{a:{name}}  {b:{structure}}  {c:{kept}}  {d:>{megabytes}}".rstrip() for a, b, c, d in rest]
    return lines + [line for reason, k in notes.items() for line in noted(f"[{k}] {reason}")]


def noted(text: str) -> list[str]:
    """A note in lines of at most 100 columns."""
    return wrap(text, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width` columns, broken after commas and semicolons only."""
    lines: list[str] = []
    for piece in filter(None, re.split(r"(?<=[,;]) ", text)):
        if lines and len(f"{lines[-1]} {piece}") <= width:
            lines[-1] += f" {piece}"
        else:
            lines.append(piece)
    return lines
