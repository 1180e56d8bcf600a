"""Curves of the loss, and what they say of ours beside the rivals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from _contest import LEAD, Point, Record, met

WINDOW = 1.3  # a loss is the geometric mean over the evaluations since this fraction of its steps
FLOOR = 1e-9  # losses below count as this: single precision has nothing to say there
TOLERANCE = 1.1  # of the loss at equal time
ADAMW = "adamw"


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
        ends = {record.name: level(record.points, budget) for record in rivals}
        if ADAMW not in ends or not math.isfinite(ends[ADAMW]):
            raise ValueError("the rivals need a run of AdamW that ends with a finite loss")
        best = min(ends, key=ends.__getitem__)
        met = [crossing(record.points, ends[best]) for record in rivals]
        own = next(crossing(record.points, ends[ADAMW]) for record in rivals if record.name == ADAMW)
        seconds = min((found[1] for found in met if found), default=budget)
        return cls(best, ends[best], seconds, ends[ADAMW], own[0] if own else math.nan)


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
        half: the same after half of the budget.
        metric: on the test part, after the budget.
        rival: the best rival, and its metric.
    """

    name: str
    seed: int
    end: str
    speed: float
    slower: bool
    steps: float
    more: bool
    loss: float
    half: float
    metric: float
    rival: str
    rival_metric: float

    @property
    def holds(self) -> bool:
        """Finite, and not behind by more than the tolerance."""
        return self.end == "stopped" and self.loss <= TOLERANCE


def score(record: Record, rivals: Sequence[Record], budget: float) -> Score:
    """Ours beside the rivals of the same family and seed."""
    targets = Targets.of(rivals, budget)
    record = record.at_pace(rivals[0].pace)
    fast, few = crossing(record.points, targets.loss), crossing(record.points, targets.adamw)
    last = record.points[-1]
    speed = targets.seconds / (fast[1] if fast else max(LEAD * budget, last.seconds))
    steps = (few[0] if few else max(last.step, LEAD * budget / last.seconds * last.step)) / targets.steps
    loss = level(record.points, budget) / max(targets.loss, FLOOR)
    half = min(level(rival.points, budget / 2) for rival in rivals)
    best = next(rival for rival in rivals if rival.name == targets.best)
    return Score(
        record.name, record.seed, record.end, speed, fast is None, steps, few is None, loss,
        level(record.points, budget / 2) / half, at(record.points, budget), targets.best, at(best.points, budget),
    )  # fmt: skip


def at(points: Sequence[Point], seconds: float) -> float:
    """The metric at the evaluation nearest to that time."""
    return min(points, key=lambda point: abs(point.seconds - seconds)).metric


def geometric(values: Iterable[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))
