"""The table of how every parameter is preconditioned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from curvature.preconditioners import Block


def table(
    blocks: Sequence[Block],
    model: nn.Module,
    trained: Mapping[str, Tensor],
    groups: Sequence[Mapping[str, Any]],
    has_stepped: bool,
) -> list[str]:
    """Its lines: a row for each block, and for each parameter that has none, with the reason."""
    rows = [("parameter", "preconditioned by", "kept", "MB", "why")]
    seen: set[str] = set()
    total = 0.0
    for block in blocks:
        megabytes = (block.bytes if block.is_ready else block.expected_bytes) / 1e6
        total += megabytes
        rows.append((", ".join(block.names), block.structure, block.describe(), f"{megabytes:.2f}", block.reason))
        seen |= set(block.names)
    given = {id(p) for group in groups for p in group["params"]}
    for name, p in model.named_parameters():
        if name not in seen or id(p) not in given:
            rows.append((name, *_without_block(p, id(p) in given, has_stepped)))
    momenta = sum(p.numel() * p.element_size() for p in trained.values()) / 1e6
    rows.append(("momentum and displacement", "", "", f"{2 * momenta:.2f}", ""))
    rows.append(("in all", "", "", f"{total + 2 * momenta:.2f}", "kept between steps"))
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _without_block(p: Tensor, is_given: bool, has_stepped: bool) -> tuple[str, str, str, str]:
    """The rest of the row of a parameter that has no block."""
    if not p.requires_grad:
        return "not trained", "", "", "does not require a gradient"
    if not is_given:
        return "not trained", "", "", "in no parameter group: use add_param_group"
    if not has_stepped:
        return "nothing yet", "", "", "needs a first forward pass"
    return "mean of all others", "", "", "the output depends on it in no forward pass that was seen"
