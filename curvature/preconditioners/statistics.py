"""What recorded passes measure of a model's curvature, before it enters a running average."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from curvature.gradients import Jacobian
from curvature.linalg import stack
from curvature.structures import Structure


@dataclass(frozen=True)
class BatchFacts:
    """What is known of a recorded pass, beside what it computed."""

    count: int  # of samples
    rank: int = 0  # this process
    world_size: int = 1  # the number of processes that share the batch
    displacement: Mapping[str, Tensor] = field(default_factory=dict)  # by name, along which to measure changes, too
    independent: bool = False  # whether all entries of the vectors sent back are independent, with mean zero


@dataclass
class RowStatistics:
    """Rows ``v^T J`` of the Jacobian of all parameters."""

    parts: list[Jacobian]  # of each pass
    samples: float
    times: float = 1.0  # factor by which the vectors are yet to be multiplied

    @property
    def shapes(self) -> Any:
        """Shapes of the parameters."""
        return self.parts[0].shapes

    @property
    def jacobian(self) -> Jacobian:
        """All rows."""
        return replace(self.parts[0], parts=[part for jacobian in self.parts for part in jacobian.parts])

    def add_(self, other: RowStatistics) -> None:
        """Add rows of other samples; those of no samples are what is still missing in the rows of the last pass."""
        parts = [jacobian.scaled(other.times / self.times) for jacobian in other.parts]
        if other.samples:
            self.parts += parts
            self.samples += other.samples
        else:
            self.parts[-1] = self.parts[-1].plus(*parts)


class SquaredChange(NamedTuple):
    """``(v^T J u)^2``, what vectors v saw along a displacement u, summed over samples and vectors."""

    value: Any = 0.0  # a tensor (), where blocks were reached
    blocks: frozenset[str] = frozenset()  # those that u and v have reached, by their first parameters

    @staticmethod
    def of(changes: Mapping[str, Tensor]) -> SquaredChange:
        """From ``v^T J u`` (N,) of each block, for one vector."""
        return SquaredChange(stack(changes.values()).sum(0).square().sum() if changes else 0.0, frozenset(changes))


@dataclass
class CurvatureStatistics:
    """Statistics of one or more passes, as a value that can be added up and scaled.

    Attributes:
        blocks: sums over samples, by the first parameter of each leaf. They add up over processes, too.
        rows: processes gather these, which do not add up.
        along: the squared change along a displacement.
    """

    blocks: dict[str, Structure] = field(default_factory=dict)
    rows: RowStatistics | None = None
    along: SquaredChange = SquaredChange()

    def __bool__(self) -> bool:
        return bool(self.blocks) or self.rows is not None

    def add_(self, other: CurvatureStatistics) -> None:
        """Add other statistics, which must not be used any more: their memory may be shared."""
        if other.rows is not None:
            if self.rows is None or self.rows.shapes != other.rows.shapes:  # other parameters are trained now
                self.blocks, self.rows = other.blocks, other.rows
                return
            self.rows.add_(other.rows)
        for name, block in other.blocks.items():
            if name in self.blocks:
                self.blocks[name].add_(block)
            else:
                self.blocks[name] = block
        self.along = SquaredChange(self.along.value + other.along.value, self.along.blocks | other.along.blocks)

    def scale_vectors_(self, times: float) -> None:
        """Rescale as if the vectors had been `times` as long."""
        self.blocks = {name: block.scaled(times**2) for name, block in self.blocks.items()}
        if self.rows is not None:
            self.rows.times *= times
        self.along = self.along._replace(value=times**2 * self.along.value)
