"""Preconditioned vectors: equal layers together, in few calls and without a copy that could be avoided."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvature.linalg import by_device, stack
from curvature.preconditioners import Block, KroneckerBlock
from optimizers.steps.layer_vector import LayerVector, Layout

Part = Callable[[LayerVector, LayerVector], None]  # solves for some layers of the first vector, into the second


class VectorSolver:
    """``(M + damping)^-1`` with the inverses that blocks have now, for vectors of one layout.

    Parameters without curvature are divided by the mean eigenvalue of all blocks.
    """

    def __init__(self, layout: Layout, blocks: Sequence[Block]) -> None:
        self.layout = layout
        names = set(layout.names)
        ready = [b for b in blocks if b.is_ready and names.issuperset(b.names)]
        places = {
            layer: (family, row) for family, own in enumerate(layout.families) for row, layer in enumerate(own.layers)
        }
        # of other Kronecker blocks, weight and bias have options of their own
        whole = [b for b in ready if isinstance(b, KroneckerBlock) and b.names in places]
        apart = set(whole)
        others = [b for b in ready if b not in apart]
        self.parts = _kronecker_parts(whole, [places[b.names] for b in whole])
        if others:
            self.parts.append(_by_name(others))
        left = names - {name for b in ready for name in b.names}
        if left:
            self.parts.append(_divided([name for name in layout.names if name in left], mean_eigenvalue(ready)))

    def __call__(self, vector: LayerVector) -> LayerVector:
        found = LayerVector(self.layout, [torch.empty_like(x) for x in vector.vectors])
        for part in self.parts:
            part(vector, found)
        return found


def _kronecker_parts(blocks: Sequence[Any], places: Sequence[tuple[int, int]]) -> list[Part]:
    """One for each run of layers that follow each other in a vector and whose inverses are of one form."""
    order = sorted(range(len(blocks)), key=lambda k: places[k])
    forms = [(blocks[k].inverse.form, blocks[k].scheme) if blocks[k].inverse.form else k for k in range(len(blocks))]
    runs: list[list[int]] = []
    for k in order:
        before = runs[-1][-1] if runs else None
        follows = before is not None and places[k] == (places[before][0], places[before][1] + 1)
        if before is not None and follows and forms[k] == forms[before]:
            runs[-1].append(k)
        else:
            runs.append([k])
    found = []
    for run in runs:
        own = [blocks[k] for k in run]
        family, first = places[run[0]]
        inverse = own[0].inverse if len(own) == 1 else type(own[0]).joint_inverse(own)
        found.append(_kronecker_part(own[0], inverse, family, slice(first, first + len(own))))
    return found


def _kronecker_part(block: Any, inverse: Any, family: int, rows: slice) -> Part:
    here, dtype = block.scheme.arrangement, block.scheme.dtype

    def solve(vector: LayerVector, found: LayerVector) -> None:
        tensors = vector.stacked(family, rows)
        x = here.to_matrices(tensors).to(dtype)
        u = inverse(x.reshape(-1, *x.shape[-2:]), own=len(tensors) > 1).view_as(x)
        for out, part in zip(found.stacked(family, rows), here.from_matrices(u), strict=True):
            out.copy_(part)

    return solve


def _by_name(blocks: Sequence[Block]) -> Part:
    def solve(vector: LayerVector, found: LayerVector) -> None:
        solved = solved_by_name(blocks, vector)
        names = iter(solved)
        for own in by_device(list(solved.values())):  # in one call
            torch._foreach_copy_([found[next(names)] for _ in own], own)

    return solve


def _divided(names: Sequence[str], mean: Tensor) -> Part:
    def solve(vector: LayerVector, found: LayerVector) -> None:
        for name in names:
            torch.div(vector[name], mean.to(vector[name]), out=found[name])

    return solve


def solved_by_name(blocks: Sequence[Block], right: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The solutions of blocks, by parameter."""
    found: dict[str, Tensor] = {}
    for kind in dict.fromkeys(type(b) for b in blocks):
        alike = [b for b in blocks if type(b) is kind]
        solutions = kind.solve_all(alike, [[right[name] for name in b.names] for b in alike])
        found |= {k: u for b, own in zip(alike, solutions, strict=True) for k, u in zip(b.names, own, strict=True)}
    return found


def mean_eigenvalue(blocks: Sequence[Block]) -> Tensor:
    """The mean eigenvalue over all blocks, a scalar; 1 without blocks."""
    if not blocks:
        return torch.ones((), device="cpu")
    traces = stack(b.mean_eigenvalue.float() * b.dimension for b in blocks)
    return (traces.sum() / sum(b.dimension for b in blocks)).clamp(min=torch.finfo(torch.float32).tiny)
