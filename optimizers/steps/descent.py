"""Directions of descent: from gradients and their running state to preconditioned directions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from optimizers.distributed.sharding import sum_over_shards, to_local
from optimizers.model_optimizer import shared_option
from optimizers.steps.rule import Named, StepContext
from optimizers.steps.updates import inner, inners


@dataclass(frozen=True)
class Descent:
    """A direction for every parameter.

    Attributes:
        directions: ``u`` by name; to be subtracted.
        slopes: inner products of gradient and direction, by name.
        energy: about ``u^T M u`` of all together.
    """

    directions: dict[str, Tensor]
    slopes: dict[str, Tensor]
    energy: Tensor


class DescentRule(Protocol):
    """Computes directions; its attributes are state, like those of a step rule."""

    def __call__(self, context: StepContext, gradients: Named, good: Tensor) -> Descent:
        """Directions for gradients; if the flag `good` is false, leave the running state unchanged."""

    def empty_state(self, p: Tensor, options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The state of a parameter before the first step."""


class MomentumDescent:
    """``u = (M + damping)^-1 m``, with m the debiased running mean of the gradients."""

    def __call__(self, context: StepContext, gradients: Named, good: Tensor) -> Descent:
        options, trained = context.options, context.trained
        own = [trained[name] for name in gradients]
        decays = [options[name]["momentum"] for name in gradients]
        states = [context.states[name] for name in gradients]
        means = dict(zip(gradients, running_means(states, own, list(gradients.values()), decays, good), strict=True))
        found = context.solve(means)
        slopes = inner_products(found, means, trained)
        dampings = {name: options[name]["damping"] for name in found}
        is_damped = any(damping is not None for damping in dampings.values())
        squares = inner_products(found, found, trained) if is_damped else {}
        energies = [_energy(slopes[name], dampings[name], squares.get(name)) for name in found]
        total = torch.stack(energies).nan_to_num(0.0, 0.0, 0.0).sum()  # a direction that overflows is not taken
        return Descent(found, slopes, total)

    def empty_state(self, p: Tensor, options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"momentum_buffer": torch.zeros_like(p), "weight": 0.0}


class SpringDescent:
    """``u = (G + damping)^-1 (g + damping * momentum * last u)`` for all parameters together.

    This is the minimum of ``1/2 u^T G u - g^T u + damping/2 ||u - momentum * last u||^2`` (SPRING, arXiv:2401.10190).
    """

    def __call__(self, context: StepContext, gradients: Named, good: Tensor) -> Descent:
        blocks = context.preconditioner.blocks
        damping = (getattr(blocks[0], "damping", None) if blocks else None) or 0.0
        momentum = shared_option(context.options, "momentum")
        right = dict(gradients)
        if momentum:
            lasts = {name: context.states[name].get("direction") for name in gradients}
            right |= {k: gradients[k] + damping * momentum * u for k, u in lasts.items() if u is not None}
        solved = context.solve(right)
        found = {name: solved[name] for name in gradients}
        if momentum:
            for name, u in found.items():
                context.states[name]["direction"] = u.clone()  # the step scales u in place
        slopes = {name: inner(gradients[name], u).float() for name, u in found.items()}
        energies = [inner(right[k], u).float() - damping * inner(u, u).float() for k, u in found.items()]
        return Descent(found, slopes, torch.stack(energies).sum().clamp(min=0))

    def empty_state(self, p: Tensor, options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"direction": torch.zeros_like(p)} if any(group["momentum"] for group in options) else {}


def inner_products(ones: Named, others: Named, trained: Named) -> dict[str, Tensor]:
    """Inner products by name, of shards summed over the processes that have the others."""
    found = inners(list(ones.values()), [others[name] for name in ones])
    return dict(zip(ones, sum_over_shards(found, [trained[name] for name in ones]).unbind(), strict=True))


def running_means(
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
    means = [to_local(state["momentum_buffer"]) for state in states]
    taken = [torch.where(good, g, mean) for g, mean in zip(gradients, means, strict=True)]
    torch._foreach_lerp_(means, taken, weights)
    return means


def _energy(slope: Tensor, damping: float | None, square: Tensor | None) -> Tensor:
    """``u^T M u``; an upper bound close to it where the damping is a small share of each factor."""
    if damping is None or square is None:
        return slope
    return torch.maximum(slope - damping * square, 1e-6 * slope)  # rounding may leave less than nothing
