"""The step of a plain training loop: its size from slopes, inside a trust region."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from optimizers.second_order import SecondOrder
from optimizers.updates import adapted, are_finite, inner, loosened, slope_ratio, within_trust

FIRST_CHANGE = 0.1  # root-mean-square change of an output entry that the first step aims at
ADAPTATION = 0.3  # how fast the step size follows the slopes
# How long a layer's step may be as a fraction of its parameters' norm: changes of many layers add up like random ones.
LENGTH = 0.15  # over the square root of the number of layers, to begin with
LONGEST = 0.2  # where steps could have gone on for long
GROWTH = 2.0  # how much more than in recent steps a step may change the outputs
MEMORY = 0.9  # how fast that is forgotten


class PlainSteps(SecondOrder):
    """Base of `KFAC`: steps that need no closure. Arguments as of `SecondOrder`."""

    kept = (*SecondOrder.kept, "step_size", "longest", "predicted", "last_change")

    def __init__(self, model: nn.Module, options: dict[str, Any], arguments: dict[str, Any]) -> None:
        super().__init__(model, options, arguments)
        self.step_size: Tensor | None = None
        self.longest: Tensor | None = None  # relative length that a layer's step may have
        self.predicted: Tensor | None = None  # slope along the last displacement, at its start
        self.last_change: Tensor | None = None  # largest predicted change of the outputs in recent steps

    def _blank(self, p: Tensor) -> dict[str, Any]:
        """The state of a parameter that has seen nothing yet, see `optimizers.checkpoints`."""
        return {"momentum_buffer": torch.zeros_like(p), "weight": 0.0, "displacement": torch.zeros_like(p)}

    def _plain_step(self, gradients: Mapping[str, Tensor]) -> None:
        if not gradients:
            return
        if not are_finite(gradients.values()):
            self._skip()
            return
        self._renew()
        with self.health.timed("direction"):
            directions, energy = self._directions(gradients)
            size = self._step_size(gradients, directions, energy)
            self._apply(directions, size)
        self.health.entries.append(self._entry | {"step_size": size, "accepted": True})
        self.steps += 1

    def _directions(self, gradients: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """``u = (M + damping)^-1 m`` and about ``u^T M u``."""
        options, parameters = self._options(), self._trained()
        means = {
            name: _running_mean(self.state[parameters[name]], g, options[name]["momentum"])
            for name, g in gradients.items()
        }
        found = self._solved(means)
        self._slopes = {name: inner(means[name], u).float() for name, u in found.items()}
        energies = [self._energy(u, self._slopes[name], options[name]["damping"]) for name, u in found.items()]
        return found, torch.stack(energies).sum()

    @staticmethod
    def _energy(u: Tensor, slope: Tensor, damping: float | None) -> Tensor:
        """``u^T M u``, or an upper bound not far away where the damping is a small share of each factor."""
        if damping is None:
            return slope
        return torch.maximum(slope - damping * inner(u, u).float(), 1e-6 * slope)  # what rounding leaves of it

    def _step_size(self, gradients: Mapping[str, Tensor], directions: Mapping[str, Tensor], energy: Tensor) -> Tensor:
        """The step size, adapted and inside the trust region; it is kept for the next step."""
        change = (energy / self.output_size).sqrt()
        tiny = torch.finfo(change.dtype).tiny
        lr = max(group["lr"] for group in self.param_groups)
        layers = sum(b.structure != "diagonal" for b in self.factors.blocks)
        least = LENGTH / max(layers, 1) ** 0.5
        if self.longest is None:
            self.longest = torch.full_like(change, least)
        if self.step_size is None:
            self.step_size = FIRST_CHANGE / change.clamp(min=tiny)
        elif self.predicted is not None:
            last = {name: self.state[p].get("displacement") for name, p in self._trained().items()}
            moved = [inner(g, last[name]).float() for name, g in gradients.items() if last[name] is not None]
            if moved:
                ratio = slope_ratio(torch.stack(moved).sum(), self.predicted)
                self.longest = loosened(self.longest, ratio, least, LONGEST)
                self.step_size = adapted(self.step_size, ratio, ADAPTATION * min(1.0, lr))
        assert self.output_scale is not None
        reach = 1 + self.output_scale
        if self.last_change is not None:  # one hard batch among easy ones must not be answered with one long step
            reach = torch.minimum(reach, GROWTH * self.last_change)
        self.step_size = torch.minimum(self.step_size, reach / change.clamp(min=tiny))
        taken = self.step_size * change
        self.last_change = taken if self.last_change is None else torch.maximum(taken, MEMORY * self.last_change)
        return self.step_size

    def _apply(self, directions: Mapping[str, Tensor], size: Tensor) -> None:
        """Take the step, no layer further than a part of its length. The directions become displacements."""
        options, parameters = self._options(), self._trained()
        assert self.longest is not None
        for p in parameters.values():
            self.state[p].pop("displacement", None)
        joint = {k: tuple(n for n in b.names if n in directions) for b in self.factors.blocks for k in b.names}
        slopes = []
        for names in dict.fromkeys(joint.get(name, (name,)) for name in directions):
            length = torch.stack([inner(directions[k], directions[k]).float() for k in names]).sum().sqrt()
            # a tensor counts for at least one, so that parameters that start at zero can leave it
            own = torch.stack([inner(parameters[k], parameters[k]).float().clamp(min=1) for k in names]).sum().sqrt()
            cut = within_trust(size, length, own, self.longest)
            for name in names:
                p, group = parameters[name], options[name]
                if group["weight_decay"]:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                displacement = directions[name].mul_((-cut * group["lr"]).to(p.dtype))
                p.add_(displacement)
                self.state[p]["displacement"] = displacement
                slopes.append(cut * group["lr"] * self._slopes[name])
        self.predicted = -torch.stack(slopes).sum()


def _running_mean(state: dict[str, Any], gradient: Tensor, decay: float) -> Tensor:
    """The debiased running mean of a parameter's gradients, kept in its state."""
    if "momentum_buffer" not in state:
        state["momentum_buffer"], state["weight"] = torch.zeros_like(gradient), 0.0
    state["weight"] = decay * state["weight"] + (1 - decay)
    return state["momentum_buffer"].lerp_(gradient, (1 - decay) / state["weight"])
