"""Directions of descent: from gradients and what is kept of those before to preconditioned directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from curvature.linalg import read
from optimizers.steps.layer_vector import LayerVector, Layout, of_states, to_states
from optimizers.steps.rule import StepContext


@dataclass(frozen=True)
class Direction:
    """``u = (M + damping)^-1 right``, to be subtracted."""

    u: LayerVector
    right: LayerVector
    slope_of: LayerVector  # whose inner product with u is the slope of the loss along it
    dampings: Sequence[float]  # of layers, to tell u^T M u from u^T right; zeros where these are as good as equal
    keep: Callable[[], None]  # enters what was found in the states of the parameters; for a step that is taken


HORIZON = 10.0  # steps that the running mean remembers at first ...
GROWTH = 1 / 20  # ... and how many more at each step ...
LONGEST_HORIZON = 30.0  # ... up to so many
PRESENT = 0.1  # share of the present gradient in what is solved for


def horizon(step: int) -> float:
    """Steps that the running mean of the gradients remembers, where no momentum is given."""
    return min(HORIZON + GROWTH * step, LONGEST_HORIZON)


class Momentum:
    """``u = (M + damping)^-1 m``, with m the debiased running mean of the gradients.

    Where no momentum is given, the mean remembers more and more steps, and a share of the present gradient is mixed in
    (quasi-hyperbolic momentum, arXiv:1810.06801): the long mean alone follows too late (docs/lab_book.md). Nothing
    changes until ``Direction.keep``. Gradients come in units of their usual norm, so that the mean has none.
    """

    def __init__(self) -> None:
        self.mean: LayerVector | None = None  # as of the last step that was taken

    def __call__(self, context: StepContext, g: LayerVector, unit: float) -> Direction:
        layout, states = g.layout, context.states
        mean = of_states(layout, "momentum_buffer", states, context.trained, self.mean)
        momenta = [context.options[names[0]]["momentum"] for names in layout.names_by_run]
        remembered = horizon(context.preconditioner.monitor.steps)
        weights, shares = [], []  # of all gradients so far, and of this one, for each run
        for momentum, (first, *_) in zip(momenta, layout.names_by_run, strict=True):
            fresh, known = 1 / remembered if momentum is None else 1 - momentum, states[first].get("weight", 0.0)
            weights.append(known + fresh * (1 - known))
            shares.append(fresh / weights[-1])
        present = [PRESENT if momentum is None else 0.0 for momentum in momenta]
        right = mean.mixed(g, [share + here - share * here for share, here in zip(shares, present, strict=True)])
        u = context.preconditioner.solve_vector(right, context.trained)

        def keep() -> None:
            mean.mix_(g, shares)
            if mean is not self.mean:
                self.mean = mean
                to_states(mean, "momentum_buffer", states, context.trained)
            for names, weight in zip(layout.names_by_run, weights, strict=True):
                for name in names:
                    states[name]["weight"] = weight

        dampings = [context.options[first]["damping"] or 0.0 for first, *_ in layout.layers]
        return Direction(u, right, right, dampings, keep)

    def empty_state(self, p: Tensor, options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"momentum_buffer": p.new_zeros(p.shape), "weight": 0.0}


class Spring:
    """``u = (G + damping)^-1 (g + damping * momentum * last u)`` for each block of exact curvature.

    This is the minimum of ``1/2 u^T G u - g^T u + damping/2 ||u - momentum * last u||^2`` (SPRING, arXiv:2401.10190).
    Gradients, and u, come and go in units of length `unit`; the last u is kept without.
    """

    def __init__(self) -> None:
        self.last: LayerVector | None = None

    def __call__(self, context: StepContext, g: LayerVector, unit: float) -> Direction:
        layout, dampings, right = g.layout, _dampings(context, g.layout), g
        momenta = [context.options[first]["momentum"] or 0.0 for first, *_ in layout.layers]
        if any(momenta):
            last = of_states(layout, "direction", context.states, context.trained, self.last)
            right = LayerVector(layout, [x.clone() for x in last.vectors])
            right.multiply_layers_([a * b / unit for a, b in zip(dampings, momenta, strict=True)])
            for x, y in zip(right.vectors, g.vectors, strict=True):
                x.add_(y)
        u = context.preconditioner.solve_vector(right, context.trained)
        kept = LayerVector(layout, [x * unit for x in u.vectors]) if any(momenta) else None  # steps scale u in place

        def keep() -> None:
            self.last = kept
            if kept is not None:
                to_states(kept, "direction", context.states, context.trained)

        return Direction(u, right, g, dampings, keep)

    def empty_state(self, p: Tensor, options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {"direction": p.new_zeros(p.shape)} if any(group["momentum"] for group in options) else {}


def _dampings(context: StepContext, layout: Layout) -> list[float]:
    """The damping that the block of each layer was decomposed with; zero where there is none."""
    blocks = {name: block for block in context.preconditioner.blocks for name in block.names}
    dampings = [getattr(blocks.get(first), "damping", None) for first, *_ in layout.layers]
    known = read({k: x for k, x in enumerate(dampings) if isinstance(x, Tensor)})
    return [known[k] if k in known else float(x or 0.0) for k, x in enumerate(dampings)]
