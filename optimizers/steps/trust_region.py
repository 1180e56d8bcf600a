"""The step of a plain training loop: its size from slopes, inside a trust region."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvature.recording import is_sharded
from optimizers.distributed.sharding import local, spread, totals
from optimizers.preconditioner import SecondOrder
from optimizers.steps.finite_check import told
from optimizers.steps.updates import Move, adapted, inner, loosened, slope_ratio

FIRST_CHANGE = 0.1  # root-mean-square change of an output entry that the first step aims at
ADAPTATION = 0.3  # how fast the step size follows the slopes
# How long a layer's step may be as a fraction of its parameters' norm: changes of many layers add up like random ones.
LENGTH = 0.15  # over the square root of the number of layers, to begin with
LONGEST = 0.2  # where steps could have gone on for long
GROWTH = 2.0  # how much more than in recent steps a step may change the outputs
MEMORY = 0.9  # how fast that is forgotten
HARD = 10.0  # a gradient counts for at most so many times the longest of recent steps
FAR = 1e3  # one so many times as long does not count, unless the last was so, too
TRUST = "step_size", "longest", "predicted", "last_change", "usual", "is_far"  # what is known of how far to go


class PlainSteps(SecondOrder):
    """Base of `KFAC`: steps that need no closure. Arguments as of `SecondOrder`."""

    kept = (*SecondOrder.kept, *TRUST)

    def __init__(self, model: nn.Module, options: dict[str, Any], arguments: dict[str, Any]) -> None:
        super().__init__(model, options, arguments)
        self.step_size: Tensor | None = None
        self.longest: Tensor | None = None  # relative length that a layer's step may have
        self.predicted: Tensor | None = None  # slope along the last displacement, at its start
        self.usual: Tensor | None = None  # largest norm of a gradient in recent steps
        self.is_far: Tensor | None = None  # whether the last gradient did not count, a flag ()
        self.last_change: Tensor | None = None  # largest predicted change of the outputs in recent steps
        self._move: Move | None = None  # what is left to do of a step

    def _blank(self, p: Tensor) -> dict[str, Any]:
        """The state of a parameter that has seen nothing yet, see `optimizers.checkpoints`."""
        return {"momentum_buffer": torch.zeros_like(p), "weight": 0.0, "displacement": torch.zeros_like(p)}

    def _plain_step(self, gradients: Mapping[str, Tensor]) -> None:
        if not gradients:
            return
        good = self._judged(gradients)
        is_ordinary, before = self._is_ordinary(), None
        if is_ordinary:  # the host does not wait: where the batch is bad, the device changes nothing
            before = self._before()
            self._entry, self._inverted = {"step": self._steps, "renewed": False, "inverted": 0}, 0.0
        elif bool(good) and not self._knows_nothing():
            self._renew()
        else:
            self._skip()
            return
        with self.health.timed("direction"):
            directions, energy = self._directions(gradients, good)
            size = self._step_size(gradients, directions, energy)
            self._move = self._planned(directions, size, good)
        self.health.entries.append(self._entry | {"step_size": size, "accepted": True})
        self._steps += 1
        self._open = (told(good), before) if is_ordinary else None

    def _before(self) -> tuple[dict[str, Any], list[tuple[dict[str, Any], dict[str, Any]]]]:
        states = [self.state[p] for p in self._trained().values()]
        return {name: getattr(self, name) for name in TRUST}, [(state, dict(state)) for state in states]

    def _take_back(self, before: Any) -> None:
        own, states = before
        vars(self).update(own)
        for state, old in states:
            state.clear()
            state.update(old)

    def _directions(self, gradients: Mapping[str, Tensor], good: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """``u = (M + damping)^-1 m`` and about ``u^T M u``; of a bad batch's gradients nothing is taken."""
        options, parameters = self._options(), self._trained()
        own = [parameters[name] for name in gradients]
        decays = [options[name]["momentum"] for name in gradients]
        bounded = self._bounded(gradients)
        assert self.is_far is not None
        running = _running_means([self.state[p] for p in own], own, bounded, decays, good & ~self.is_far)
        means = dict(zip(gradients, running, strict=True))
        found = self._solved(means)
        self._slopes = self._inners(found, means)
        dampings = {name: options[name]["damping"] for name in found}
        is_damped = any(damping is not None for damping in dampings.values())
        squares = self._inners(found, found) if is_damped else {}
        energies = [self._energy(self._slopes[name], dampings[name], squares.get(name)) for name in found]
        return found, torch.stack(energies).nan_to_num(0.0, 0.0, 0.0).sum()  # what overflows is not gone along

    def _inners(self, ones: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Inner products of tensors by name, of which there are shards here where parameters are spread."""
        parameters = self._trained()
        found = torch.stack([inner(x, others[name]).float() for name, x in ones.items()])
        return dict(zip(ones, totals(found, [parameters[name] for name in ones]).unbind(), strict=True))

    def _bounded(self, gradients: Mapping[str, Tensor]) -> Sequence[Tensor]:
        """Gradients in the length for which they count: one batch far out of scale must not be most of the mean."""
        found = list(gradients.values())
        parameters = self._trained()
        squares = torch.stack([n.float() for n in torch._foreach_norm(found)]).square()
        norm = totals(squares, [parameters[name] for name in gradients]).sum().sqrt()
        if self.usual is None:
            self.usual = norm
        far = (norm > FAR * self.usual) & (self.usual > 0)
        self.is_far = far if self.is_far is None else far & ~self.is_far
        most = torch.where(self.usual > 0, HARD * self.usual, norm)
        self.usual = torch.maximum(torch.minimum(norm, most), MEMORY * self.usual)
        return torch._foreach_mul(found, (most / norm).clamp(max=1).nan_to_num(1.0))

    @staticmethod
    def _energy(slope: Tensor, damping: float | None, square: Tensor | None) -> Tensor:
        """``u^T M u``, or an upper bound not far away where the damping is a small share of each factor."""
        if damping is None or square is None:
            return slope
        return torch.maximum(slope - damping * square, 1e-6 * slope)  # what rounding leaves of it

    def _step_size(self, gradients: Mapping[str, Tensor], directions: Mapping[str, Tensor], energy: Tensor) -> Tensor:
        """The step size, adapted and inside the trust region; it is kept for the next step."""
        change = (energy / self.outputs.size).sqrt()
        tiny = torch.finfo(change.dtype).tiny
        lr = max(group["lr"] for group in self.param_groups)
        layers = sum(b.structure != "diagonal" for b in self.factors.blocks)
        least = LENGTH / max(layers, 1) ** 0.5
        if self.longest is None:
            self.longest = torch.full_like(change, least)
        if self.step_size is None:
            self.step_size = FIRST_CHANGE / change.clamp(min=tiny)
        elif self.predicted is not None:
            states = {name: self.state[p] for name, p in self._trained().items() if name in gradients}
            last = {name: local(state["displacement"]) for name, state in states.items() if "displacement" in state}
            if last:
                moved = torch.stack(list(self._inners(last, gradients).values()))
                ratio = slope_ratio(moved.sum(), self.predicted)
                ratio = ratio if self.is_far is None else torch.where(self.is_far, 0, ratio)
                self.longest = loosened(self.longest, ratio, least, LONGEST)
                self.step_size = adapted(self.step_size, ratio, ADAPTATION * min(1.0, lr))
        assert self.outputs.scale is not None
        reach = 1 + self.outputs.scale
        if self.last_change is not None:  # one hard batch among easy ones must not be answered with one long step
            reach = torch.minimum(reach, GROWTH * self.last_change)
        self.step_size = torch.minimum(self.step_size, reach / change.clamp(min=tiny))
        taken = self.step_size * change
        self.last_change = taken if self.last_change is None else torch.maximum(taken, MEMORY * self.last_change)
        return self.step_size

    def _planned(self, directions: Mapping[str, Tensor], size: Tensor, good: Tensor) -> Move:
        """The step, no layer further than a part of its length. The directions become displacements."""
        options, parameters = self._options(), self._trained()
        assert self.longest is not None
        last = {name: self.state[p].pop("displacement", None) for name, p in parameters.items()}
        own = {name: local(parameters[name]) for name in directions}
        joint = {k: tuple(n for n in b.names if n in directions) for b in self.factors.blocks for k in b.names}
        # tensors, since compiled code takes every other number for a constant
        number = lambda x: torch.tensor(x, dtype=torch.float64, device="cpu")
        groups = {id(g): g for g in options.values()}
        numbers = {k: (number(g["lr"]), number(1 - g["lr"] * g["weight_decay"])) for k, g in groups.items()}
        self.predicted = torch.zeros_like(size)
        move = Move([], [], [], [], [], [], [], [], size, self.longest, self.predicted, good)
        is_spread = any(is_sharded(parameters[name]) for name in directions)
        lengths, sizes = (self._inners(x, x) if is_spread else {} for x in (directions, own))
        for names in dict.fromkeys(joint.get(name, (name,)) for name in directions):
            move.layers.append(len(names))
            for name in names:
                group, p = options[name], parameters[name]
                move.parameters.append(own[name])
                move.directions.append(directions[name])
                move.last.append(None if last[name] is None else local(last[name]))
                move.squares.append((lengths[name], sizes[name]) if is_spread else None)
                move.slopes.append(self._slopes[name])
                rate, kept = numbers[id(group)]
                move.rates.append(rate)
                move.kept.append(kept if group["weight_decay"] else None)
                # it goes on in the memory of the last: that stays as it is where the batch is bad
                self.state[p]["displacement"] = spread(directions[name], p) if last[name] is None else last[name]
        return move


def _running_means(
    states: Sequence[dict[str, Any]],
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    decays: Sequence[float],
    good: Tensor,
) -> list[Tensor]:
    """The debiased running means of parameters' gradients, kept in their states."""
    weights = []
    for state, p, decay in zip(states, parameters, decays, strict=True):
        if "momentum_buffer" not in state:
            state["momentum_buffer"], state["weight"] = torch.zeros_like(p), 0.0
        state["weight"] = decay * state["weight"] + (1 - decay)
        weights.append((1 - decay) / state["weight"])
    means = [local(state["momentum_buffer"]) for state in states]
    taken = [torch.where(good, g, mean) for g, mean in zip(gradients, means, strict=True)]
    torch._foreach_lerp_(means, taken, weights)
    return means
