"""When to renew factors and invert blocks: often at first, then rarely, and never all blocks at once.

To renew or invert even more rarely in the first hundred steps costs more than it saves: the loss stays behind for good.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

STEPS_PER_INTERVAL = 10  # curvature changes fast at first: intervals grow by at most one step every so many steps
LARGE_COST = 2e7  # operations, above which inverting a block costs as much as a step of a small model ...
FIRST_OF_LARGE = 3  # ... and waits so many steps from the first
LEAST_WORK = 1e8  # operations of one step: blocks that are inverted together share calls
MOST_TURNS = 3  # of an interval: at each turn the host waits for the device


@dataclass
class Schedule:
    """Intervals in steps.

    Args:
        factor_every: from one renewal of the factors to the next.
        decompose_every: from one inversion of a block to the next.
    """

    factor_every: int
    decompose_every: int

    def renews(self, step: int) -> bool:
        return step % min(self.factor_every, 1 + step // STEPS_PER_INTERVAL) == 0

    def inverts(self, step: int, costs: Sequence[float]) -> list[bool]:
        """Which blocks to invert at this step, given their costs; much work is spread over a few steps."""
        usual = 1 + step // STEPS_PER_INTERVAL
        small, large = (min(self.decompose_every, x) for x in (usual, max(usual, FIRST_OF_LARGE)))
        intervals = [large if cost > LARGE_COST else small for cost in costs]
        totals, before, found = dict.fromkeys(intervals, 0.0), dict.fromkeys(intervals, 0.0), []
        for interval, cost in zip(intervals, costs, strict=True):
            totals[interval] += cost
        for interval, cost in zip(intervals, costs, strict=True):
            turns = min(interval, MOST_TURNS)
            turn = math.floor(before[interval] / max(totals[interval] / turns, LEAST_WORK))
            found.append(step % interval == min(turn, turns - 1) * (interval // turns))
            before[interval] += cost
        return found
