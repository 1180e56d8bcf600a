"""Running curvature of a layer, diagonal in the eigenbasis of its Kronecker factors (EKFAC, arXiv:1806.03884)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvature import kronecker
from curvature.linalg import eigenvalue_rounding
from curvature.preconditioners.block import Due, debiased_weight
from curvature.preconditioners.kronecker import KroneckerBlock, with_unseen
from curvature.terms import Term, sum_in_place

Matrices = tuple[kronecker.Matrix, kronecker.Matrix]  # U_B and U_A
MIN_SAMPLES = 16  # whose squares stand for those of a batch, where gradients of samples have to be built


def _squares(basis: kronecker.Basis, terms: Sequence[Any], rank: int, world_size: int) -> Tensor:
    """Sum over samples of their squared gradients in a basis, from fewer of many, as in `subsample_samples`."""
    count = len(terms[0])
    total = world_size * count
    stride = 1 if max(term.places for term in terms) == 1 else max(1, min(total // MIN_SAMPLES, count))
    chosen = slice(-rank * count % stride, None, stride)
    one_vector = [[term.samples(chosen) for term in terms] if stride > 1 else terms]
    each = total / max(1, -(-total // stride))
    weights = torch.full((len(one_vector[0][0]),), each, dtype=basis.scheme.dtype, device=terms[0].device)
    return basis.products(one_vector, one_vector, weights)


@dataclass
class EigenStatistics(kronecker.KroneckerStatistics):
    """Moments, and squared per-sample gradients in the eigenbasis in which they were measured."""

    basis: Matrices | None = None  # None if there was none yet
    squares: Tensor | None = None  # sum of the squared gradients in the basis, (g, o, i)
    squares_samples: float = 0.0  # number of samples in that sum: those before the first basis do not count

    def add_(self, other: EigenStatistics) -> None:
        super().add_(other)
        if self.squares is not None and other.basis is not None:
            self.squares = self.squares_in(other.basis)
        if other.squares is not None:
            self.squares = other.squares if self.squares is None else self.squares.add_(other.squares)
            self.basis, self.squares_samples = other.basis, self.squares_samples + other.squares_samples

    def squares_in(self, basis: Matrices) -> Tensor:
        """The squares in another basis."""
        assert self.squares is not None and self.basis is not None
        is_same = all(known is other for known, other in zip(self.basis, basis, strict=True))
        return self.squares if is_same else kronecker.carry_diagonal(self.squares, self.basis, basis)

    def scale_vectors_(self, times: float) -> None:
        super().scale_vectors_(times)
        self.squares = None if self.squares is None else self.squares * times**2

    def parts(self, blocks: Sequence[Any]) -> list[Any]:
        parts = super().parts(blocks)
        if self.squares is not None:
            for part, block, squares in zip(parts, blocks, self.squares.chunk(len(parts)), strict=True):
                part.squares, part.basis = squares, block.basis
        return parts

    def sums(self, rank: int, size: int) -> dict[str, Tensor]:
        tensors = super().sums(rank, size)
        if self.squares is not None:
            tensors |= {"squares": self.squares, "squares_samples": self.squares.new_tensor(self.squares_samples)}
        return tensors

    def load_sums(self, sums: Mapping[str, Tensor]) -> None:
        super().load_sums(sums)
        if "squares" in sums:
            self.squares, self.squares_samples = sums["squares"], float(sums["squares_samples"])


class EigenBlock(KroneckerBlock):
    """``Q diag(values) Q^T`` per group, with ``Q = kron(U_B, U_A)`` of the factors at the last `invert`.

    `values` (g, o, i) is the running mean over samples of the squared per-sample gradients in that basis, the sum over
    places inside the square (equation 11). It is updated between decompositions and carried over to each new basis.
    Before the first batch in a basis it is the product of the factors' eigenvalues. Arguments as for `KroneckerBlock`.
    """

    structure = "eigen"
    statistics = EigenStatistics
    broadcast_fields = ("inverse", "values", "row_values", "column_values")
    state_fields = (*KroneckerBlock.state_fields, "values", "seen", "row_values", "column_values")

    def __init__(self, names: Sequence[str], scheme: kronecker.Scheme) -> None:
        super().__init__(names, scheme)
        self.values: Tensor | None = None
        self.seen = 0  # updates of `values`
        self.row_values: Tensor | None = None  # eigenvalues of the factors at the last `invert`, (g, o)
        self.column_values: Tensor | None = None  # (g, i)

    @property
    def basis(self) -> Matrices | None:
        """That of the last `invert`."""
        return None if self.inverse is None else (self.inverse.rows, self.inverse.columns)

    def measure(self, terms: Sequence[Term], samples: float, rank: int = 0, world_size: int = 1) -> Any:
        statistics = super().measure(terms, samples, rank, world_size)
        if statistics is not None and self.basis is not None:
            basis = kronecker.Basis(self.scheme, *(matrix.vectors for matrix in self.basis))
            each = kronecker.by_length(terms)  # those with the same number of samples belong together
            statistics.squares = sum_in_place(_squares(basis, alike, rank, world_size) for alike in each)
            statistics.basis, statistics.squares_samples = self.basis, samples
        return statistics

    def joint_form(self, terms: Sequence[Term]) -> Any:
        form, inverse = super().joint_form(terms), () if self.inverse is None else self.inverse.form
        return None if form is None or inverse is None else (form, inverse)

    @staticmethod
    def joined(blocks: Sequence[Any]) -> Any:
        whole = KroneckerBlock.joined(blocks)
        first, *others = (block.inverse for block in blocks)
        whole.inverse = None if first is None else first.stacked(others)
        return whole

    def statistics_from(self, sums: Mapping[str, Tensor]) -> Any:
        statistics = super().statistics_from(sums)
        statistics.basis = self.basis
        return statistics

    @property
    def expected_bytes(self) -> int:
        here = self.scheme.arrangement
        values = here.groups * here.outputs + here.dimension // here.outputs  # of the factors
        return super().expected_bytes + (values + 2 * self.dimension) * self.scheme.dtype.itemsize

    def means(self, statistics: EigenStatistics) -> tuple[kronecker.Product, list[Tensor], list[Tensor]] | None:
        means = super().means(statistics)
        return means if means is None or statistics.squares is None else (*means[:2], [statistics.squares.sum()])

    def update(
        self, statistics: EigenStatistics, means: kronecker.Product, decay: float, weight: float
    ) -> list[tuple[Tensor, Tensor]]:
        count, basis = statistics.squares_samples, self.basis
        if statistics.squares is not None and self.values is not None and basis is not None and count:
            value_weight = 0.0 if self.was_outlier else debiased_weight(decay, self.seen)
            self.values = self.values.lerp(self._even_out(statistics.squares_in(basis), basis) / count, value_weight)
            self.is_outdated = not self.seen
            self.seen += 1
        return super().update(statistics, means, decay, weight)

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
            rows = next(bases) if rows_due else (block.row_values, block.basis[0])
            columns = next(bases) if columns_due else (block.column_values, block.basis[1])
            tiny = torch.finfo(block.scheme.dtype).tiny ** 0.5
            block._turn(rows, columns, *((tiny, block.shares(share)) if damping is None else (damping, (0.0, 0.0))))

    def _turn(self, row_basis: Any, column_basis: Any, damping: float, shares: tuple[float, float]) -> None:
        (self.row_values, rows), (self.column_values, columns) = row_basis, column_basis
        if self.basis is not None and self.values is not None:
            carried = kronecker.carry_diagonal(self.values, self.basis, (rows, columns))
            self.values = self._even_out(carried, (rows, columns))
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

    def _even_out(self, values: Tensor, basis: Matrices) -> Tensor:
        """Values with their mean over each factor's null space, where the basis is whatever rounding made of it."""
        for dim, eigenvalues, matrix in ((1, self.row_values, basis[0]), (2, self.column_values, basis[1])):
            if matrix.vectors is not None and eigenvalues is not None:
                is_null = eigenvalues <= eigenvalue_rounding(eigenvalues.amax(1, keepdim=True))
                is_null = is_null.unsqueeze(3 - dim)
                mean = (values * is_null).sum(dim, keepdim=True) / is_null.sum(dim, keepdim=True).clamp(min=1)
                values = torch.where(is_null, mean, values)
        return values

    @property
    def mean_eigenvalue(self) -> Tensor:
        return super().mean_eigenvalue if self.values is None else self.values.mean()
