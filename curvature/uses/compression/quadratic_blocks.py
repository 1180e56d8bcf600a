"""The quadratic model of a loss, block by block, as weights are removed."""

from __future__ import annotations

import torch
from torch import Tensor

from curvature.linalg import cholesky, full_precision
from curvature.operators import Dense, Diagonal, MatrixFree, Operator, blocks_of, conjugate_gradient

DAMPING = 0.01  # of the mean eigenvalue, as Frantar et al. 2022, arXiv:2210.17323, section 3.3


def usual_damping(K: Operator) -> float:
    """None for diagonals, which need no inverse."""
    if all(isinstance(block, Diagonal) for block in blocks_of(K)):
        return 0.0
    mean = float(K.trace()) / K.space.size
    return DAMPING * mean if mean > 0 else 1.0


def curvature_alone(block: Operator, damping: float) -> Tensor:
    """``1 / [(K + damping I)^-1]_qq`` (P,): the curvature along each weight while all others follow."""
    if not isinstance(block, Diagonal):
        return 1 / block.inverse(damping).diagonal()
    damped = block.values + damping
    if (damped < 0).any():
        raise ValueError(f"{block!r} is indefinite with damping {damping:.3g}: its least entry is {damped.min():.3g}")
    return damped


class QuadraticBlock:
    """``1/2 (w - start)^T (block + damping I) (w - start)``, and its minimum w over the weights that are left.

    Attributes:
        w: (P,).
        free: which weights are left (P,); w is zero at the others.
    """

    def __init__(self, block: Operator, damping: float, start: Tensor) -> None:
        self.block, self.damping, self.start = block, damping, start
        self.w, self.free = start, torch.ones_like(start, dtype=torch.bool)
        self.prepare()

    def prepare(self) -> None:
        self.alone = curvature_alone(self.block, self.damping)

    def scores(self) -> Tensor:
        """By how much the model rises if a weight is removed and the others follow (P,), as far as the inverse of the
        whole block tells: there, weights that were removed follow, too."""
        return self.w.square() * self.alone / 2

    def remove(self, free: Tensor, rtol: float | None = None) -> None:
        """Leave these weights alone, and let them make up for the others, to a tolerance of `conjugate_gradient`."""
        self.free, self.w = free, self.w * free
        lost = free * self._product((self.w - self.start)[:, None])[:, 0]
        scale = (self.block.diagonal() + self.damping)[:, None]
        within = MatrixFree(self.block.space, lambda V: torch.where(free[:, None], self._product(free[:, None] * V), V))
        self.w = self.w - conjugate_gradient(within, lost, preconditioner=lambda V: V / scale, rtol=rtol)

    def _product(self, V: Tensor) -> Tensor:
        return self.block @ V + self.damping * V


class DenseBlock(QuadraticBlock):
    """The same with the inverse of the part of the matrix for the weights that are left, which makes scores exact."""

    @full_precision()
    def prepare(self) -> None:
        free = self.free
        root = cholesky(self.block.to_dense()[free][:, free], self.damping, repr(self.block))
        self.inverse = torch.cholesky_inverse(root)

    def scores(self) -> Tensor:
        scores = torch.zeros_like(self.w)
        scores[self.free] = self.w[self.free].square() / self.inverse.diagonal() / 2
        return scores

    @full_precision()
    def remove(self, free: Tensor, rtol: float | None = None) -> None:
        self.free, self.w = free, self.w * free
        self.prepare()
        self.w[free] -= self.inverse @ self._product((self.w - self.start)[:, None])[free, 0]


def quadratic_block(block: Operator, damping: float, start: Tensor) -> QuadraticBlock:
    return (DenseBlock if isinstance(block, Dense) else QuadraticBlock)(block, damping, start)
