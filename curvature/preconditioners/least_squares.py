"""Damped linear least squares with a Jacobian, in parameter or sample space, whichever is smaller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from curvature.gradients import Jacobian
from curvature.linalg import count_recovery, eigenvalue_rounding, full_precision, look, symmetric_eigh, try_cholesky

Damping = float | Tensor  # a number, or () where the matrix is

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
        self._last: Damping = -1.0  # damping
        self._root: Tensor | None = None  # Cholesky root for it

    @full_precision()
    def solve(self, right: Tensor, damping: float = 0.0, cut: float = 0.0) -> dict[str, Tensor]:
        """The solution for ``right`` (M,), in the shapes of the parameters.

        Without damping, eigenvalues below `cut` times the largest, or below rounding error, are left out.
        """
        if self.dense is None:
            return self.jacobian.transposed(self._solve(right, damping, cut))
        return self.jacobian.split(self._solve(self.dense.mT @ right.to(self.dense), damping, cut))

    @full_precision()
    def precondition(self, gradient: Mapping[str, Tensor], damping: Damping) -> dict[str, Tensor]:
        """``(J^T J + damping)^-1 g`` for any g, in the shapes of the parameters.

        Raises:
            ValueError: the damping is not positive.
        """
        if not isinstance(damping, Tensor) and not damping > 0:
            raise ValueError(f"damping: expected a positive number, found {damping}")
        if self.dense is not None:
            return self.jacobian.split(self._solve(self.jacobian.flat(gradient), damping))
        inside = self.jacobian.transposed(self._solve(self.jacobian.times(gradient), damping))
        return {name: (gradient[name] - part) / at(damping, part) for name, part in inside.items()}

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
    def trace(self) -> Tensor:
        """The sum of the eigenvalues, ()."""
        return self.matrix.trace()

    def _is_large(self, damping: Damping) -> Tensor:
        """Whether a damping does not count as zero, ()."""
        return damping > ZERO_FACTOR * eigenvalue_rounding(self.trace)

    @property
    def largest(self) -> float:
        """The largest eigenvalue of ``J^T J``."""
        return float(self.spectrum[0][-1])

    def prepare(self, damping: Damping) -> None:
        """Decompose for a damping, ahead of the first solution with it.

        Raises:
            torch.linalg.LinAlgError: every way to decompose failed.
        """
        LeastSquares.prepare_all([self], [damping])

    @staticmethod
    def prepare_all(problems: Sequence[LeastSquares], dampings: Sequence[Damping]) -> None:
        """`prepare` several; the host asks once whether dampings exceed rounding, and whether all have succeeded."""
        new = [(problem, d) for problem, d in zip(problems, dampings, strict=True) if not _is_same(problem._last, d)]
        tried = []
        for problem, d in new:
            if problem._spectrum is None and (isinstance(d, Tensor) or d > 0):
                damped = problem.matrix.clone()
                damped.diagonal().add_(d)
                tried.append((problem, d, *try_cholesky(damped)))
        told = look([flag for problem, d, _, ok in tried for flag in (problem._is_large(d), ok)])
        for problem, d in new:
            problem._last, problem._root = d, None
        for (problem, _, root, _), is_large, is_fine in zip(tried, told[::2], told[1::2], strict=True):
            problem._root = root if is_large and is_fine else None
            if is_large and not is_fine:
                count_recovery("retried")
        for problem in problems:
            if problem._root is None:
                _ = problem.spectrum

    def _solve(self, right: Tensor, damping: Damping, cut: float = 0.0) -> Tensor:
        right = right.to(self.matrix)  # its precision may differ from that of the parameters
        self.prepare(damping)
        if self._root is not None:
            return torch.cholesky_solve(right[:, None], self._root)[:, 0]
        values, vectors = self.spectrum
        least = torch.maximum(ZERO_FACTOR * eigenvalue_rounding(values[-1]), cut * values[-1])
        kept = (values > least) | self._is_large(damping)
        inverse = torch.where(kept, 1 / (values.clamp(min=0) + damping), torch.zeros_like(values))
        return vectors @ (inverse * (vectors.mT @ right))


def at(damping: Damping, x: Tensor) -> Damping:
    """A damping where x is."""
    return damping.to(x.device) if isinstance(damping, Tensor) else damping


def _is_same(one: Damping, other: Damping) -> bool:
    """Whether two dampings are surely equal; the host does not wait for numbers."""
    return one is other or (not isinstance(one, Tensor) and not isinstance(other, Tensor) and one == other)
