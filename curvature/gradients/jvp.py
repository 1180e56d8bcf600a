"""Products of a model's Jacobian with directions in parameter space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def output_changes(
    outputs: Sequence[Tensor], parameters: Mapping[str, Tensor], directions: Sequence[Mapping[str, Tensor]]
) -> list[list[Tensor]]:
    """``J d`` for every direction d: how outputs change, to first order, as the parameters move along it.

    By differentiating the backward pass, which is linear in the vectors sent back; no forward-mode rule is needed. A
    direction costs only the part of the network behind the parameters that it moves.

    Args:
        outputs: computed from the parameters; the graph is kept.
        parameters: by name.
        directions: tensors of the shapes of some of the parameters, by name.

    Returns:
        For each direction one tensor for each output, of its shape.
    """
    names = sorted({name for direction in directions for name in direction})
    sent = [torch.zeros_like(out, requires_grad=True) for out in outputs]
    options: Any = {"allow_unused": True}
    with torch.enable_grad():
        found = torch.autograd.grad(outputs, [parameters[k] for k in names], sent, create_graph=True, **options)
    slopes = {k: g for k, g in zip(names, found, strict=True) if g is not None and g.requires_grad}
    changes = []
    for direction in directions:
        live = [k for k in direction if k in slopes]
        moved: Sequence[Tensor | None] = [None] * len(sent)
        if live:
            along = [direction[k].to(slopes[k].dtype) for k in live]
            moved = torch.autograd.grad([slopes[k] for k in live], sent, along, retain_graph=True, **options)
        changes.append([torch.zeros_like(o) if m is None else m for m, o in zip(moved, sent, strict=True)])
    return changes
