"""Products with a model's Jacobian: J v for directions in parameter space, J^T v for vectors at the output."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

log = logging.getLogger("curvature")


def output_changes(
    outputs: Sequence[Tensor], parameters: Mapping[str, Tensor], directions: Sequence[Mapping[str, Tensor]]
) -> list[list[Tensor]]:
    """``J d`` for every direction d: how outputs change, to first order, as the parameters move along it.

    Differentiates the backward pass, which is linear in the vectors sent back, and so needs no forward-mode rules. A
    direction costs only the part of the network behind the parameters that it moves.

    Args:
        outputs: computed from the parameters; their graph is kept.
        parameters: by name.
        directions: tensors of the shapes of some of the parameters, by name.

    Returns:
        For each direction one tensor for each output, of its shape.
    """
    # torch cannot differentiate a look-up in a table without rows twice, and nothing without entries changes outputs
    names = sorted({name for direction in directions for name in direction if parameters[name].numel()})
    vectors = [torch.zeros_like(out, requires_grad=True) for out in outputs]
    options: Any = {"allow_unused": True}
    with torch.enable_grad():
        found = torch.autograd.grad(outputs, [parameters[k] for k in names], vectors, create_graph=True, **options)
    gradients = {k: g for k, g in zip(names, found, strict=True) if g is not None and g.requires_grad}
    changes = []
    for direction in directions:
        live = [k for k in direction if k in gradients]
        products: Sequence[Tensor | None] = [None] * len(vectors)
        if live:
            along = [direction[k].to(gradients[k].dtype) for k in live]
            products = torch.autograd.grad([gradients[k] for k in live], vectors, along, retain_graph=True, **options)
        changes.append([torch.zeros_like(o) if g is None else g for g, o in zip(products, vectors, strict=True)])
    return changes


def batched_vjp(
    outputs: Sequence[Tensor | GradientEdge], inputs: Sequence[Tensor | GradientEdge], vectors: Sequence[Tensor]
) -> list[Tensor | None]:
    """Gradients (k, *shape) of the inputs for k vectors at once; keeps the graph.

    Args:
        vectors: (k, *output.shape) for each output.

    Returns:
        None for an input that the outputs do not depend on.
    """
    derive: Any = partial(torch.autograd.grad, outputs, inputs, retain_graph=True, allow_unused=True)
    if not inputs:
        return []
    if len(vectors[0]) > 1:
        try:
            return [None if g is None else g.to_dense() for g in derive(vectors, is_grads_batched=True)]
        except RuntimeError as error:  # an operation without a batched backward pass
            log.info("vectors go back one by one: %s", str(error).split("\n")[0])
    rows = [derive([v[k].clone() for v in vectors]) for k in range(len(vectors[0]))]
    # an embedding may have sparse gradients
    if len(rows) == 1:
        return [None if g is None else g.to_dense()[None] for g in rows[0]]
    return [
        None if column[0] is None else torch.stack([g.to_dense() for g in column]) for column in zip(*rows, strict=True)
    ]


def gradient_rows(result: Tensor | GradientEdge, leaves: Sequence[Tensor], vectors: Tensor) -> list[Tensor]:
    """`batched_vjp` of one result; zeros for leaves that it does not depend on."""
    found = batched_vjp([result], leaves, [vectors])
    return [x.new_zeros(len(vectors), *x.shape) if g is None else g for g, x in zip(found, leaves, strict=True)]
