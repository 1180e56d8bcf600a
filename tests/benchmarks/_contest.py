"""What both races share: runs with a clock of their own, grids of learning rates, and the file of what was tuned."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from _race_rivals import Entry, Setting
from _report import load, machine, save
from torch import Tensor, nn

WIDEN = 6  # how often a grid may grow


def built(entry: Entry, model: nn.Module, problem: Any, setting: Setting) -> Any:
    """The optimizer of a setting, which may name a momentum other than the usual one."""
    rest = {name: value for name, value in setting.items() if name != "momentum"}
    optimizer = entry.make(model, problem, **rest)
    if "momentum" in setting:
        for group in (group for part in getattr(optimizer, "parts", [optimizer]) for group in part.param_groups):
            if "betas" in group:
                group["betas"] = setting["momentum"], group["betas"][1]
            else:
                group["momentum"] = setting["momentum"]
    return optimizer


class Training:
    """One training run: its models, optimizers, batches and random state, all fixed by the seed, and its own clock.

    It shows CPU seconds, as other work on the machine does not count, and seconds on a GPU.

    Attributes:
        end: "" while it goes on, then why it ended.
        points: the evaluations, of which `due` is the step of the next.
        durations: seconds of each step.
    """

    def __init__(self, problem: Any, entry: Entry, setting: Setting, seed: int, device: torch.device) -> None:
        self.problem, self.entry, self.setting, self.seed, self.device = problem, entry, setting, seed, device
        self.end, self.due, self.seconds = "", 1, 0.0
        self.durations: list[float] = []
        self.points: list[Any] = []
        self.random = torch.Generator().manual_seed(seed).get_state()
        with self._own_randomness():
            self.models: Sequence[nn.Module] = [model.to(device) for model in self.make()]
            self.optimizers = [built(entry, model, problem, setting) for model in self.models]
        self.batches = problem.batches(seed + 1)
        self.evaluate()

    def make(self) -> Sequence[nn.Module]:
        raise NotImplementedError

    def train(self, batch: Any) -> Tensor:
        """One round of the user's loop, by `update`; returns the loss."""
        raise NotImplementedError

    def evaluate(self) -> None:
        """Add a point; say when the next is due, and whether the run has ended."""
        raise NotImplementedError

    def fail(self, error: Exception | None) -> None:
        """The loss is not finite, or the error was raised."""
        raise NotImplementedError

    @property
    def steps(self) -> int:
        return len(self.durations)

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """So that what a run draws does not depend on whose turn came before."""
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.random)
            yield
            self.random = torch.get_rng_state()

    def _now(self) -> float:
        if self.device.type != "cuda":
            return time.process_time()
        torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def update(self, index: int, loss: Callable[[], Tensor]) -> Tensor:
        """Train the model of that index on a loss, which is returned."""
        optimizer = self.optimizers[index]
        losses: list[Tensor] = []

        def closure() -> Tensor:
            optimizer.zero_grad()
            losses.append(loss())
            losses[-1].backward()
            return losses[-1]

        if self.entry.closure:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        return losses[0].detach()

    def step(self) -> None:
        """The clock runs for the training loop alone: not for drawing the batch, nor for evaluation."""
        batch, loss, raised = next(self.batches), math.nan, None
        with self._own_randomness():
            start = self._now()
            try:
                loss = self.train(batch).item()
            except Exception as error:
                raised = error
            self.durations.append(self._now() - start)
        self.seconds += self.durations[-1]
        if not math.isfinite(loss):
            self.fail(raised)

    def advance(self, seconds: float) -> None:
        """Go on until its clock stands at `seconds`, or to its end, evaluating in between."""
        while not self.end and self.seconds < seconds:
            self.step()
            if self.steps >= self.due and not self.end:
                self.evaluate()


@dataclass(frozen=True)
class Trial:
    """One point of a grid; steps and seconds to the target or, where it was not reached, to the end of the run."""

    setting: Setting
    end: str
    steps: float
    seconds: float
    loss: float


def half_decade(lr: float, up: bool) -> float:
    """The next of ..., 0.01, 0.03, 0.1, ... above or below."""
    power = math.floor(math.log10(lr) + 1e-6)
    one = lr < 2 * 10.0**power
    return float(f"{(3 if one else 10) if up else (0.3 if one else 1):g}e{power}")


def next_rate(rates: Sequence[float], best: float, all_failed: bool) -> float | None:
    """One more learning rate, where the best lies at an end of the grid; a lower one where all failed."""
    if min(rates) < best < max(rates):
        return None
    up = best == max(rates) and not all_failed
    return half_decade(max(rates) if up else min(rates), up)


def save_tuned(path: Path, problem: str, entry: Entry, best: Trial, trials: Sequence[Trial], device: str) -> None:
    """Into the file of tuned settings, which is read again each time: another problem may be tuned meanwhile."""
    tuned = load(path)
    grid = []
    for trial in trials:
        rounded = {name: round(v, 4) if isinstance(v, float) else v for name, v in asdict(trial).items()}
        grid.append({**rounded, "loss": float(f"{trial.loss:.4g}") if math.isfinite(trial.loss) else None})
    found = {"chosen": best.setting, "machine": machine(device), "grid": grid}
    tuned.setdefault(problem, {})[entry.name] = found
    save(path, tuned)


def settings(path: Path, problem: str, entries: Sequence[Entry], how: str) -> dict[Entry, Setting]:
    """Those who take part, with what they were tuned to.

    Raises:
        SystemExit: a rival was not tuned yet; `how` says what to run.
    """
    tuned = load(path).get(problem, {})
    missing = [entry.name for entry in entries if entry.lrs and entry.name not in tuned]
    if missing:
        raise SystemExit(f"not tuned: {how} {' '.join(missing)}")
    return {entry: tuned[entry.name]["chosen"] if entry.lrs else {} for entry in entries}
