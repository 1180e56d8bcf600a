"""A weight whose rows are read in separate ranges: one block for each range."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvature.preconditioners.block import Block
from curvature.terms import Term, row_ranges

RowRange = tuple[int, int]  # the first row, and the one after the last


def _of_parts(name: str, together: Callable[[Iterator[Any]], Any]) -> Any:
    """What the parts of a `RowRangeBlock` have together."""
    return property(lambda self: together(getattr(part, name) for part in self.leaves))


def _largest(drifts: Iterator[Tensor | None]) -> Tensor | None:
    known = [drift for drift in drifts if drift is not None]
    return torch.cat(known).amax()[None] if known else None


class RowRangeBlock(Block):
    """One parameter that holds several layers, such as the projections of cross attention.

    Args:
        names: the weight, and its bias if that is one more input of every range.
        parts: a block for each range of rows; the ranges cover all rows, in order.
    """

    structure = "row ranges"

    def __init__(self, names: Sequence[str], parts: Mapping[RowRange, Block]) -> None:
        self.names, self.parts = tuple(names), dict(parts)
        (_, rows), last = list(self.parts.items())[-1]
        self.shapes = {name: (rows, *shape[1:]) for name, shape in zip(names, last.shapes.values(), strict=True)}
        self.reason = "; ".join(dict.fromkeys(part.reason for part in parts.values() if part.reason))

    @property
    def leaves(self) -> list[Block]:
        return list(self.parts.values())

    def split_terms(self, terms: Mapping[str, Sequence[Term]]) -> list[tuple[Block, Any]]:
        by_rows = {(start, stop): of_rows for start, stop, of_rows in row_ranges(terms[self.names[0]])}
        if by_rows.keys() - self.parts.keys():
            return []
        pairs = [(self.parts[rows], of_rows) for rows, of_rows in by_rows.items()]
        return [each for part, of_rows in pairs for each in part.split_terms({part.names[0]: of_rows})]

    def solve(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        solutions = [part.solve([g[slice(*rows)] for g in gradients]) for rows, part in self.parts.items()]
        return [torch.cat(pieces) for pieces in zip(*solutions, strict=True)]

    @property
    def mean_eigenvalue(self) -> Tensor:
        return torch.stack([part.mean_eigenvalue * part.dimension for part in self.leaves]).sum() / self.dimension

    bytes, expected_bytes, outliers = (_of_parts(name, sum) for name in ("bytes", "expected_bytes", "outliers"))
    updates, is_ready, drift = _of_parts("updates", max), _of_parts("is_ready", all), _of_parts("drift", _largest)
    is_outdated = _of_parts("is_outdated", any)

    @property
    def costs(self) -> tuple[float, ...]:
        return (sum(part.cost for part in self.leaves),)

    def condition(self) -> float:
        return max(part.condition() for part in self.leaves)

    def describe(self) -> str:
        return "; ".join(f"rows {start}:{stop} {part.describe()}" for (start, stop), part in self.parts.items())

    def empty_like(self) -> Block:
        return RowRangeBlock(self.names, {rows: part.empty_like() for rows, part in self.parts.items()})

    def results(self) -> dict[str, Any]:
        return {part.names[0]: part.results() for part in self.leaves}

    def load_results(self, results: Mapping[str, Any]) -> None:
        for part in self.leaves:
            part.load_results(results[part.names[0]])

    def state(self) -> dict[str, Any]:
        parts = {part.names[0]: part.state() for part in self.leaves}
        layout = {"structure": self.structure, "names": self.names}
        return layout | {"ranges": tuple(self.parts), "parts": parts}

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device) -> Block:
        parts = [Block.restore(part, device) for part in state["parts"].values()]
        ranges = [(start, stop) for start, stop in state["ranges"]]
        return cls(state["names"], dict(zip(ranges, parts, strict=True)))
