"""Preconditioned vectors: equal layers together, in few calls and without a copy that could be avoided."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from curvature.linalg import by_device, stack
from curvature.preconditioners import Block, KroneckerBlock
from optimizers.steps.layer_vector import Layer, LayerVector, Layout

Part = Callable[[LayerVector, LayerVector], None]  # solves for some layers of the first vector, into the second


class VectorSolver:
    """``(M + damping)^-1`` for vectors of one layout; without curvature, over the mean eigenvalue of all."""

    def __init__(self, layout: Layout, blocks: Sequence[Block]) -> None:
        self.layout, names = layout, set(layout.names)
        ready = [b for b in blocks if b.is_ready and names.issuperset(b.names)]
        places = {layer: (k, row) for k, own in enumerate(layout.families) for row, layer in enumerate(own.layers)}
        # where weight and bias have options of their own, they are not one layer of the vector
        whole = [b for b in ready if isinstance(b, KroneckerBlock) and b.names in places]
        self.parts = _kronecker_parts(whole, places)
        apart = set(whole)
        self.others = [b for b in ready if b not in apart]
        seen = {name for b in ready for name in b.names}
        self.left = [name for name in layout.names if name not in seen]
        self.mean = mean_eigenvalue(ready if self.left else ())

    def __call__(self, vector: LayerVector) -> LayerVector:
        found = LayerVector(self.layout, [torch.empty_like(x) for x in vector.vectors])
        for part in self.parts:
            part(vector, found)
        solved = solved_by_name(self.others, vector) if self.others else {}
        solved |= {name: vector[name] / self.mean.to(vector[name]) for name in self.left}
        names = iter(solved)
        for own in by_device(list(solved.values())):  # in one call
            torch._foreach_copy_([found[next(names)] for _ in own], own)
        return found


def _kronecker_parts(blocks: Sequence[Any], places: Mapping[Layer, tuple[int, int]]) -> list[Part]:
    """One for each run of layers that follow each other in a vector and whose inverses are of one form."""
    runs: list[list[Any]] = []
    before: Any = None
    for block in sorted(blocks, key=lambda b: places[b.names]):
        (family, row), form = places[block.names], block.inverse.form
        here = family, row, form, type(block), block.scheme
        if form and before == (family, row - 1, *here[2:]):
            runs[-1].append(block)
        else:
            runs.append([block])
        before = here
    return [_kronecker_part(own, *places[own[0].names]) for own in runs]


def _kronecker_part(blocks: Sequence[Any], family: int, first: int) -> Part:
    block, rows = blocks[0], slice(first, first + len(blocks))
    inverse = block.inverse if len(blocks) == 1 else type(block).joint_inverse(blocks)
    here, dtype = block.scheme.arrangement, block.scheme.dtype
    shapes: Sequence[tuple[int, ...]] = here.shapes
    join: Callable[[Sequence[Tensor]], Tensor] = here.to_matrices
    split: Callable[[Tensor], Sequence[Tensor]] = here.from_matrices
    if here.order is None:  # entries are in memory as in matrices (g, o, i), but for the bias
        groups, outputs, inputs = here.sides
        widths = (inputs,) if len(shapes) == 1 else (inputs - 1, 1)
        shapes = [(groups, outputs, width) for width in widths]
        join = operator.itemgetter(0) if len(shapes) == 1 else partial(torch.cat, dim=-1)
        split = partial(torch.split_with_sizes, split_sizes=widths, dim=-1)

    def solve(vector: LayerVector, found: LayerVector) -> None:
        x = join(vector.stacked(family, rows, shapes)).to(dtype)
        u = inverse(x.reshape(-1, *x.shape[-2:]), own=len(shapes) > 1).view_as(x)
        for out, part in zip(found.stacked(family, rows, shapes), split(u), strict=True):
            out.copy_(part)

    return solve


def solved_by_name(blocks: Sequence[Block], right: Mapping[str, Tensor]) -> dict[str, Tensor]:
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
