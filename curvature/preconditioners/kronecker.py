"""Running Kronecker factors of one layer.

A block is a layer's weight with its bias as the last input. On the weight arranged as (g, o, i) it is
``kron(rows, columns)`` per group g: rows from backprops, columns from activations (arXiv:1503.05671, equation 1;
arXiv:2311.00636 for shared weights, "expand"). All matrices are means over samples of E[J^T v v^T J] with the injected
vectors v.

Indices: n sample, t place, g group, i input, o output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from curvature import kronecker
from curvature.linalg import ByDevice, eigenvalue_rounding
from curvature.preconditioners.block import Block, Due, MeanFacts, debiased_weight, group
from curvature.recording import warn_once
from curvature.structures import EigenStructure, KroneckerStructure, averaged_sparsity, factors_of, shrinkage
from curvature.terms import AffineLayout, OuterProduct, Term

OUTGROWN = (
    "its output was the model's at first, so that only the diagonal of its factor B is kept, and now others are "
    "computed from it; make a new optimizer for a factor of all entries"
)
# entries of a layer's activations and backprops, up to which copying them costs less than a call
MAX_JOINED = ByDevice(2**16, 2**20)


class KroneckerBlock(Block):
    """``kron(rows, columns)`` per group.

    Args:
        names: the weight, and its bias where that is one more input of it.
        scheme: how they are arranged, and how their moments are summed.
    """

    structure = "kronecker"
    scale_all = staticmethod(factors_of)
    state_fields: tuple[str, ...] = ("row_side", "column_side", "sparsity", "tried", "unseen", "inverse")
    layout_fields = ("scheme",)
    sparsity = (0.0, 0.0)  # one over the number of rows that the average of each side rests on
    tried = 0  # `updates` when `invert` last looked for few eigenvalues that stand out
    unseen: Tensor | None = None  # of tables: one look-up as a share of all in the average, by side (2,)

    def __init__(self, names: Sequence[str], scheme: kronecker.Scheme) -> None:
        super().__init__(names)
        self.scheme, self.dtype = scheme, scheme.dtype
        self.shapes = dict(zip(names, scheme.arrangement.shapes, strict=True))
        self.row_side: kronecker.Side | None = None  # of the running average
        self.column_side: kronecker.Side | None = None
        self.inverse: kronecker.KroneckerInverse | None = None

    def state(self) -> dict[str, Any]:
        rows, columns = (None if side is None else side.entries for side in (self.row_side, self.column_side))
        inverse = {} if self.inverse is None else self.inverse.state()
        layout = {"scheme": asdict(self.scheme), "row_side": rows, "column_side": columns, "inverse": inverse}
        return super().state() | layout

    def after_restore(self) -> None:
        form: Any = dict(self.scheme)  # type: ignore[call-overload]
        self.scheme = kronecker.Scheme(**form | {"arrangement": AffineLayout(**form["arrangement"])})
        self.dtype = self.scheme.dtype
        self.shapes = dict(zip(self.names, map(tuple, self.scheme.arrangement.shapes), strict=True))
        rows: Any = self.row_side
        columns: Any = self.column_side
        if rows is not None and columns is not None:
            self.row_side, self.column_side = (self.scheme.side_of_entries(*x) for x in enumerate((rows, columns)))
        self._load_inverse(self.inverse)

    def _load_inverse(self, state: Any) -> None:
        self.inverse = kronecker.inverse_of_state(state) if state else None

    @property
    def sides(self) -> kronecker.Product | None:
        """Those of the running average; None before the first update."""
        return None if self.row_side is None or self.column_side is None else (self.row_side, self.column_side)

    @property
    def inverted_sides(self) -> kronecker.Product | None:
        """The sides that are inverted: each row of a table counts as looked up once more than it was."""
        # how often is an estimate; where batches have missed a row, its steps would be as long as the damping allows
        if self.sides is None or self.unseen is None:
            return self.sides
        rows, columns = (
            side.with_entries(with_unseen(side.entries, share, 1)) if side.is_diagonal else side
            for side, share in zip(self.sides, self.unseen, strict=True)
        )
        return rows, columns

    def empty(self, device: torch.device) -> KroneckerStructure:
        return KroneckerStructure(self.space(device), self.scheme)

    def split_terms(self, terms: Mapping[str, Sequence[Term]]) -> list[tuple[Block, Any]]:
        fit = all(self.scheme.reading(term) is not None for term in terms[self.names[0]])
        return super().split_terms(terms) if fit else []  # otherwise it is read in another form than before

    @staticmethod
    def measure_all(
        blocks: Sequence[Any], terms: Sequence[Any], samples: float, rank: int = 0, world_size: int = 1
    ) -> list[Any]:
        """Small blocks of one layout are measured as the groups of one."""
        measured: dict[int, Any] = {}
        of_weights = [of_block[block.names[0]] for block, of_block in zip(blocks, terms, strict=True)]
        for block, parts in zip(blocks, of_weights, strict=True):
            is_for_noise = issubclass(block.scheme.kinds[0], kronecker.UncorrelatedSide)
            if is_for_noise and not all(getattr(term, "independent", False) for term in parts):
                warn_once(f"{block.names[0]}: {OUTGROWN}", logger="optimizers")
        for alike in group([block.joint_form(parts) for block, parts in zip(blocks, of_weights, strict=True)]):
            if len(alike) == 1:
                measured[alike[0]] = blocks[alike[0]].measure(terms[alike[0]], samples, rank, world_size)
                continue
            first = of_weights[alike[0]][0]
            parts = [blocks[k].empty(first.device) for k in alike]
            whole = parts[0].joined(parts[1:])
            a, b = (torch.cat([getattr(of_weights[k][0], side) for k in alike], 2) for side in "ab")
            term = OuterProduct(a, b, whole.space.shapes[0], independent=first.independent)
            whole.estimate({whole.space.names[0]: [term]}, samples, rank, world_size)
            whole.split(parts)
            measured |= zip(alike, parts, strict=True)
        return [measured[k] for k in range(len(blocks))]

    @property
    def has_separate_rows(self) -> bool:
        here = self.scheme.arrangement
        is_matrix = here.groups == 1 and set(map(len, here.shapes)) == {2}
        return is_matrix and _is_table(self.scheme.kinds[1 if here.order == (1, 0) else 0])

    def joint_form(self, terms: Sequence[Term]) -> Any:
        """Equal for blocks and terms that can be measured side by side; None if these cannot, or need not."""
        first = terms[0]
        if len(terms) > 1 or not isinstance(first, OuterProduct) or first.order is not None or first.is_routed:
            return None
        is_plain = self.scheme.arrangement.order is None and not any(kind.takes_rows for kind in self.scheme.kinds)
        is_small = first.a.numel() + first.b.numel() <= MAX_JOINED.at(first.b.device)
        both = [(x.shape, x.dtype, x.device) for x in (first.a, first.b)]
        return (self.scheme, first.independent, *both) if is_plain and is_small else None

    def empty_like(self) -> Block:
        new = type(self)(self.names, self.scheme)
        new.reason = self.reason
        return new

    def load_results(self, results: Mapping[str, Any]) -> None:
        super().load_results(results)
        self._load_inverse(results["inverse"])

    def facts(self, statistics: Any, means: kronecker.Product) -> MeanFacts:
        return MeanFacts([side.diagonal_parts() for side in means])

    @staticmethod
    def averages_all(
        blocks: Sequence[Any], means: Sequence[kronecker.Product], weights: Sequence[float]
    ) -> list[kronecker.Product]:
        before = [side for block in blocks for side in (block.row_side, block.column_side)]
        sides = [side for product in means for side in product]
        averages = kronecker.average_all(sides, before, [weight for weight in weights for _ in (0, 1)])
        return list(zip(averages[::2], averages[1::2], strict=True))

    def update(
        self, statistics: Any, averages: kronecker.Product, decay: float, weight: float
    ) -> list[tuple[Tensor, Tensor]]:
        old: tuple[kronecker.Side | None, kronecker.Side | None] = self.row_side, self.column_side
        self.row_side, self.column_side = averages
        if (number := statistics.tensors.get("looked_up")) is not None:
            share = torch.where(number > 0, weight / number, 0)
            before = share if self.unseen is None else self.unseen
            self.unseen = torch.where(number > 0, before.lerp(share, weight), before)
        of_outputs, of_inputs = (
            averaged_sparsity(before, weight, count)
            for before, count in zip(self.sparsity, statistics.counts[1:3], strict=True)
        )
        self.sparsity = of_outputs, of_inputs
        self.updates += 1
        pairs = zip(old, averages, strict=True)
        return [(last.compared(), side.compared()) for last, side in pairs if last is not None]

    @staticmethod
    def invert(blocks: Sequence[Any], share: float, damping: float | None, due: Due) -> None:
        products = [b.inverted_sides for b in blocks]
        # one of other damping has no inverses of sides, and that of a block that has failed may be of its diagonal
        has_sides = lambda b: not b.failures and type(b.inverse) is kronecker.KroneckerInverse
        before = [b.inverse if has_sides(b) else None for b in blocks]
        anew = [b.updates >= 2 * b.tried for b in blocks]  # ranks change more and more slowly
        if damping is None:
            sides = [due.get(b.names[0], (True, True)) for b in blocks]
            shares = [b.shares(share) for b in blocks]
            inverses = kronecker.factored_inverses(products, shares, before, anew, sides)
        else:
            inverses = kronecker.eigen_inverses(products, damping)
        for block, inverse, is_new in zip(blocks, inverses, anew, strict=True):
            block.inverse = inverse.owned()
            if damping is None and is_new:
                block.tried = block.updates

    def shares(self, share: float) -> tuple[float, float]:
        """What is added to the sides, in their mean eigenvalues: `share`, and more where few rows were seen."""
        assert self.sides is not None
        of_outputs, of_inputs = (
            share + (0.0 if _is_table(type(side)) else shrinkage(max(side.sizes), sparsity))
            for side, sparsity in zip(self.sides, self.sparsity, strict=True)
        )
        return of_outputs, of_inputs

    @contextmanager
    def without_correlations(self) -> Iterator[None]:
        before = self.row_side, self.column_side
        if self.sides is not None:
            self.row_side, self.column_side = (kronecker.DiagonalSide(side.diagonal()) for side in self.sides)
        yield
        self.row_side, self.column_side = before

    def solve(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        assert self.inverse is not None
        arrangement = self.scheme.arrangement
        x = arrangement.to_matrices(gradients).to(self.scheme.dtype)
        u = arrangement.from_matrices(self.inverse(x, in_place=len(gradients) > 1))
        return [part.to(g.dtype).contiguous() for part, g in zip(u, gradients, strict=True)]

    @staticmethod
    def joint_inverse(blocks: Sequence[Any]) -> kronecker.KroneckerInverse:
        """The inverses of blocks of one form as one, of which those of the blocks are parts from then on."""
        first, *others = (block.inverse for block in blocks)
        whole = first.stacked(others)
        for block, part in zip(blocks, whole.parts(len(blocks)), strict=True):
            block.inverse = part
        return whole

    @property
    def mean_eigenvalue(self) -> Tensor:
        assert self.sides is not None
        rows, columns = (side.diagonal().mean(1) for side in self.sides)
        return (rows * columns).mean()

    @property
    def expected_bytes(self) -> int:
        here, groups = self.scheme, self.scheme.arrangement.groups
        each = (kind.most_entries(groups, here.block_sizes(k)) for k, kind in enumerate(here.kinds))
        return sum(each) * here.dtype.itemsize

    @property
    def costs(self) -> tuple[float, ...]:
        return tuple(float(side.cost) for side in self.sides or ())

    def condition(self) -> float:
        return math.nan if self.inverse is None else self.inverse.condition()

    def describe(self) -> str:
        if self.sides is None:
            return "not seen yet"
        sides = [side.describe() for side in self.sides]
        for k, matrix in enumerate((self.inverse.rows, self.inverse.columns) if self.inverse is not None else ()):
            if isinstance(matrix, kronecker.LowRankMatrix):
                sides[k] += f" by {matrix.entries.shape[2]} eigenvalues"
        rows, columns = sides
        groups = len(self.sides[0])
        return f"B {rows}, A {columns}" + f", {groups} groups" * (groups > 1)


def _is_table(kind: type[kronecker.Side]) -> bool:
    """Whether sides of this kind are diagonals of separate rows, not ones that stand for a whole matrix."""
    return kind.is_diagonal and not issubclass(kind, kronecker.UncorrelatedSide)


def with_unseen(x: Tensor, share: Tensor, dim: int) -> Tensor:
    """What rows of a table along this dim have, with a share of all of it for each."""
    return x + share * x.sum(dim, keepdim=True)


class EigenBlock(KroneckerBlock):
    """``Q diag(values) Q^T`` per group, with ``Q = kron(U_B, U_A)`` of the factors at the last `invert`.

    `values` (g, o, i) is the running mean over samples of the squared per-sample gradients in that basis, the sum over
    places inside the square (equation 11). It is updated between decompositions and carried over to each new basis.
    Before the first batch in a basis it is the product of the factors' eigenvalues. Arguments as for `KroneckerBlock`.
    """

    structure = "eigen"
    broadcast_fields = ("inverse", "values", "row_values", "column_values")
    state_fields = (*KroneckerBlock.state_fields, "values", "seen", "row_values", "column_values")

    def __init__(self, names: Sequence[str], scheme: kronecker.Scheme) -> None:
        super().__init__(names, scheme)
        self.values: Tensor | None = None
        self.seen = 0  # updates of `values`
        self.row_values: Tensor | None = None  # eigenvalues of the factors at the last `invert`, (g, o)
        self.column_values: Tensor | None = None  # (g, i)

    @property
    def basis(self) -> kronecker.Basis | None:
        """That of the last `invert`."""
        return None if self.inverse is None else self._basis_of(self.inverse.rows, self.inverse.columns)

    def _basis_of(self, rows: kronecker.Matrix, columns: kronecker.Matrix) -> kronecker.Basis:
        return kronecker.Basis(self.scheme, rows.vectors, columns.vectors)

    def empty(self, device: torch.device) -> EigenStructure:
        return EigenStructure(self.space(device), self.scheme, self.basis)

    def joint_form(self, terms: Sequence[Term]) -> Any:
        form, inverse = super().joint_form(terms), () if self.inverse is None else self.inverse.form
        return None if form is None or inverse is None else (form, inverse)

    @property
    def expected_bytes(self) -> int:
        here = self.scheme.arrangement
        values = here.groups * here.outputs + here.dimension // here.outputs  # of the factors
        return super().expected_bytes + (values + 2 * self.dimension) * self.scheme.dtype.itemsize

    def facts(self, statistics: EigenStructure, means: kronecker.Product) -> MeanFacts:
        facts = super().facts(statistics, means)
        return facts if statistics.basis is None else facts._replace(others=[[statistics.trace()]])

    def update(
        self, statistics: EigenStructure, averages: kronecker.Product, decay: float, weight: float
    ) -> list[tuple[Tensor, Tensor]]:
        basis, count = self.basis, statistics.counts[3]
        if statistics.basis is not None and basis is not None and self.values is not None and count:
            value_weight = 0.0 if self.was_outlier else debiased_weight(decay, self.seen)
            new = self._even_out(basis.carried(statistics.values, statistics.basis), basis)
            self.values = self.values.lerp(new / count, value_weight)
            self.is_outdated = not self.seen
            self.seen += 1
        return super().update(statistics, averages, decay, weight)

    @staticmethod
    def invert(blocks: Sequence[Any], share: float, damping: float | None, due: Due) -> None:
        """Move to the eigenbases of the current factors, and prepare `solve` in them.

        Args:
            share: adds to each eigenvalue the difference between ``kron(B + s mean(B) I, A + t mean(A) I)`` and
                ``kron(B, A)``, with the `shares` s and t, mean() being the mean eigenvalue.
            damping: is added to all values instead.
        """
        both = (True, True)
        pairs = [(b, due.get(b.names[0], both) if b.is_ready and not b.failures else both) for b in blocks]
        turning = [side for b, sides_due in pairs for side, is_due in zip(b.sides, sides_due, strict=True) if is_due]
        bases = iter(kronecker.eigenbases(turning))
        for block, (rows_due, columns_due) in pairs:
            rows = next(bases) if rows_due else (block.row_values, block.inverse.rows)
            columns = next(bases) if columns_due else (block.column_values, block.inverse.columns)
            tiny = torch.finfo(block.scheme.dtype).tiny ** 0.5
            block._turn(rows, columns, *((tiny, block.shares(share)) if damping is None else (damping, (0.0, 0.0))))

    def _turn(self, row_basis: Any, column_basis: Any, damping: float, shares: tuple[float, float]) -> None:
        (self.row_values, rows), (self.column_values, columns) = row_basis, column_basis
        if self.basis is not None and self.values is not None:
            new = self._basis_of(rows, columns)
            self.values = self._even_out(new.carried(self.values, self.basis), new)
        b, a = self.row_values[:, :, None], self.column_values[:, None, :]
        if not self.seen:
            self.values = b * a
        assert self.values is not None
        values = self.values
        if self.unseen is not None:
            b, a = (with_unseen(x, self.unseen[k], 1 + k) for k, x in enumerate((b, a)))
            values = with_unseen(with_unseen(values, self.unseen[0], 1), self.unseen[1], 2)
        mean_b, mean_a = (kronecker.nonzero_or_one(x.mean(dim, keepdim=True)) for x, dim in ((b, 1), (a, 2)))
        shift_b, shift_a = shares[0] * mean_b, shares[1] * mean_a
        inverted = 1 / (values + shift_b * a + shift_a * b + shift_a * shift_b + damping)
        self.inverse = kronecker.EigenInverse(rows, columns, inverted).owned()

    def _even_out(self, values: Tensor, basis: kronecker.Basis) -> Tensor:
        """Values with their mean over each factor's null space, where the basis is whatever rounding made of it."""
        for dim, eigenvalues, vectors in ((1, self.row_values, basis.rows), (2, self.column_values, basis.columns)):
            if vectors is not None and eigenvalues is not None:
                is_null = eigenvalues <= eigenvalue_rounding(eigenvalues.amax(1, keepdim=True))
                is_null = is_null.unsqueeze(3 - dim)
                mean = (values * is_null).sum(dim, keepdim=True) / is_null.sum(dim, keepdim=True).clamp(min=1)
                values = torch.where(is_null, mean, values)
        return values

    @property
    def mean_eigenvalue(self) -> Tensor:
        return super().mean_eigenvalue if self.values is None else self.values.mean()
