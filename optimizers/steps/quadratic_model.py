"""The exact quadratic model of the loss over a few directions, and what is learnt from how well it did.

``M(alpha) = r^T alpha + 1/2 alpha^T (Q + damping N) alpha``, with r the slopes of the loss along the directions, Q
their products with the Gauss-Newton matrix and N their inner products (arXiv:1503.05671, sections 6.4 to 7).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from curvature.linalg import symmetric_eigh, to_host, try_cholesky

FIRST_DAMPING = 1e-3  # relative to the curvature along the first directions
GOOD, POOR = 0.75, 0.25  # reduction ratios between which the damping stays
SINGLE_PRECISION = 1e-6  # of products that were made in it
SHRINK, GROW = 0.8, 4.0  # factors of the damping: slowly down, quickly up
MOST_TRIES = 12  # dampings tried before a step is given up
MOST_DAMPING = 1e3  # relative to the largest curvature: failures raise it no further
LEAST_DAMPING = 1e-30  # likewise: a damping of zero could never grow again
MOST_AT_ONCE = 8  # candidates that an accelerator evaluates before the host reads their losses; more if expected

Candidate = TypeVar("Candidate")


@dataclass(frozen=True)
class Quadratic:
    """In float64, k directions: slopes (k,), curvature (k, k), norms (k, k)."""

    slopes: Tensor
    curvature: Tensor
    norms: Tensor

    def minimum(self, damping: float, least: float = SINGLE_PRECISION) -> Tensor:
        """The coefficients (k,) of the damped minimum; zero along directions that are zero."""
        matrix, scale = self._normalize(damping)
        values, vectors = symmetric_eigh(matrix)
        values = values.abs()  # saddle-free Newton, arXiv:1406.2572
        # directions that are the same to the precision of the products are not told apart
        kept = values > least * values.max().clamp(min=torch.finfo(values.dtype).tiny)
        inverse = torch.where(kept, 1 / values, torch.zeros_like(values))
        return -scale * (vectors @ (inverse * (vectors.T @ (scale * self.slopes))))

    def minimum_nearby(self, damping: float, least: float = SINGLE_PRECISION) -> tuple[Tensor, Tensor]:
        """About `minimum`, of a positive semi-definite model, without eigenvalues; a flag () says if it can be used."""
        matrix, scale = self._normalize(damping)
        matrix.diagonal().add_(least * len(matrix))
        root, ok = try_cholesky(matrix)
        return -scale * torch.cholesky_solve((scale * self.slopes)[:, None], root)[:, 0], ok

    def _normalize(self, damping: float) -> tuple[Tensor, Tensor]:
        """The damped matrix for directions that have a curvature of one, and what these are multiplied by."""
        matrix = self.curvature + damping * self.norms
        size = matrix.diagonal().abs()
        scale = torch.where(size > 0, size, 1.0).rsqrt()
        return scale[:, None] * matrix * scale, scale

    def first_damping(self) -> float:
        """A share of the curvature along the sum of the directions, or of the slope; -1 if these say nothing."""
        whole = torch.ones_like(self.slopes)
        norm, bend = (float(whole @ matrix @ whole) for matrix in (self.norms, self.curvature))
        size = bend if bend > 0 else abs(float(self.slopes @ whole))
        damping = FIRST_DAMPING * size / norm if norm > 0 else -1.0
        return damping if math.isfinite(damping) and damping > 0 else -1.0

    def value(self, alpha: Tensor, damping: float) -> float:
        """The predicted change of the loss."""
        return float(self.slopes @ alpha + alpha @ (self.curvature + damping * self.norms) @ alpha / 2)


def largest_curvature(curvature: Tensor, norms: Tensor) -> float:
    """The largest curvature along a direction of length one; zero where there is none. Both are (k, k)."""
    lengths = norms.diagonal()
    return float(torch.where(lengths > 0, curvature.diagonal() / lengths, 0.0).max().clamp(min=0))


@dataclass(frozen=True)
class Trial:
    """The last of the dampings that were tried."""

    first: float  # damping that was tried
    damping: float
    ratio: float  # actual decrease of the loss over the expected one
    rollbacks: int  # tries before it; with it, if it failed, too
    is_accepted: bool
    step: Any

    @property
    def entry(self) -> dict[str, Any]:
        """For the history."""
        numbers = {"damping": self.damping, "ratio": self.ratio, "rollbacks": self.rollbacks}
        return {"accepted": self.is_accepted} | numbers

    def next_damping(self, largest: float, shrink: float = SHRINK) -> float:
        """Levenberg-Marquardt: less where the loss fell as predicted or more, more where it fell by much less.

        More after a failure, too, unless no damping would have helped: where the loss or the curvature is flat.
        """
        if not self.is_accepted:
            more = min(self.first * GROW, MOST_DAMPING * largest)
            return self.first if self.ratio == 0 else max(self.first, more)
        if self.ratio > GOOD:
            return max(self.damping * shrink, min(self.damping, LEAST_DAMPING * largest))
        return self.damping / shrink if self.ratio < POOR else self.damping


def first_accepted(
    attempt: Callable[[float], tuple[Tensor | float, Any]], damping: float, least_ratio: float = 0.0,
    device: torch.device | None = None, first: int = 1,
) -> Trial:  # fmt: skip
    """Try ever more damping until the loss falls, or until it does not change at all: then it cannot tell.

    `attempt` makes a step, and returns its reduction ratio beside it. At the last try any ratio will do. An accelerator
    makes `first` attempts before the host looks, and some after the accepted one.
    """
    dampings = [damping * GROW**k for k in range(MOST_TRIES)]
    count = 0
    for some in tried_together(dampings, device, first):
        made = [attempt(damping) for damping in some]
        ratios = to_host([x if isinstance(x, Tensor) else torch.tensor(x, device="cpu") for x, _ in made])
        for ratio, tried, (_, step) in zip(map(float, ratios), some, made, strict=True):
            is_last = count + 1 == MOST_TRIES
            if math.isfinite(ratio) and ratio > (0 if is_last else least_ratio):
                return Trial(damping, tried, ratio, count, True, step)
            count += 1
            if ratio == 0 or count == MOST_TRIES:
                return Trial(damping, tried, ratio, count, False, step)
    raise AssertionError("the last damping ends the tries")


def tried_together(
    candidates: Sequence[Candidate], device: torch.device | None, first: int = 1
) -> Iterator[Sequence[Candidate]]:
    """Candidates that are evaluated before the host looks: one on a CPU, more and more on an accelerator."""
    is_cpu = device is None or device.type == "cpu"
    start, count = 0, 1 if is_cpu else first
    while start < len(candidates):
        yield candidates[start : start + count]
        start, count = start + count, 1 if is_cpu else min(2 * count, MOST_AT_ONCE)
