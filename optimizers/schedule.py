"""When to renew factors and invert blocks: as often as the curvature changes, and less and less often otherwise."""

from __future__ import annotations

import random
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

# Intervals grow by one step every fourth step up to four, then every tenth step up to ten, and from the start so where
# single steps change the curvature; further only where the curvature changes little.
EARLY_INTERVAL, USUAL_INTERVAL, LONGEST_INTERVAL = 4, 10, 50
FAST = 0.5  # change of the running averages by one step, of their size, after which intervals grow slowly
DRIFT = 0.1  # relative change of a running average (Frobenius norm) at which it is renewed, and its side inverted
LONGER = 1.5  # most that an interval grows, or shrinks, from one renewal to the next
MOST_AWAITED = 300  # steps
LARGE_COST = 2e7  # operations, above which inverting costs as much as a step of a small model: a side that rests stays


@dataclass
class Schedule:
    """Steps from one renewal of the running averages to the next, and from one inversion of a block to the next.

    A Kronecker-factored block has two sides, which change at different speeds and are inverted separately: those of the
    data hardly change at all. Any other block is one side.
    """

    factor_every: int | None  # after the first hundred steps; None: as the running averages change
    decompose_every: int | None  # likewise
    interval: float = 1.0  # in steps, as the last renewals suggest
    changes_fast: bool = False
    renewed: int | None = None  # the step of the last renewal
    inverted: dict[str, int] = field(default_factory=dict)  # that of the last inversion, by a block's first parameter
    # how far each side has moved since its own, as a sum of relative changes; one number: so far all have
    drifts: dict[str, list[float]] = field(default_factory=dict)
    shift: int = 0  # of the next renewal, in steps
    # parameters that have moved without curvature, as of a head that is seldom used, and until when each step renews
    awaited: dict[str, int] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)  # those of which a renewal has shown none

    def renews(self, step: int) -> bool:
        if self.renewed is None or self.awaited:
            return True
        return step >= self.renewed + max(self._every(step, self.factor_every) + self.shift, 1)

    def _every(self, step: int, given: int | None) -> int:
        early, usual = (min(1 + step // most, most) for most in (EARLY_INTERVAL, USUAL_INTERVAL))
        if given is not None:
            return min(given, 1 + step // USUAL_INTERVAL)
        return max(1 if self.changes_fast else early, usual, round(self.interval))

    def note_renewal(self, step: int, drifts: Mapping[str, Sequence[float]]) -> None:
        """Note a renewal, and how far the sides of each block have moved by it."""
        used = self._every(step, self.factor_every)
        last, self.renewed = self.renewed, step
        for name, moves in drifts.items():
            before = self._drifts_of(name, len(moves))
            self.drifts[name] = [x + drift for x, drift in zip(before, moves, strict=True)]
        if drifts:
            drift = max(statistics.median(map(max, drifts.values())), DRIFT / LONGER)
            self.interval = min(used * max(DRIFT / drift, 1 / LONGER), LONGEST_INTERVAL)
            self.changes_fast |= last is not None and drift > FAST * max(step - last, 1)

    def note_seen(self, step: int, known: Collection[str], is_whole: bool) -> None:
        """Note after a renewal which parameters have curvature, and whether it has measured all that are trained.

        If not, the loop may have a period, and renewals at a multiple of it would see the same part of the model for
        ever: the next comes at an irregular distance.
        """
        self.awaited = {name: end for name, end in self.awaited.items() if name not in known and step < end}
        every = self._every(step, self.factor_every)
        is_free = self.factor_every is None and not is_whole
        self.shift = random.Random(step).randrange(every) - every // 2 if is_free else 0

    def note_unknown(self, step: int, names: Iterable[str]) -> None:
        """Note parameters that move at a step without curvature."""
        if self.renewed == step:
            self.unknown = sorted({*self.unknown, *names})
        new = [name for name in names if name not in self.unknown]
        self.awaited = dict.fromkeys(new, step + MOST_AWAITED) | self.awaited

    def inverts(self, step: int, name: str, costs: Sequence[float]) -> list[bool]:
        """Which sides of a block to invert, once one has changed; a dear one that rests stays."""
        if name not in self.inverted:
            return [True] * len(costs)
        if self.decompose_every is not None:
            return [step >= self.inverted[name] + self._every(step, self.decompose_every)] * len(costs)
        drifts = self._drifts_of(name, len(costs))
        is_due = max(drifts) >= DRIFT
        return [is_due and (cost <= LARGE_COST or drift >= DRIFT) for cost, drift in zip(costs, drifts, strict=True)]

    def note_inversion(self, step: int, name: str, sides: Sequence[bool]) -> None:
        before = self._drifts_of(name, len(sides))
        self.inverted[name] = step
        self.drifts[name] = [0.0 if is_new else x for is_new, x in zip(sides, before, strict=True)]

    def _drifts_of(self, name: str, sides: int) -> list[float]:
        drifts = self.drifts.get(name, [0.0])
        return drifts if len(drifts) == sides else [max(drifts)] * sides

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, value in asdict(Schedule(**state)).items():
            setattr(self, name, value)
