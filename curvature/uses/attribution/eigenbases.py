"""Scores in the eigenbases of Kronecker factors, where a matrix is diagonal.

There a query is divided by eigenvalues, and the two sides of a training sample's gradient are turned, o^2 + i^2
operations in place of the o^2 i + o i^2 of a solution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from curvature.kronecker import Basis, Scheme
from curvature.operators import BlockDiagonal, EigenKronecker, Kronecker, Operator, Space, blocks_of, two_sided
from curvature.terms import AffineLayout, DenseGradients, OuterProduct, Term, gradients

Terms = Mapping[str, Sequence[Term]]


class Eigenbases:
    """K and gradients, in the eigenbases of blocks whose weights some samples' terms read at few places.

    There `K` has the eigenvalues alone, over one parameter with the weight's name.
    """

    def __init__(self, K: Operator, terms: Terms) -> None:
        self.bases: dict[str, tuple[Basis, EigenKronecker]] = {}
        turned = [self._turned(block, terms.get(block.space.names[0], ())) for block in blocks_of(K)]
        names = tuple(name for block in turned for name in block.space.names)
        shapes = tuple(shape for block in turned for shape in block.space.shapes)
        places = tuple(K.space.devices[name] for name in names)
        self.K = BlockDiagonal(Space(names, shapes, K.space.dtype, places[0], places), turned) if self.bases else K

    def _turned(self, block: Operator, parts: Sequence[Term]) -> Operator:
        if not isinstance(block, Kronecker | EigenKronecker) or len(parts) != 1:
            return block
        space, (groups, outputs, inputs), term = block.space, block.sides, parts[0]
        if not isinstance(term, OuterProduct) or term.places > min(outputs, inputs):
            return block
        scheme = Scheme.of([term], space.shapes, space.dtype, "expand")
        if scheme is None or scheme.arrangement != block.arrangement:
            return block
        eigen = block.eigen if isinstance(block, Kronecker) else block
        self.bases[space.names[0]] = Basis(scheme, eigen.row_vectors, eigen.column_vectors), eigen
        shapes = ((groups * outputs, inputs),)
        weight = Space(space.names[:1], shapes, space.dtype, space.device)
        return EigenKronecker(weight, AffineLayout(shapes, groups, outputs), None, None, eigen.values, eigen.rounding)

    def turn(self, terms: Terms) -> dict[str, list[Term]]:
        """The terms of the parameters of `K`."""
        joined = {name for _, block in self.bases.values() for name in block.space.names[1:]}
        return {
            name: [self._term(terms, *self.bases[name])] if name in self.bases else list(parts)
            for name, parts in terms.items()
            if name not in joined
        }

    def _term(self, terms: Terms, basis: Basis, block: EigenKronecker) -> Term:
        groups, outputs, inputs = block.sides
        first, *others = terms[block.space.names[0]]
        if isinstance(first, OuterProduct) and not others:
            return replace(basis.turned(first), shape=(groups * outputs, inputs))
        arranged = block.arrangement.to_matrices([gradients(terms[name]) for name in block.space.names])
        rows = None if basis.rows is None else basis.rows.mT
        return DenseGradients(two_sided(rows, arranged.to(block.values), basis.columns).flatten(1, 2))
