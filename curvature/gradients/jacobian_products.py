"""Products with a model's Jacobian: J v for directions in parameter space, J^T v for vectors at the output."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from curvature.functional import batched_vjp, own_functions
from curvature.linalg import product_rounding, widen
from curvature.recording import graph_dtypes, warn_once

ROWS_ELEMENTS = 1 << 26  # entries of the gradients that are made at once, of rows
BY_ROWS = (
    "J v takes a backward pass for each entry of the output, which is exact but slow, because torch cannot "
    "differentiate the backward pass of a function: %s. Let that of an autograd.Function call torch functions of the "
    "gradient that it gets, without detach, NumPy or once_differentiable"
)


def output_changes(
    outputs: Sequence[Tensor], parameters: Mapping[str, Tensor], directions: Sequence[Mapping[str, Tensor]]
) -> list[list[Tensor]]:
    """``J d`` for every direction d: how outputs change, to first order, as the parameters move along it.

    Differentiates the backward pass, which is linear in the backpropagated vectors, and so needs no forward-mode rules.
    A direction costs only the part of the network behind the parameters that it moves. Where the graph has functions of
    your own that do not say ``twice_differentiable = True``, a backward pass of a random vector checks that theirs can
    be differentiated. If a function's cannot, each entry of the outputs takes a backward pass, and the log says so.

    Args:
        outputs: computed from the parameters; their graph is kept.
        parameters: by name.
        directions: tensors of the shapes of some of the parameters, by name.

    Returns:
        For each direction one tensor for each output, of its shape.
    """
    changes = complete_changes(outputs, parameters, directions, is_compared=bool(own_functions(outputs)))
    return _by_rows(outputs, parameters, directions) if changes is None else changes


def complete_changes(
    outputs: Sequence[Tensor], parameters: Mapping[str, Tensor], directions: Sequence[Mapping[str, Tensor]],
    is_compared: bool = True,
) -> list[list[Tensor]] | None:  # fmt: skip
    """`changes_by_backward_passes`, compared with a vector that goes back; None where torch loses a part of them."""
    try:
        changes = changes_by_backward_passes(outputs, parameters, directions)
        if not is_compared or are_adjoint(outputs, parameters, directions, changes):
            return changes
        why = ", ".join(own_functions(outputs)) or "a hook, or one of torch's whose second derivative is not finite"
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # an error of the model or its graph recurs by rows
        why = str(error).split("\n")[0].rstrip(".")
    warn_once(BY_ROWS, why)
    return None


class Linearised:
    """The map from directions of the parameters to changes of outputs, by two backward passes: the first is kept.

    Gradients are linear in the vectors that go back from the outputs, so that the transposed map takes directions to
    changes of the outputs. What a function's backward pass hides from autograd is lost.

    Args:
        outputs: computed from the parameters; their graph is kept.
        parameters: by name.
        vector: fills the vectors that go back: a few functions of torch cannot differentiate the pass of zeros.
    """

    at_once: int | None = None  # for how many directions it is best called; None: for as many as their graph may hold

    def __init__(self, outputs: Sequence[Tensor], parameters: Mapping[str, Tensor], vector: float = 0.0) -> None:
        # nothing without entries changes outputs, and torch cannot differentiate a look-up in a table of no rows twice
        tensors = {name: p for name, p in parameters.items() if p.numel()}
        self.vectors = [torch.full_like(out, vector, requires_grad=True) for out in outputs]
        options: Any = {"create_graph": True, "allow_unused": True}
        with torch.enable_grad():
            slopes = torch.autograd.grad(outputs, list(tensors.values()), self.vectors, **options) if tensors else ()
        named = zip(tensors, slopes, strict=True)
        self.gradients = {name: g for name, g in named if g is not None and g.requires_grad}

    def __call__(self, directions: Mapping[str, Tensor]) -> list[Tensor | None]:
        """Changes (c, *output.shape) of each output along directions (c, *shape) of some parameters; None is zero."""
        along = {name: directions[name].to(g.dtype) for name, g in self.gradients.items() if name in directions}
        if not along:
            return [None] * len(self.vectors)
        return batched_vjp([self.gradients[name] for name in along], self.vectors, list(along.values()))


def changes_by_backward_passes(
    outputs: Sequence[Tensor], parameters: Mapping[str, Tensor], directions: Sequence[Mapping[str, Tensor]],
    vector: float = 0.0,
) -> list[list[Tensor]]:  # fmt: skip
    """`output_changes` without a check; `vector` as of `Linearised`."""
    moved = {name for direction in directions for name in direction}
    linearised = Linearised(outputs, {name: parameters[name] for name in sorted(moved)}, vector)
    each = (linearised({name: d[None] for name, d in direction.items()}) for direction in directions)
    return [
        [torch.zeros_like(out) if g is None else g[0] for g, out in zip(changes, outputs, strict=True)]
        for changes in each
    ]


def are_adjoint(
    outputs: Sequence[Tensor], parameters: Mapping[str, Tensor], directions: Sequence[Mapping[str, Tensor]],
    changes: Sequence[Sequence[Tensor]],
) -> bool:  # fmt: skip
    """Whether changes of the outputs along directions are ``J d``: ``<u, J d> = <J^T u, d>`` for random vectors u."""
    if any(x.is_complex() for x in (*outputs, *parameters.values())):  # which says nothing
        return True
    drawn = torch.Generator().manual_seed(0)
    vectors = [torch.randn(out.shape, generator=drawn, device="cpu").to(out) for out in outputs]
    names = sorted({name for direction in directions for name in direction if parameters[name].numel()})
    options: Any = {"retain_graph": True, "materialize_grads": True, "allow_unused": True}
    slopes = torch.autograd.grad(outputs, [parameters[k] for k in names], vectors, **options)
    gradients = {k: g.to_dense() for k, g in zip(names, slopes, strict=True)}
    single = any(out.dtype == torch.float32 for out in outputs)
    coarsest = max([torch.finfo(torch.float32).eps, *(torch.finfo(kind).eps for kind in graph_dtypes(outputs))])
    coarsest = max([coarsest, *(product_rounding(out.device) for out in outputs if single)])
    for direction, change in zip(directions, changes, strict=True):
        known = [(gradients[k], direction[k]) for k in direction if k in gradients]
        (there, size), (back, other) = map(_inner_product, (zip(vectors, change, strict=True), known))
        if math.isfinite(back) and not abs(there - back) <= coarsest**0.5 * max(size, other):
            return False
    return True


def _inner_product(factors: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Of two vectors in parts; and what it would be about, were the signs of its terms random."""
    terms = [widen(a.detach()) * widen(b.detach()) for a, b in factors]
    return sum(float(t.sum()) for t in terms), math.hypot(*(float(t.norm()) for t in terms))


def _by_rows(
    outputs: Sequence[Tensor], parameters: Mapping[str, Tensor], directions: Sequence[Mapping[str, Tensor]]
) -> list[list[Tensor]]:
    """``J d`` from the gradient of each entry of the outputs."""
    names = sorted({name for direction in directions for name in direction if parameters[name].numel()})
    leaves = [parameters[k] for k in names]
    at_once = max(1, ROWS_ELEMENTS // max(1, sum(p.numel() for p in leaves)))
    changes = [[out.new_zeros(out.shape) for out in outputs] for _ in directions]  # in the order of their axes
    for k, out in enumerate(outputs):
        for some in torch.arange(out.numel(), device=out.device).split(at_once):
            vectors = out.new_zeros(len(some), out.numel()).scatter_(1, some[:, None], 1.0)
            rows = gradient_rows(out, leaves, vectors.reshape(-1, *out.shape))
            for direction, change in zip(directions, changes, strict=True):
                known = [
                    g.flatten(1) @ direction[n].to(g).flatten()
                    for n, g in zip(names, rows, strict=True)
                    if n in direction
                ]
                change[k].view(-1)[some] = sum(x.to(out) for x in known)
    return changes


def rows_of_each(result: Tensor | GradientEdge, leaves: Sequence[Tensor], values: Tensor, at_once: int) -> list[Tensor]:
    """The gradients (N, *shape) of each of the values (N,) of a result, by batched backward passes, some at a time."""
    eye = torch.eye(len(values), dtype=values.dtype, device=values.device)
    parts = zip(*(gradient_rows(result, leaves, some) for some in eye.split(at_once)), strict=True)
    return [torch.cat(pieces) for pieces in parts]


def gradient_rows(result: Tensor | GradientEdge, leaves: Sequence[Tensor], vectors: Tensor) -> list[Tensor]:
    """`batched_vjp` of one result; zeros for leaves that it does not depend on."""
    rows = batched_vjp([result], leaves, [vectors])
    return [x.new_zeros(len(vectors), *x.shape) if g is None else g for g, x in zip(rows, leaves, strict=True)]
