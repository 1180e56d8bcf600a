"""When to renew factors and invert blocks: as often as the curvature changes, and less and less often otherwise."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

# Curvature changes fast at first. Intervals grow by one step every third step up to four; then, and from the start to
# one that is given or where single steps change the curvature, every tenth step up to ten, and further only where the
# curvature changes little.
STEPS_PER_INTERVAL = 3, 10
EARLY_INTERVAL, USUAL_INTERVAL = 4, 10
FAST = 0.5  # change of the running averages by one step, of their size, after which intervals grow slowly
LONGEST_INTERVAL = 50
DRIFT = 0.1  # relative change of a running average (Frobenius norm) at which it is renewed, and its side inverted
SHORTER, LONGER = 0.5, 1.5  # bounds on the change of an interval from one renewal to the next
MOST_AWAITED = 300  # steps
AGREEMENT = 2.0  # a larger factor between energies of a step that were measured and predicted is a disagreement
LARGE_COST = 2e7  # operations, above which inverting costs as much as a step of a small model: a block may wait ...
MOST_PATIENCE = 2.0  # ... for so many times the change: with stale inverses a deep autoencoder takes twice the steps


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
        early, usual = (1 + step // steps for steps in STEPS_PER_INTERVAL)
        if given is not None:
            return min(given, usual)
        early = 1 if self.changes_fast else min(early, EARLY_INTERVAL)
        return max(early, min(usual, USUAL_INTERVAL), round(self.interval))

    def note_renewal(self, step: int, drifts: Mapping[str, Sequence[float]]) -> None:
        """Note a renewal, and how far the sides of each block have moved by it."""
        used = self._every(step, self.factor_every)
        last, self.renewed = self.renewed, step
        for name, moves in drifts.items():
            before = self._drifts_of(name, len(moves))
            self.drifts[name] = [x + drift for x, drift in zip(before, moves, strict=True)]
        if drifts:
            drift = max(statistics.median(map(max, drifts.values())), DRIFT / LONGER)
            self.interval = min(used * max(DRIFT / drift, SHORTER), LONGEST_INTERVAL)
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

    def note_energies(self, measured: float, predicted: float) -> None:
        """Note what the last step did beside what the curvature said: where they differ, it is not to be relied on."""
        if not predicted / AGREEMENT < measured < predicted * AGREEMENT:
            self.interval, self.drifts = 1.0, {name: [math.inf] for name in self.inverted}

    def inverts(self, step: int, name: str, costs: Sequence[float]) -> list[bool]:
        """Which sides of a block to invert; a dear block waits for more, and a dear side that rests stays."""
        if name not in self.inverted:
            return [True] * len(costs)
        if self.decompose_every is not None:
            return [step >= self.inverted[name] + self._every(step, self.decompose_every)] * len(costs)
        patience = min(max(sum(costs) / LARGE_COST, 1.0) ** (1 / 3), MOST_PATIENCE)
        drifts = self._drifts_of(name, len(costs))
        is_due = max(drifts) >= DRIFT * patience
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
