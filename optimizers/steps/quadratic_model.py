"""The exact quadratic model of the loss over a few directions, and what is learnt from how well it did.

``M(alpha) = r^T alpha + 1/2 alpha^T (Q + damping N) alpha``, with r the slopes of the loss along the directions, Q
their products with the Gauss-Newton matrix and N their inner products (arXiv:1503.05671, sections 6.4 to 7).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvature.linalg import symmetric_eigh

GOOD, POOR = 0.75, 0.25  # reduction ratios between which the damping stays
SINGLE_PRECISION = 1e-6  # of products that were made in it
SHRINK, GROW = 0.8, 4.0  # factors of the damping: slowly down, quickly up
MOST_TRIES = 12  # dampings tried before a step is given up


@dataclass(frozen=True)
class Quadratic:
    """In float64, k directions: slopes (k,), curvature (k, k), norms (k, k)."""

    slopes: Tensor
    curvature: Tensor
    norms: Tensor

    def minimum(self, damping: float, least: float = SINGLE_PRECISION) -> Tensor:
        """The coefficients (k,) of the damped minimum; zero along directions that are zero.

        Combinations of directions of length one count as zero whose curvature is below `least` of the largest.
        """
        matrix = self.curvature + damping * self.norms
        size = matrix.diagonal().abs()
        scale = torch.where(size > 0, size, 1.0).rsqrt()
        values, vectors = symmetric_eigh(scale[:, None] * matrix * scale)
        # directions that are the same to the precision of the products are not told apart
        kept = values > least * values[-1].clamp(min=torch.finfo(values.dtype).tiny)
        inverse = torch.where(kept, 1 / values, torch.zeros_like(values))
        return -scale * (vectors @ (inverse * (vectors.T @ (scale * self.slopes))))

    @property
    def is_finite(self) -> bool:
        return all(bool(torch.isfinite(x).all()) for x in (self.slopes, self.curvature, self.norms))

    def value(self, alpha: Tensor, damping: float) -> float:
        """The predicted change of the loss."""
        return float(self.slopes @ alpha + alpha @ (self.curvature + damping * self.norms) @ alpha / 2)


def next_damping(damping: float, ratio: float, shrink: float = SHRINK) -> float:
    """Levenberg-Marquardt: less where the loss fell as predicted or more, more where it fell by much less."""
    if ratio > GOOD:
        return damping * shrink
    return damping / shrink if ratio < POOR else damping


@dataclass(frozen=True)
class Trial:
    """The last of the dampings that were tried.

    Attributes:
        damping, ratio: its damping and reduction ratio.
        rollbacks: tries before it; all of them if it failed, too.
        is_accepted: whether the loss fell.
    """

    damping: float
    ratio: float
    rollbacks: int
    is_accepted: bool


def first_accepted(reduction: Callable[[float], float], damping: float) -> Trial:
    """Try ever more damping until the loss falls.

    Args:
        reduction: makes a step with the damping given, and returns its reduction ratio: actual decrease of the loss
            over the expected one.
        damping: of the first try.
    """
    ratio = math.nan
    for rollbacks in range(MOST_TRIES):
        if rollbacks:
            damping *= GROW
        ratio = reduction(damping)
        if math.isfinite(ratio) and ratio > 0:
            return Trial(damping, ratio, rollbacks, True)
    return Trial(damping, ratio, MOST_TRIES, False)
