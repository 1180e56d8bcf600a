"""Running curvature of a weight whose rows are read in separate ranges: one block for each range."""

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
    known = [own for own in drifts if own is not None]
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
        self.reason = "; ".join(dict.fromkeys(part.reason for part in parts.values() if part.reason))

    @property
    def leaves(self) -> list[Block]:
        return list(self.parts.values())

    def split_terms(self, terms: Sequence[Term]) -> list[tuple[Block, Sequence[Term]]]:
        found = {(own.start, own.stop): own.terms for own in row_ranges(terms)}
        if found.keys() - self.parts.keys():
            return []
        return [(self.parts[rows], own) for rows, own in found.items()]

    def solve(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        found = [part.solve([g[slice(*rows)] for g in gradients]) for rows, part in self.parts.items()]
        return [torch.cat(pieces) for pieces in zip(*found, strict=True)]

    @property
    def mean_eigenvalue(self) -> Tensor:
        return torch.stack([part.mean_eigenvalue * part.dimension for part in self.leaves]).sum() / self.dimension

    @property
    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        (_, rows), last = list(self.parts.items())[-1]
        each = zip(self.names, last.parameter_shapes.values(), strict=True)
        return {name: (rows, *shape[1:]) for name, shape in each}

    bytes, expected_bytes, outliers = (_of_parts(name, sum) for name in ("bytes", "expected_bytes", "outliers"))
    updates, is_ready, drift = _of_parts("updates", max), _of_parts("is_ready", all), _of_parts("drift", _largest)

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
        own = {"structure": self.structure, "names": self.names}
        return own | {"ranges": tuple(self.parts), "parts": parts}

    @classmethod
    def from_state(cls, state: dict[str, Any], device: torch.device) -> Block:
        parts = [Block.restore(part, device) for part in state["parts"].values()]
        ranges = [(start, stop) for start, stop in state["ranges"]]
        return cls(state["names"], dict(zip(ranges, parts, strict=True)))
