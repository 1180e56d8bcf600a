"""Directions of descent: from gradients and their running state to preconditioned directions."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from curvature.linalg import in_place, widest
from optimizers.steps.calibration import scales
from optimizers.steps.rule import StepContext
from optimizers.steps.stacks import Layer, Layout, Stack, StateStack, row_norms, row_products


@dataclass(frozen=True)
class Descent:
    """A direction for every parameter.

    Attributes:
        directions: ``u``; to be subtracted.
        slopes: inner products of the gradients' running mean and the scaled direction, for each layer.
        energies: about ``u^T M u`` of scaled directions, of each layer; of all together (1,) where M is that of all.
        scales: what the directions of the layers (n,) are to be multiplied by; None: by nothing.
    """

    directions: Stack
    slopes: Tensor
    energies: Tensor
    scales: Tensor | None = None


class DescentRule(Protocol):
    """Computes directions."""

    def __call__(self, context: StepContext, gradients: Stack, good: Tensor, taken: Tensor) -> Descent:
        """Directions for gradients.

        Args:
            good: a flag (); if it is false, the running state does not change.
            taken: a flag (); if it is false, these gradients do not enter the running state.
        """

    is_capturable: bool  # whether a CUDA graph can hold its part of an ordinary step

    @property
    def tensors(self) -> Sequence[Tensor]:
        """What it keeps from step to step beside the states of parameters."""

    def empty_state(self, p: Tensor, options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The state of a parameter before the first step."""


class MomentumDescent:
    """``u = (M + damping)^-1 m``, with m the debiased running mean of the gradients.

    Attributes:
        means: running means of the gradients.
        weights: sums of the weights of gradients in them, one for each vector.
        scales: of the layers, and their squares (2, n), as of the last renewal.
    """

    is_capturable = True

    def __init__(self) -> None:
        self.means = StateStack("momentum_buffer")
        self.weights = torch.zeros(0, device="cpu")
        self.scales: Tensor | None = None
        self.measured: list[Tensor | None] = []  # the energies of blocks that `scales` are made of
        self.layout: Layout | None = None  # of which the `weights` are
        self.views: Sequence[Tensor] = ()  # of `weights`

    def __call__(self, context: StepContext, gradients: Stack, good: Tensor, taken: Tensor) -> Descent:
        means = self._running_means(context, gradients, good, taken)
        found = gradients.like(context.solve(means))
        slopes = context.over_shards(row_products(found.rows, means.rows, context.home), found.layout.layers)
        energies = _energies(context, found, slopes).nan_to_num(0.0, 0.0, 0.0)  # what overflows is not taken
        scales = self._scales(context, found.layout.layers)
        if scales is None:
            return Descent(found, slopes, energies)
        slopes, energies = torch._foreach_mul([slopes, energies], scales.unbind())
        return Descent(found, slopes, energies, scales[0])

    @property
    def tensors(self) -> list[Tensor]:
        return [self.weights] + ([] if self.scales is None else [self.scales])

    def _running_means(self, context: StepContext, gradients: Stack, good: Tensor, taken: Tensor) -> Stack:
        """The debiased running means of the gradients, kept in the states of their parameters."""
        means = self.means.of(gradients.layout, context.states, context.trained)
        weights = self._weights(context, gradients.layout)
        firsts = [layer[0] for layer in gradients.layout.first_layers]
        fresh = context.numbers.of_all("fresh", firsts)
        weights.lerp_(torch.ones_like(weights), (fresh * good).expand_as(weights))
        shares = fresh / torch.maximum(weights, fresh)  # of a gradient; a bad first batch leaves a weight of zero
        for g, mean, share in zip(gradients.vectors, means.vectors, shares.unbind(), strict=True):
            mean.lerp_(torch.where(taken.to(g.device), g, mean), share.to(mean))
        return means

    def _weights(self, context: StepContext, layout: Layout) -> Tensor:
        """`weights` of these vectors, of which the entries in the states of parameters are views."""
        firsts = [context.states[layer[0]].get("weight", 0.0) for layer in layout.first_layers]
        if layout is self.layout and all(map(operator.is_, firsts, self.views)):
            return self.weights
        zero = context.numbers.values.new_zeros(())
        self.weights = torch.stack([w.to(zero) if isinstance(w, Tensor) else zero + w for w in firsts])
        self.layout, self.views = layout, self.weights.unbind()
        for names, weight in zip(layout.names_by_run, self.views, strict=True):
            for name in names:
                context.states[name]["weight"] = weight
        return self.weights

    def _scales(self, context: StepContext, layers: Sequence[Layer]) -> Tensor | None:
        """`scales` of layers; they change when blocks measure anew."""
        blocks = [context.block_of(layer[0]) for layer in layers]
        measured = [None if block is None else block.energies for block in blocks]
        if len(measured) != len(self.measured) or any(map(operator.is_not, measured, self.measured)):
            found, self.measured = scales(blocks), measured
            both = None if found is None else torch.stack([found, found.square()]).to(context.home)
            self.scales = None if both is None else in_place(self.scales, both)
        return self.scales

    def empty_state(self, p: Tensor, options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"momentum_buffer": torch.zeros_like(p), "weight": 0.0}


class SpringDescent:
    """``u = (G + damping)^-1 (g + damping * momentum * last u)`` for each block of exact curvature.

    This is the minimum of ``1/2 u^T G u - g^T u + damping/2 ||u - momentum * last u||^2`` (SPRING, arXiv:2401.10190).
    """

    is_capturable = False
    tensors: Sequence[Tensor] = ()

    def __init__(self) -> None:
        self.last = StateStack("direction")

    def __call__(self, context: StepContext, gradients: Stack, good: Tensor, taken: Tensor) -> Descent:
        layout, dampings = gradients.layout, _dampings(context, gradients.layout)
        momenta = [context.options[family.layers[0][0]]["momentum"] for family in layout.families]
        right = gradients
        if any(momenta):
            last = self.last.of(layout, context.states, context.trained)
            right = Stack(layout, [g.clone() for g in gradients.vectors])
            counts = [len(rows) for rows in last.rows]
            for g, rows, own, momentum in zip(right.rows, last.rows, dampings.split(counts), momenta, strict=True):
                g.add_(rows * (own * momentum).to(rows)[:, None])
        found = gradients.like(context.solve(right))
        if any(momenta):
            torch._foreach_copy_(last.vectors, found.vectors)  # the step scales u in place
        squares, along = (
            row_norms(found.rows, context.home).square(),
            row_products(right.rows, found.rows, context.home),
        )
        energies = along - dampings.to(squares) * squares
        energies = energies.sum()[None] if len(context.preconditioner.blocks) == 1 else energies
        return Descent(found, row_products(gradients.rows, found.rows, context.home), energies.clamp(min=0))

    def empty_state(self, p: Tensor, options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"direction": torch.zeros_like(p)} if any(group["momentum"] for group in options) else {}


def _dampings(context: StepContext, layout: Layout) -> Tensor:
    """The damping that the block of each layer was decomposed with; zero where there is none."""
    blocks = [context.block_of(layer[0]) for layer in layout.layers]
    zero = torch.zeros((), dtype=widest(context.home.type), device=context.home)
    found = [getattr(block, "damping", None) for block in blocks]
    here = [x.to(context.home) if isinstance(x, Tensor) else x for x in found]
    return torch.stack([zero if damping is None else zero + damping for damping in here])


def _energies(context: StepContext, directions: Stack, slopes: Tensor) -> Tensor:
    """``u^T M u`` of each layer."""
    firsts = [layer[0] for layer in directions.layout.layers]
    if all(context.options[name]["damping"] is None for name in firsts):
        return slopes
    squares = context.over_shards(row_norms(directions.rows, context.home).square(), directions.layout.layers)
    return without_damping(slopes, context.numbers.of_all("damping", firsts).to(squares), squares)


def without_damping(slopes: Tensor, dampings: Tensor, squares: Tensor) -> Tensor:
    """``u^T M u``; an upper bound close to it where the damping is a small share of each factor."""
    return torch.maximum(slopes - dampings * squares, 1e-6 * slopes)  # rounding may leave less than nothing
