"""Training runs with a clock of their own: CPU seconds of zero_grad, forward, backward and step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from _generality_families import Family
from _race_rivals import Entry, Setting
from torch import Tensor

GROWTH = 1.12  # of the steps from one evaluation to the next
FIRST = 4  # steps before the second evaluation


@dataclass(frozen=True)
class Point:
    """Where a run stood after so many steps and CPU seconds."""

    step: float
    seconds: float
    loss: float
    metric: float


class Run:
    """One training run: its models, optimizers, batches and random state, all fixed by the seed, and its own clock.

    Attributes:
        points: the evaluations.
        end: "" while it goes on, "diverged" after a loss that is not finite, "stopped" otherwise, or the exception.
    """

    def __init__(self, family: Family, entry: Entry, setting: Setting, seed: int) -> None:
        self.family, self.entry, self.setting, self.seed = family, entry, setting, seed
        self.end, self.steps, self.seconds, self.due = "", 0, 0.0, FIRST
        self.points: list[Point] = []
        self.random = torch.Generator().manual_seed(seed).get_state()
        with self._own_randomness():
            self.models = family.make()
            self.optimizers: list[Any] = [entry.make(model, None, **setting) for model in self.models]
        self.batches = family.batches(seed + 1)
        self.evaluate()

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """So that what a run draws does not depend on whose turn came before."""
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.random)
            yield
            self.random = torch.get_rng_state()

    def _update(self, index: int, loss: Callable[[], Tensor]) -> Tensor:
        optimizer = self.optimizers[index]
        found: list[Tensor] = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            found.append(loss())
            found[-1].backward()
            return found[-1]

        if self.entry.closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        return found[0].detach()

    def step(self) -> None:
        batch = next(self.batches)
        with self._own_randomness():
            start = time.process_time()
            try:
                loss = self.family.train(self.models, batch, self._update).item()
            except Exception as error:  # a row of the table, not the end of the table
                loss, self.end = math.nan, f"{type(error).__name__}: {error}"[:200]
            self.seconds += time.process_time() - start
        self.steps += 1
        if not math.isfinite(loss):
            self.end = self.end or "diverged"

    @torch.no_grad()
    def evaluate(self) -> None:
        for model in self.models:
            model.eval()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same draws at every evaluation
            loss, metric = self.family.evaluate(self.models)
        for model in self.models:
            model.train()
        self.points.append(Point(self.steps, self.seconds, loss, metric))
        if not math.isfinite(loss):
            self.end = self.end or "diverged"
        self.due = max(self.steps + 1, int(GROWTH * self.steps), FIRST)

    def advance(self, seconds: float) -> None:
        """Go on until its clock stands at `seconds`, or to its end, evaluating in between."""
        while not self.end and self.seconds < seconds:
            self.step()
            if self.steps >= self.due and not self.end:
                self.evaluate()

    def stop(self) -> None:
        """Evaluate where it stands, if it has not come to its end."""
        if not self.end and self.points[-1].step < self.steps:
            self.evaluate()
        self.end = self.end or "stopped"
