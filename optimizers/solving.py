"""Preconditioned vectors: equal layers together, in few calls and without a copy that could be avoided."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from curvature.linalg import stack
from curvature.operators import Named
from curvature.preconditioners import Block, KroneckerBlock
from optimizers.steps.layer_vector import Family, Layer, LayerVector, Layout

Piece = Callable[[LayerVector, Named], Tensor]  # solves for layers that follow each other, flat; by name what is known


class VectorSolver:
    """``(M + damping)^-1`` for vectors of one layout; without curvature, over the mean eigenvalue of all."""

    def __init__(self, layout: Layout, blocks: Sequence[Block]) -> None:
        self.layout, layers = layout, set(layout.layers)
        ready = [b for b in blocks if b.is_ready and set(layout.names).issuperset(b.names)]
        # where weight and bias have options of their own, they are not one layer of the vector
        whole = {b.names: b for b in ready if isinstance(b, KroneckerBlock) and b.names in layers}
        self.others = [b for b in ready if b.names not in whole]
        known = {name for b in self.others for name in b.names}
        # layers without curvature; the mean eigenvalue that stands in changes with every renewal
        self.left = [layer for layer in layout.layers if layer not in whole and not known.issuperset(layer)]
        made = partial(_pieces, whole=whole, known=known, mean=mean_eigenvalue(ready if self.left else ()))
        families = enumerate(layout.families)
        self.pieces: list[list[Piece]] = [
            [piece for k, family in itertools.islice(families, len(run)) for piece in made(k, family)]
            for run in layout.runs
        ]

    def __call__(self, vector: LayerVector) -> LayerVector:
        known = solved_by_name(self.others, vector) if self.others else {}
        each = [[piece(vector, known) for piece in own] for own in self.pieces]
        return LayerVector(self.layout, [own[0] if len(own) == 1 else torch.cat(own) for own in each])


def _pieces(number: int, family: Family, whole: Mapping[Layer, Any], known: set[str], mean: Tensor) -> Iterator[Piece]:
    """For a family of layers: one for all that follow each other and are solved for in one way."""

    def way(k: int) -> Any:
        layer = family.layers[k]
        if (block := whole.get(layer)) is None:
            return known.issuperset(layer)
        return (block.inverse.form, type(block), block.scheme) if block.inverse.form is not None else block

    for _, alike in itertools.groupby(range(len(family.layers)), way):
        first, *others = alike
        at = slice(first, first + 1 + len(others))
        layers = family.layers[at]
        if layers[0] in whole:
            yield _kronecker_piece([whole[layer] for layer in layers], number, at, family)
        elif known.issuperset(layers[0]):
            yield partial(_named_piece, layers, family)
        else:
            yield partial(_scaled_piece, number, at, mean)


def _named_piece(layers: Sequence[Layer], family: Family, vector: LayerVector, known: Named) -> Tensor:
    return family.joined([torch.stack([known[name] for name in names]) for names in zip(*layers, strict=True)])


def _scaled_piece(number: int, at: slice, mean: Tensor, vector: LayerVector, known: Named) -> Tensor:
    rows = vector.rows[number][at]
    return (rows / mean.to(rows)).view(-1)


def _kronecker_piece(blocks: Sequence[Any], number: int, at: slice, family: Family) -> Piece:
    block = blocks[0]
    inverse = block.inverse if len(blocks) == 1 else type(block).joint_inverse(blocks)
    here, dtype = block.scheme.arrangement, block.scheme.dtype
    groups, outputs, inputs = here.sides
    # whether layers are in memory as matrices
    if here.order is None and (len(here.shapes) == 1 or family.rows == groups * outputs):

        def solve(vector: LayerVector, known: Named) -> Tensor:
            rows = vector.rows[number]
            x = (rows if len(blocks) == len(rows) else rows[at]).view(-1, outputs, inputs)
            return inverse(x if x.dtype == dtype else x.to(dtype)).view(-1).to(rows.dtype)

        return solve

    def rearranged(vector: LayerVector, known: Named) -> Tensor:
        rows = vector.rows[number][at]
        x = here.to_matrices(family.split(rows)).to(dtype)
        u = inverse(x.reshape(-1, outputs, inputs), own=len(here.shapes) > 1).view_as(x)
        return family.joined(here.from_matrices(u)).to(rows.dtype)

    return rearranged


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
