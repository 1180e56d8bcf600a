"""Running curvature of a layer, diagonal in the eigenbasis of its Kronecker factors (EKFAC, arXiv:1806.03884)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from curvature import kronecker
from curvature.linalg import eigenvalue_rounding
from curvature.preconditioners.block import Due, MeanFacts, debiased_weight
from curvature.preconditioners.kronecker import KroneckerBlock, with_unseen
from curvature.structures import EigenStructure
from curvature.terms import Term


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
