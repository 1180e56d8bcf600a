"""The demo's problem, and a race on it: training runs side by side, each with a clock of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from tqdm import tqdm

from optimizers import KFAC

WIDTHS = (64, 256, 128, 64, 16)  # of the encoder; the decoder is its mirror image
BATCH = 256
OPTIMIZERS: dict[str, Callable[[nn.Module, float], torch.optim.Optimizer]] = {
    "KFAC": lambda model, lr: KFAC(model),
    "SGD": lambda model, lr: torch.optim.SGD(model.parameters(), lr, momentum=0.9),
    "AdamW": lambda model, lr: torch.optim.AdamW(model.parameters(), lr),
}
GRIDS = {"SGD": (3e-3, 1e-2, 3e-2, 1e-1), "AdamW": (1e-3, 3e-3, 1e-2, 3e-2)}
WIDEN = 3  # how often a grid may grow
FINER = 1.12  # ratio of the numbers of steps of two evaluations
WARM_UP = 3  # steps of every optimizer on a throwaway model before the race, so that no clock pays for first calls


@dataclass(frozen=True)
class Data:
    """Images (N, 64) in [0, 1] to train on and to test on, and the labels of the latter, for the picture."""

    train: Tensor
    test: Tensor
    labels: Tensor


def digits(device: torch.device) -> Data:
    """The 1,797 digits of scikit-learn; 360 of them are held out, the same whatever the seed."""
    images, labels = load_digits(return_X_y=True)
    train, test, _, kept = train_test_split(images / 16, labels, test_size=360, stratify=labels, random_state=0)
    as_tensor = lambda x: torch.as_tensor(x, dtype=torch.float32, device=device)
    return Data(as_tensor(train), as_tensor(test), torch.as_tensor(kept))


def autoencoder() -> nn.Sequential:
    """Tanh layers and a linear code; the output is one logit per pixel."""
    layers: list[nn.Module] = []
    for widths in (WIDTHS, WIDTHS[::-1]):
        for i, o in pairwise(widths):
            layers += [nn.Linear(i, o), nn.Tanh()]
        layers.pop()
    return nn.Sequential(*layers)


def pixel_loss(logits: Tensor, images: Tensor) -> Tensor:
    """Binary cross-entropy, summed over the pixels of an image and averaged over the images."""
    return F.binary_cross_entropy_with_logits(logits, images, reduction="sum") / len(logits)


@dataclass(frozen=True)
class Point:
    """The loss on the held-out digits after so many steps of a run and so many seconds of its clock."""

    step: int
    seconds: float
    loss: float


@dataclass
class Run:
    """One training run: its own model, optimizer and batches, all fixed by the seed, and its own clock."""

    data: Data
    kind: str
    lr: float
    seed: int
    steps: int = 0
    seconds: float = 0.0
    failed: bool = False  # the loss is no longer finite
    reached: float = math.inf  # seconds after the steps that the race goes over
    points: list[Point] = field(default_factory=list)
    outputs: Tensor | None = None  # on the held-out digits at that moment

    def __post_init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            self.model = autoencoder().to(self.data.train.device)
        self.optimizer = OPTIMIZERS[self.kind](self.model, self.lr)
        self.batches = self._batches()

    @property
    def name(self) -> str:
        return self.kind if self.kind == "KFAC" else f"{self.kind}, lr {self.lr:g}"

    def _batches(self) -> Iterator[Tensor]:
        x, generator = self.data.train, torch.Generator().manual_seed(self.seed + 1)
        while True:
            order = torch.randperm(len(x), generator=generator).to(x.device)
            yield from (x[chosen] for chosen in order.split(BATCH)[: len(x) // BATCH])

    def _now(self) -> float:
        if self.data.train.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def advance(self) -> None:
        """One step. The clock runs for the training loop alone: not for drawing the batch, nor for evaluation."""
        x = next(self.batches)
        start = self._now()
        self.optimizer.zero_grad()
        loss = pixel_loss(self.model(x), x)
        loss.backward()
        self.optimizer.step()
        self.seconds += self._now() - start
        self.steps += 1
        self.failed = not math.isfinite(loss.item())

    @torch.no_grad()
    def evaluate(self) -> float:
        """The loss on the held-out digits, which is noted with the step and the clock."""
        outputs = self.model(self.data.test)
        loss = pixel_loss(outputs, self.data.test).item()
        self.failed = self.failed or not math.isfinite(loss)
        self.points.append(Point(self.steps, self.seconds, math.inf if self.failed else loss))
        self.outputs = outputs if self.reached == math.inf else self.outputs
        return self.points[-1].loss

    def at_step(self, step: int) -> float:
        """The loss after exactly `step` steps; infinite if the run did not come so far."""
        return next((point.loss for point in self.points if point.step == step), math.inf)

    def at_time(self, seconds: float) -> float:
        """The loss after `seconds` of the run's own clock, interpolated between the evaluations around it."""
        if self.failed and seconds > self.points[-1].seconds:
            return math.inf
        return float(np.interp(seconds, [p.seconds for p in self.points], [p.loss for p in self.points]))


def half_decade(lr: float, up: bool) -> float:
    """The next of ..., 0.01, 0.03, 0.1, ... above or below."""
    power = math.floor(math.log10(lr) + 1e-6)
    one = lr < 2 * 10.0**power
    return float(f"{(3 if one else 10) if up else (0.3 if one else 1):g}e{power}")


def tune(data: Data, kind: str, grid: Sequence[float], steps: int, seed: int, bar: tqdm) -> dict[float, float]:
    """The loss for each learning rate of the grid, and for further ones while the best lies at its end."""
    losses: dict[float, float] = {}

    def attempt(lr: float) -> None:
        run = Run(data, kind, lr, seed)
        bar.set_description(f"{kind}, lr {lr:g}")
        for _ in range(steps):
            if not run.failed:
                run.advance()
            bar.update()
        losses[lr] = run.evaluate()

    for lr in grid:
        attempt(lr)
    for _ in range(WIDEN):
        best = min(losses, key=lambda lr: losses[lr])
        if min(losses) < best < max(losses) or losses[best] == math.inf:
            break
        bar.total += steps
        attempt(half_decade(best, up=best == max(losses)))
    return dict(sorted(losses.items()))


def next_run(runs: Sequence[Run]) -> Run | None:
    """The run whose own clock is the least advanced, until every one has its steps and has run as long as the slowest.

    So all clocks advance together, and whatever else the machine does hits all runs alike.
    """
    live = [run for run in runs if not run.failed]
    horizon = max((run.reached for run in live), default=0.0)
    return min((run for run in live if run.seconds < horizon), key=lambda run: run.seconds, default=None)


def race(data: Data, rates: Mapping[str, float], steps: int, marks: Sequence[int], seed: int, bar: tqdm) -> list[Run]:
    """Train with each optimizer of `rates`, evaluating after `marks` and a grid of numbers of steps."""
    for kind, lr in rates.items():
        throwaway = Run(data, kind, lr, seed)
        for _ in range(WARM_UP):
            throwaway.advance()
    runs = [Run(data, kind, lr, seed) for kind, lr in rates.items()]
    due = {*marks, steps, *(round(FINER**k) for k in range(100))}
    for run in runs:
        run.evaluate()
    bar.set_description("race")
    while live := next_run(runs):
        live.advance()
        if live.steps <= steps:
            bar.update()
        if live.steps in due or live.failed:
            live.evaluate()
        if live.steps == steps and not live.failed:
            live.reached = live.seconds
    for run in runs:
        if run.points[-1].step != run.steps:
            run.evaluate()
    return runs
