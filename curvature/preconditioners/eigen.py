"""Running curvature of a layer, diagonal in the eigenbasis of its Kronecker factors (EKFAC, arXiv:1806.03884)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvature.kronecker import Basis, Inverse, Scheme, bases, carried, not_zero
from curvature.preconditioners.kronecker import KroneckerBlock
from curvature.terms import Term, sum_in_place


class EigenBlock(KroneckerBlock):
    """``Q diag(values) Q^T`` per group, with ``Q = kron(U_B, U_A)`` of the factors at the last `decompose`.

    `values` (g, o, i) is the running mean over samples of the squared per-sample gradients in that basis, the sum over
    places inside the square (equation 11). It follows the data from one decomposition to the next, and is carried over
    to the next basis. Until a batch was seen in a basis it is what the factors say. Arguments as of `KroneckerBlock`.
    """

    structure = "eigen"
    handed_on = ("inverse", "values", "row_values", "column_values")
    kept = (*KroneckerBlock.kept, "values", "seen", "row_values", "column_values")
    waiting = (*KroneckerBlock.waiting, "squares", "turned")

    def __init__(self, names: Sequence[str], scheme: Scheme) -> None:
        super().__init__(names, scheme)
        self.values: Tensor | None = None
        self.seen = 0  # updates of `values`
        self.row_values: Tensor | None = None  # eigenvalues of the factors at the last `decompose`, (g, o)
        self.column_values: Tensor | None = None  # (g, i)
        # since the last `fold`: squares in the basis, and samples, without those that came before there was one
        self.squares: Tensor | None = None
        self.turned: float = 0

    def multiply(self, times: float) -> None:
        super().multiply(times)
        self.turned /= times**2

    def measured(self, terms: Sequence[Term]) -> Any:
        sums = super().measured(terms)
        if sums is None or self.inverse is None:
            return None if sums is None else (sums, None)
        return sums, self._squares(terms, self.inverse)

    def take(self, found: Any, samples: float) -> None:
        sums, squares = found
        if squares is not None:
            self._take_squares(squares, samples)
        super().take(sums, samples)

    def _take_squares(self, squares: Tensor, samples: float) -> None:
        self.turned += samples
        self.squares = squares if self.squares is None else self.squares + squares

    def join(self, found: dict[str, Any]) -> None:
        super().join(found)
        if found["squares"] is not None:
            self._take_squares(found["squares"], found["turned"])

    def _squares(self, terms: Sequence[Term], inverse: Inverse) -> Tensor:
        """Over the batch's samples, terms of one number of samples together."""
        turned = Basis(self.scheme, *(side if side.ndim == 3 else None for side in (inverse.rows, inverse.columns)))
        found: dict[int, list[Term]] = {}
        for term in terms:
            found.setdefault(len(term), []).append(term)
        alone = [[own] for own in found.values()]  # one vector
        return sum_in_place(turned.products(v, v, inverse.rows.new_ones(n)) for n, v in zip(found, alone, strict=True))

    @property
    def expected(self) -> int:
        here = self.scheme.arrangement
        values = here.groups * here.outputs + here.dimension // here.outputs  # of the factors
        return super().expected + (2 * self.dimension + values) * self.scheme.dtype.itemsize

    def sums(self, rank: int, size: int) -> dict[str, Tensor]:
        found = super().sums(rank, size)
        if self.squares is not None:
            found |= {"squares": self.squares, "turned": self.squares.new_tensor(self.turned)}
        return found

    def take_sums(self, sums: Mapping[str, Tensor]) -> None:
        own = {k: sums[k] for k in ("squares", "turned") if k in sums}
        super().take_sums({k: x for k, x in sums.items() if k not in own})
        if own:
            self.squares, self.turned = own["squares"], float(own["turned"])

    def discard(self) -> None:
        super().discard()
        self.squares, self.turned = None, 0

    def fold(self, decay: float) -> None:
        squares, turned = self.squares, self.turned
        super().fold(decay)
        if squares is not None and self.values is not None and turned:
            w = self.gate.masked(self.weight_of_new(decay, self.seen), squares.dtype)
            self.values = self.values.lerp(squares / turned, w)
            self.seen += 1

    @staticmethod
    def decompose_all(blocks: Sequence[Any], damping: float, share: float = 0.0) -> None:
        """Go to the eigenbases of the factors as they are now, and prepare `solve` in them.

        Args:
            damping: added to all values.
            share: added as well is what ``kron(B + share mean(B) I, A + share mean(A) I)`` has more than ``kron(B, A)``
                at each eigenvalue, mean() that of the eigenvalues (`curvature.kronecker.factored`).
        """
        found = bases([side for block in blocks for side in (block.rows, block.columns)])
        for block, rows, columns in zip(blocks, found[::2], found[1::2], strict=True):
            block._turn(rows, columns, damping, share)

    def _turn(self, row_basis: Any, column_basis: Any, damping: float, share: float) -> None:
        (self.row_values, rows), (self.column_values, columns) = row_basis, column_basis
        if self.inverse is not None:
            old = (self.inverse.rows, self.inverse.columns)
            self.squares = None if self.squares is None else carried(self.squares, old, (rows, columns))
            self.values = None if self.values is None else carried(self.values, old, (rows, columns))
        if not self.seen:
            self.values = self.row_values[:, :, None] * self.column_values[:, None, :]
        self.inverse = Inverse(rows, columns, self._inverted(damping, share))

    def _inverted(self, damping: float, share: float) -> Tensor:
        assert self.values is not None and self.row_values is not None and self.column_values is not None
        b, a = self.row_values[:, :, None], self.column_values[:, None, :]
        mean_b, mean_a = not_zero(b.mean(1, keepdim=True)), not_zero(a.mean(2, keepdim=True))
        return 1 / (self.values + share * (mean_b * a + mean_a * b) + share**2 * mean_a * mean_b + damping)

    @staticmethod
    def invert(blocks: Sequence[Any], share: float) -> None:
        for dtype in dict.fromkeys(block.scheme.dtype for block in blocks):
            alike = [block for block in blocks if block.scheme.dtype == dtype]
            EigenBlock.decompose_all(alike, torch.finfo(dtype).tiny ** 0.5, share)

    @property
    def mean_eigenvalue(self) -> Tensor:
        return super().mean_eigenvalue if self.values is None else self.values.mean()
