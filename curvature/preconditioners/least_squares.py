"""Damped linear least squares with a Jacobian, in parameter or sample space, whichever is smaller."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from curvature.gradients import Jacobian
from curvature.linalg import count_recovery, eigenvalue_rounding, full_precision, symmetric_eigh, try_cholesky

ZERO_FACTOR = 5.0  # eigenvalues and damping below this many times their rounding error count as zero


class LeastSquares:
    """``argmin_d ||J d - b||^2 + damping ||d||^2`` for any number of b and dampings; ``(J^T J + damping)^-1 g``.

    With P parameters and M values, ``(J^T J + damping) d = J^T b`` is solved where P <= M, else ``d = J^T (J J^T +
    damping)^-1 b`` (Woodbury's identity), by Cholesky. Without damping, or with less than the rounding error, by
    eigenvalues, leaving out those below 50 eps of the largest: this gives the shortest of all solutions.
    """

    @full_precision()
    def __init__(self, jacobian: Jacobian) -> None:
        self.jacobian = jacobian
        self.dense = jacobian.to_dense() if jacobian.shape[1] <= jacobian.shape[0] else None
        self.matrix = jacobian.gram() if self.dense is None else self.dense.mT @ self.dense
        self._spectrum: tuple[Tensor, Tensor] | None = None
        self._root: tuple[float, Tensor | None] = (-1.0, None)  # Cholesky root for the last damping

    @full_precision()
    def solve(self, right: Tensor, damping: float = 0.0, cut: float = 0.0) -> dict[str, Tensor]:
        """The solution for ``right`` (M,), in the shapes of the parameters.

        Without damping, eigenvalues below `cut` times the largest, or below rounding error, are left out.
        """
        if self.dense is None:
            return self.jacobian.transposed(self._solved(right, damping, cut))
        return self.jacobian.split(self._solved(self.dense.mT @ right.to(self.dense), damping, cut))

    @full_precision()
    def precondition(self, gradient: Mapping[str, Tensor], damping: float) -> dict[str, Tensor]:
        """``(J^T J + damping)^-1 g`` for any g, in the shapes of the parameters.

        Raises:
            ValueError: the damping is not positive.
        """
        if not damping > 0:
            raise ValueError(f"damping: expected a positive number, found {damping}")
        if self.dense is not None:
            return self.jacobian.split(self._solved(self.jacobian.flat(gradient), damping))
        inside = self.jacobian.transposed(self._solved(self.jacobian.times(gradient), damping))
        return {name: (gradient[name] - inside[name]) / damping for name in self.jacobian.shapes}

    @full_precision()
    def times(self, vector: Mapping[str, Tensor]) -> Tensor:
        """``J v`` (M,)."""
        if self.dense is None:
            return self.jacobian.times(vector)
        return self.dense @ self.jacobian.flat(vector).to(self.dense)

    @property
    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues, ascending, and eigenvectors of the decomposed matrix."""
        if self._spectrum is None:
            self._spectrum = symmetric_eigh(self.matrix)
        return self._spectrum

    @cached_property
    def _rounding(self) -> float:
        """Below this a damping counts as zero."""
        return float(ZERO_FACTOR * eigenvalue_rounding(self.matrix.trace()))

    @property
    def largest(self) -> float:
        """The largest eigenvalue of ``J^T J``."""
        return float(self.spectrum[0][-1])

    def prepare(self, damping: float) -> None:
        """Decompose for a damping, ahead of the first solution with it.

        Raises:
            torch.linalg.LinAlgError: every way to decompose failed.
        """
        is_large = damping > self._rounding
        if self._root[0] != damping:
            root = None
            if is_large and self._spectrum is None:
                damped = self.matrix.clone()
                damped.diagonal().add_(damping)
                root = try_cholesky(damped)
                if root is None:
                    count_recovery("retried")
            self._root = damping, root
        if self._root[1] is None:
            _ = self.spectrum

    def _solved(self, right: Tensor, damping: float, cut: float = 0.0) -> Tensor:
        right = right.to(self.matrix)  # its precision may differ from that of the parameters
        self.prepare(damping)
        if self._root[1] is not None:
            return torch.cholesky_solve(right[:, None], self._root[1])[:, 0]
        values, vectors = self.spectrum
        is_large = damping > self._rounding
        kept = (values > torch.maximum(ZERO_FACTOR * eigenvalue_rounding(values[-1]), cut * values[-1])) | is_large
        inverse = torch.where(kept, 1 / (values.clamp(min=0) + damping), torch.zeros_like(values))
        return vectors @ (inverse * (vectors.mT @ right))
