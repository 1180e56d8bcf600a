"""Step size, momentum and damping from the exact quadratic model of each batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from optimizers.steps.closure_replay import Replay
from optimizers.steps.quadratic_model import GROW, SHRINK, Quadratic, next_damping
from optimizers.steps.updates import inner

GROUPS = 8  # at most so many ranges of layers have a step size of their own
STRIDE = 2  # every so manieth sample of a batch gives the curvature of the directions
FIRST = 1e-3  # the first damping, relative to the curvature along the first direction
TRIES = 12  # dampings tried before a step is given up
MEMORY = 0.8  # of the running averages of slope and curvature on fresh data
LEAST = 0.2  # smallest part of the model's own step
HOLD, RAISE = 0.75, 0.6  # parts below which damping no longer falls, and below which it rises

Named = Mapping[str, Tensor]


class Adaptive:
    """What an adaptive optimizer remembers from step to step: plain numbers and the last displacement."""

    def __init__(self) -> None:
        self.damping = -1.0  # unknown
        self.last: dict[str, Tensor] = {}  # displacement
        self.start: dict[str, Tensor] = {}  # the parameters before it
        self.part = 1.0  # of the model's own step that fresh data approve of
        self.slope, self.bend = 1.0, 1.0
        self.taken = 1.0  # of the model's own step, by the last step
        self.predicted = 0.0  # by the last step's own batch, for the whole step

    def move(
        self, replay: Replay, loss: Tensor, gradients: Named, groups: Sequence[Named], rates: Mapping[str, float]
    ) -> dict[str, Any]:
        """Move the parameters so that the loss of the batch falls, as its quadratic model says.

        Args:
            groups: directions of descent, their parameters disjoint.
            rates: learning rates by parameter. The largest shortens the step that is found, the others, relative to it,
                the directions.

        Returns:
            What to remember of the step.
        """
        lr = max(rates.values())
        entry: dict[str, Any] = {"loss": float(loss), "part": self.part, "accepted": False, "rollbacks": 0}
        entry |= {"damping": self.damping if self.damping >= 0 else math.nan, "ratio": math.nan}
        if lr == 0:  # a schedule that starts at zero: nothing moves, nothing is learnt
            self.forget()
            return entry | {"accepted": True, "step_size": 0.0}
        groups = [_scaled(d, {name: rate / lr for name, rate in rates.items()}) for d in groups]
        last = {name: d for name, d in self.last.items() if name in gradients and rates[name] > 0}
        directions = [*groups, last] if last else list(groups)
        model = Quadratic(
            torch.tensor([_inner(d, gradients) for d in directions], dtype=torch.float64, device="cpu"),
            replay.curvatures(directions, STRIDE),
            _norms(groups, last),
        )
        if not model.is_finite:
            self.forget()
            return entry
        if last.keys() == self.last.keys() and last:
            self._learn(float(model.slopes[-1]), float(model.curvature[-1, -1]))
        if self.damping < 0:
            whole = torch.ones(len(directions), dtype=torch.float64, device="cpu")
            norm = float(whole @ model.norms @ whole)
            self.damping = FIRST * max(float(whole @ model.curvature @ whole), 1e-30) / max(norm, 1e-30)
        return self._searched(replay, model, directions, lr, entry | {"groups": len(groups)})

    def _searched(
        self, replay: Replay, model: Quadratic, directions: Sequence[Named], lr: float, entry: dict[str, Any]
    ) -> dict[str, Any]:
        """The first step on a ladder of dampings that makes the loss fall."""
        parameters = dict(replay.model.named_parameters())
        groups, taken, ratio = entry.pop("groups"), self.part * lr, math.nan
        start = {name: parameters[name].detach().clone() for d in directions for name in d}
        for _ in range(TRIES):
            alpha = model.minimum(self.damping)
            move = _combined(directions, (taken * alpha).tolist())
            expected = model.value(taken * alpha, 0.0)
            try:
                shift(parameters, move)
                ratio = (float(replay.loss()) - entry["loss"]) / expected if expected < 0 else math.nan
            except BaseException:
                put(parameters, start)
                raise
            if math.isfinite(ratio) and ratio > 0:
                self.last, self.start = move, start
                self.predicted, self.taken = -float(model.slopes @ alpha), taken
                entry |= {"accepted": True, "step_size": float(alpha[:groups].mean()), "damping": self.damping}
                self.damping = self._bounded(next_damping(self.damping, ratio))
                return entry | {"ratio": ratio}
            put(parameters, start)
            self.damping *= GROW
            entry["rollbacks"] += 1
        self.forget()
        return entry | {"damping": self.damping, "ratio": ratio}

    def undo(self, parameters: Named) -> dict[str, Tensor]:
        """Return to where the last step began, and be more careful; what `redo` takes."""
        there = {name: parameters[name].detach().clone() for name in self.start}
        put(parameters, self.start)
        self.damping *= GROW
        return there

    def redo(self, parameters: Named, there: Named) -> None:
        """The opposite of `undo`."""
        put(parameters, there)
        self.damping /= GROW

    def forget(self) -> None:
        """The last step was no good: it is no direction."""
        self.last, self.start = {}, {}

    @staticmethod
    def grouped(layers: Sequence[Named]) -> list[dict[str, Tensor]]:
        """At most `GROUPS` directions, each of layers next to each other."""
        count = min(GROUPS, len(layers))
        ends = [round(k * len(layers) / count) for k in range(count + 1)]
        return [{k: v for layer in layers[a:b] for k, v in layer.items()} for a, b in zip(ends, ends[1:], strict=False)]

    def _bounded(self, damping: float) -> float:
        """The next damping. A batch alone would have ever longer steps; where fresh data would not, it is noise."""
        approved = self.slope / self.bend
        if approved < RAISE:
            return max(damping, self.damping / SHRINK)
        return max(damping, self.damping) if approved < HOLD else damping

    def _learn(self, slope: float, bend: float) -> None:
        """Compare the last step with what a batch that it did not see says of it."""
        if bend <= 0 or self.predicted <= 0:
            return
        start = bend - slope  # how steeply the loss of this batch fell where the step began
        self.slope = MEMORY * self.slope + (1 - MEMORY) * start / self.taken / self.predicted
        self.bend = MEMORY * self.bend + (1 - MEMORY) * bend / self.taken**2 / self.predicted
        self.part = min(1.0, max(LEAST, self.slope / self.bend))


def _combined(directions: Sequence[Named], alpha: Sequence[float]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for direction, factor in zip(directions, alpha, strict=True):
        for name, d in direction.items():
            found[name] = found[name].add_(d, alpha=factor) if name in found else d * factor
    return found


@torch.no_grad()
def shift(parameters: Named, move: Named) -> None:
    for name, d in move.items():
        parameters[name].add_(d)


@torch.no_grad()
def put(parameters: Named, values: Named) -> None:
    for name, value in values.items():
        parameters[name].copy_(value)


def _scaled(move: Named, rates: Mapping[str, float]) -> dict[str, Tensor]:
    return {name: d if rates[name] == 1.0 else d * rates[name] for name, d in move.items()}


def _norms(groups: Sequence[Named], last: Named) -> Tensor:
    """Inner products of the directions; those of groups share no parameter."""
    own = [_inner(d, d) for d in groups]
    exact: Any = {"dtype": torch.float64, "device": "cpu"}
    matrix = torch.diag(torch.tensor([*own, _inner(last, last)], **exact))
    matrix[-1, :-1] = matrix[:-1, -1] = torch.tensor([_inner(d, last) for d in groups], **exact)
    return matrix if last else matrix[:-1, :-1]


def _inner(one: Named, other: Named) -> float:
    found = [inner(d, other[name]) for name, d in one.items() if name in other]
    return float(torch.stack(found).double().sum()) if found else 0.0
