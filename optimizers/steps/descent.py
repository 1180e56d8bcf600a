"""Directions of descent: from gradients and their running state to preconditioned directions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from curvature.linalg import widest
from optimizers.steps.calibration import scales
from optimizers.steps.rule import StepContext
from optimizers.steps.stacks import Stack, row_products, row_squares


@dataclass(frozen=True)
class Descent:
    """A direction for every parameter.

    Attributes:
        directions: ``u``; to be subtracted.
        slopes: inner products of gradient and direction, for each layer.
        energies: about ``u^T M u``, of each layer; of all together (1,) where M is that of all.
    """

    directions: Stack
    slopes: Tensor
    energies: Tensor


class DescentRule(Protocol):
    """Computes directions; its attributes are state, like those of a step rule."""

    def __call__(self, context: StepContext, gradients: Stack, good: Tensor) -> Descent:
        """Directions for gradients; if the flag `good` is false, leave the running state unchanged."""

    def empty_state(self, p: Tensor, options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The state of a parameter before the first step."""


class MomentumDescent:
    """``u = (M + damping)^-1 m``, with m the debiased running mean of the gradients."""

    def __call__(self, context: StepContext, gradients: Stack, good: Tensor) -> Descent:
        means = running_means(context, gradients, good)
        found = gradients.like(context.solve(means))
        slopes = context.over_shards(row_products(found.rows, means.rows, context.home), found.layers)
        energies = _energies(context, found, slopes).nan_to_num(0.0, 0.0, 0.0)  # what overflows is not taken
        scale = scales([context.block_of(layer[0]) for layer in found.layers])
        if scale is not None:
            scale = scale.to(slopes.device)
            for rows, own in zip(found.rows, scale.split([len(rows) for rows in found.rows]), strict=True):
                rows.mul_(own.to(rows.device)[:, None])
            slopes, energies = slopes * scale, energies * scale.square()
        return Descent(found, slopes, energies)

    def empty_state(self, p: Tensor, options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"momentum_buffer": torch.zeros_like(p), "weight": 0.0}


class SpringDescent:
    """``u = (G + damping)^-1 (g + damping * momentum * last u)`` for each block of exact curvature.

    This is the minimum of ``1/2 u^T G u - g^T u + damping/2 ||u - momentum * last u||^2`` (SPRING, arXiv:2401.10190).
    """

    def __call__(self, context: StepContext, gradients: Stack, good: Tensor) -> Descent:
        dampings = _dampings(context, gradients)
        momenta = [context.options[family.names[0]]["momentum"] for family in gradients.families]
        right = gradients
        if any(momenta):
            last = gradients.state("direction", context.states, context.trained)
            kept = zip(dampings.split([len(rows) for rows in last.rows]), momenta, last.rows, strict=True)
            pulls = [rows * (own * momentum).to(rows)[:, None] for own, momentum, rows in kept]
            right = Stack(gradients.families, torch._foreach_add(gradients.rows, pulls))
        found = gradients.like(context.solve(right))
        if any(momenta):
            torch._foreach_copy_(last.rows, found.rows)  # the step scales u in place
        squares, along = row_squares(found.rows, context.home), row_products(right.rows, found.rows, context.home)
        energies = along - dampings.to(squares) * squares
        energies = energies.sum()[None] if len(context.preconditioner.blocks) == 1 else energies
        return Descent(found, row_products(gradients.rows, found.rows, context.home), energies.clamp(min=0))

    def empty_state(self, p: Tensor, options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"direction": torch.zeros_like(p)} if any(group["momentum"] for group in options) else {}


def _dampings(context: StepContext, gradients: Stack) -> Tensor:
    """The damping that the block of each layer was decomposed with; zero where there is none."""
    blocks = [context.block_of(layer[0]) for layer in gradients.layers]
    zero = torch.zeros((), dtype=widest(context.home.type), device=context.home)
    found = [getattr(block, "damping", None) for block in blocks]
    return torch.stack([zero if damping is None else zero + damping for damping in found])


def running_means(context: StepContext, gradients: Stack, good: Tensor) -> Stack:
    """The debiased running means of the gradients, kept in the states of their parameters."""
    means = gradients.state("momentum_buffer", context.states, context.trained)
    weights = []
    for family in means.families:
        decay = context.options[family.names[0]]["momentum"]
        for state in (context.states[name] for name in family.names):
            state["weight"] = decay * state.get("weight", 0.0) + (1 - decay)
        weights.append((1 - decay) / context.states[family.names[0]]["weight"])
    pairs = zip(gradients.rows, means.rows, strict=True)
    taken = [torch.where(good.to(g.device), g, mean) for g, mean in pairs]
    torch._foreach_lerp_(means.rows, taken, weights)
    return means


def _energies(context: StepContext, directions: Stack, slopes: Tensor) -> Tensor:
    """``u^T M u`` of each layer."""
    dampings = [context.options[family.names[0]]["damping"] for family in directions.families]
    if all(damping is None for damping in dampings):
        return slopes
    squares = context.over_shards(row_squares(directions.rows, context.home), directions.layers)
    counts = [len(rows) for rows in directions.rows]
    parts = zip(slopes.split(counts), dampings, squares.split(counts), strict=True)
    return torch.cat([_energy(*part) for part in parts])


def _energy(slope: Tensor, damping: float | None, square: Tensor | None) -> Tensor:
    """``u^T M u``; an upper bound close to it where the damping is a small share of each factor."""
    if damping is None or square is None:
        return slope
    return torch.maximum(slope - damping * square, 1e-6 * slope)  # rounding may leave less than nothing
