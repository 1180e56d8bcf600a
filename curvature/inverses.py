"""Inverses of Kronecker-factored blocks, prepared once and applied at every step.

A side is (g, d, d), or its diagonal (g, d); matrices that an inverse is applied to are (g, o, i).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from curvature.linalg import cholesky_root, eigh, inverse, matmul

THIN = 16  # a side so many times larger than the other is not inverted: to solve with its root is cheaper


@dataclass(frozen=True)
class Inverse:
    """``rows X columns``, or ``rows ((rows^T X columns) * values) columns^T`` in a basis where `values` are given.

    `roots` says of either side whether it is the Cholesky root L of what is inverted, and stands for ``(L L^T)^-1``.
    """

    rows: Tensor
    columns: Tensor
    values: Tensor | None = None
    roots: tuple[bool, bool] = (False, False)

    def __call__(self, x: Tensor) -> Tensor:
        if self.values is None:
            x = torch.cholesky_solve(x, self.rows) if self.roots[0] else _left(self.rows, x)
            return torch.cholesky_solve(x.mT, self.columns).mT if self.roots[1] else _right(x, self.columns)
        inner = _right(_left(_transposed(self.rows), x), self.columns) * self.values
        return _right(_left(self.rows, inner), _transposed(self.columns))

    def condition(self) -> float:
        """Largest over least eigenvalue, the largest of all groups."""
        if self.values is not None:
            spread = self.values.flatten(1)
            return float((spread.amax(1) / spread.amin(1)).max())
        whole = [s @ s.mT if root else s for s, root in zip((self.rows, self.columns), self.roots, strict=True)]
        sides = [s if s.ndim == 2 else torch.linalg.eigvalsh(s) for s in whole]
        one, other = (s.amax(1) / s.amin(1) for s in sides)
        return float((one * other).max())


def factored(pairs: Sequence[tuple[Tensor, Tensor]], share: float) -> list[Inverse]:
    """``(B + share mean(B) I)^-1`` and ``(A + share mean(A) I)^-1`` for pairs (B, A), mean() that of the eigenvalues.

    This is factored damping (arXiv:1503.05671, section 6.3) of ``share^2`` times the mean eigenvalue of the block, by
    Cholesky's algorithm, sides of one shape together.
    """
    sides = [side for pair in pairs for side in pair]
    widths = [other.shape[1] for rows, columns in pairs for other in (columns, rows)]
    kinds = [
        (side.shape[1:], side.dtype, side.device, side.ndim == 3 and side.shape[1] >= THIN * width)
        for side, width in zip(sides, widths, strict=True)
    ]
    found: dict[int, tuple[Tensor, bool]] = {}
    for kind in dict.fromkeys(kinds):
        alike = [k for k, own in enumerate(kinds) if own == kind]
        together, are_roots = _damped(torch.cat([sides[k] for k in alike]), share, kind[3])
        for k, own in zip(alike, together.split([len(sides[k]) for k in alike]), strict=True):
            found[k] = own, are_roots
    both = [(found[k], found[k + 1]) for k in range(0, len(sides), 2)]
    return [Inverse(rows, columns, None, (left, right)) for (rows, left), (columns, right) in both]


def in_eigenbasis(rows: Tensor, columns: Tensor, damping: float | Tensor) -> Inverse:
    """``(kron(B, A) + damping I)^-1`` by eigenvalues."""
    (b, left), (a, right) = basis(rows), basis(columns)
    return Inverse(left, right, 1 / (b[:, :, None] * a[:, None, :] + damping))


def basis(side: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues (g, d), and eigenvectors as columns; for a diagonal these are ones (g, d), as the identity is."""
    return (side.clamp(min=0), torch.ones_like(side)) if side.ndim == 2 else eigh(side)


def carried(values: Tensor, old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> Tensor:
    """The diagonal, in a new basis (rows, columns), of the matrix whose diagonal in an old one is `values` (g, o, i).

    It is exact if that matrix has nothing else in the old basis; the trace is kept, for orthogonal sides.
    """
    rows, columns = (n * o if n.ndim == 2 else matmul(n.mT, o).square() for o, n in zip(old, new, strict=True))
    return _right(_left(rows, values), _transposed(columns))


def _damped(sides: Tensor, share: float, as_roots: bool) -> tuple[Tensor, bool]:
    """Inverses, or roots of what is to be inverted if that is asked for and possible, and whether they are these.

    In units of the mean eigenvalue, so that no product of small numbers underflows.
    """
    diagonal = sides if sides.ndim == 2 else sides.diagonal(dim1=1, dim2=2)
    # a layer that nothing reaches has zero gradients too: any finite inverse will do
    mean = diagonal.mean(1).clamp(min=torch.finfo(sides.dtype).tiny ** 0.5)
    if sides.ndim == 2:
        return 1 / (sides + share * mean[:, None]), False
    scale = mean[:, None, None]
    matrix = sides / scale
    matrix.diagonal(dim1=1, dim2=2).add_(share)
    root = cholesky_root(matrix) if as_roots else None
    return (inverse(matrix) / scale, False) if root is None else (root * scale.sqrt(), True)


def _left(side: Tensor, x: Tensor) -> Tensor:
    return side[:, :, None] * x if side.ndim == 2 else matmul(side, x)


def _right(x: Tensor, side: Tensor) -> Tensor:
    return x * side[:, None, :] if side.ndim == 2 else matmul(x, side)


def _transposed(side: Tensor) -> Tensor:
    return side if side.ndim == 2 else side.mT
