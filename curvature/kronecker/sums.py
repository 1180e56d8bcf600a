"""Inverses of damped sums of Kronecker products.

Two products ``kron(B1, A1) + kron(B2, A2)`` are diagonalised jointly (arXiv:2405.15603): with ``W^T (A1 + A2) W = I``
and ``W^T A1 W = diag(s)`` it follows that ``W^T A2 W = diag(1 - s)``, likewise V and t for the B.

Indices: i input, o output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from curvature import linalg
from curvature.kronecker.sides import DenseSide
from curvature.kronecker.statistics import merge_products

Pair = tuple[Tensor, Tensor]  # B (o, o) and A (i, i), symmetric and positive semi-definite


@dataclass(frozen=True)
class KroneckerSumInverse:
    """The inverse ``X -> rows ((rows^T X columns) / values) columns^T`` of a damped sum, on matrices (o, i)."""

    rows: Tensor
    columns: Tensor
    values: Tensor

    def solve(self, x: Tensor) -> Tensor:
        """The solution (o, i) for a right-hand side (o, i)."""
        inner = linalg.matmul(linalg.matmul(self.rows.mT, x), self.columns) / self.values
        return linalg.matmul(linalg.matmul(self.rows, inner), self.columns.mT)


def invert_kronecker_sums(sums: Sequence[Sequence[Pair]], damping: float) -> list[KroneckerSumInverse]:
    """``sum_k kron(B_k + e_k / c_k I, A_k + e_k c_k I)`` for each sum of K products, with ``e_k^2 = damping / K``.

    c_k^2 is the ratio of the mean eigenvalues of A_k and B_k (factored damping, arXiv:1503.05671, section 6.3). No
    eigenvalue of the sum is below `damping`. e_k c_k and e_k / c_k are no less than the rounding of A_k and B_k.

    One or two products are solved exactly. Of three or more, all but the one with the largest trace are merged into
    one of the same trace (`merge_products`). Small sides of all sums are decomposed together.

    Args:
        sums: of pairs B (o, o) and A (i, i), at least one, with traces above zero.
        damping: in units of the products, not negative.
    """
    scaled = []
    for pairs in sums:
        damped = [_damped(*pair, damping / len(pairs)) for pair in _two(pairs)]
        scaled.append([((b / _mean(b), a / _mean(a)), _mean(b) * _mean(a)) for b, a in damped])
    bases = iter(_diagonalised([[pair[side] for pair, _ in own] for own in scaled for side in (0, 1)]))
    found = []
    for (_, first), *second in scaled:
        (rows, t), (columns, s) = next(bases), next(bases)
        values = first * t[:, None] * s
        for _, mean in second:
            values = values + mean * (1 - t)[:, None] * (1 - s)
        found.append(KroneckerSumInverse(rows, columns, values))
    return found


def _damped(rows: Tensor, columns: Tensor, damping: float) -> Pair:
    """One damped product of the sum in `invert_kronecker_sums`."""
    ratio = (_mean(columns) / _mean(rows)).sqrt()
    shifts = damping**0.5 / ratio, damping**0.5 * ratio
    return _shifted(rows, shifts[0]), _shifted(columns, shifts[1])


def _shifted(side: Tensor, shift: Tensor) -> Tensor:
    shift = torch.maximum(shift, linalg.eigenvalue_rounding(side.diagonal().sum()))
    return side + shift * torch.eye(len(side), dtype=side.dtype, device=side.device)


def _mean(side: Tensor) -> Tensor:
    return side.diagonal().mean()


def _two(pairs: Sequence[Pair]) -> list[Pair]:
    if len(pairs) <= 2:
        return list(pairs)
    order = torch.stack([_mean(b) * _mean(a) for b, a in pairs]).argsort(descending=True, stable=True)
    rows, columns = (torch.stack(list(own)).index_select(0, order) for own in zip(*pairs, strict=True))
    others = zip(rows[1:], columns[1:], strict=True)
    merged = merge_products([(DenseSide(b[None]), DenseSide(a[None])) for b, a in others])
    return [(rows[0], columns[0]), (merged[0].entries[0], merged[1].entries[0])]


@linalg.full_precision()
def _diagonalised(sums: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """For one or two sides each, W with ``W^T sum(sides) W = I`` and the diagonal of ``W^T sides[0] W``, 0 to 1."""
    totals = [sides[0] if len(sides) == 1 else sides[0] + sides[1] for sides in sums]
    tried = [linalg.try_cholesky(total) for total in totals]
    fine = linalg.look([ok for _, ok in tried])
    roots = [
        root if is_fine else linalg.cholesky_with_jitter(total, "a factor")
        for (root, _), is_fine, total in zip(tried, fine, totals, strict=True)
    ]
    within = partial(torch.linalg.solve_triangular, upper=False)
    wholes = [within(root, within(root, sides[0]).mT) for root, sides in zip(roots, sums, strict=True)]
    return [
        (torch.linalg.solve_triangular(root.mT, vectors, upper=True), values.clamp(0, 1))
        for root, (values, vectors) in zip(roots, linalg.symmetric_eighs(wholes), strict=True)
    ]
