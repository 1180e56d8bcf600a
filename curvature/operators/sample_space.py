"""Matrices kept by fewer rows than they have columns: gradients of samples, whose inner products say all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from curvature import linalg
from curvature.operators.base import Operator
from curvature.operators.matrix_free import Inverse
from curvature.operators.space import Space, require_dense_size

MAX_BYTES = 1 << 26  # of the intermediate results of products


class Rows(Protocol):
    """R (M, P), such as a `Jacobian`: known by its products and by the inner products of its rows."""

    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def bytes(self) -> int: ...
    def gram(self) -> Tensor: ...  # R R^T (M, M)
    def times(self, vector: Mapping[str, Tensor]) -> Tensor: ...  # R v (M,)
    def transposed(self, z: Tensor) -> dict[str, Tensor]: ...  # R^T z, like the parameters
    def squares(self) -> dict[str, Tensor]: ...  # the diagonal of R^T R
    def to_dense(self) -> Tensor: ...  # (M, P)


class SampleSpace(Operator):
    """``scale R^T R`` by its rows R (M, P), M < P, and their Gram matrix: exact, with nothing of size P x P.

    Solutions, determinants and draws come from decompositions of ``scale R R^T`` (M, M) by Woodbury's identity,
    ``(scale R^T R + d)^-1 v = (v - scale R^T (scale R R^T + d)^-1 R v) / d``. It is singular without damping.

    Args:
        space: of the parameters.
        rows: R; of parameters by the names of the space.
        scale: positive, such as 1 / N for the mean over N samples.
    """

    def __init__(self, space: Space, rows: Rows, scale: float = 1.0) -> None:
        super().__init__(space)
        self.rows, self.scale = rows, linalg.require_finite(scale)
        self._root: tuple[float, Tensor] | None = None  # the last damping and its Cholesky factor

    @cached_property
    @linalg.full_precision()
    def gram(self) -> Tensor:
        """``scale R R^T`` (M, M)."""
        return self.scale * self.rows.gram().to(self.space.dtype)

    @cached_property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        return linalg.psd_eigh(self.gram)

    def _times(self, V: Tensor) -> Tensor:
        """``sqrt(scale) R V`` (M, c) for columns (P, c)."""
        return self._by_column(lambda v: self.rows.times(self.space.split(v)), V)

    def _transpose_times(self, Z: Tensor) -> Tensor:
        """``sqrt(scale) R^T Z`` (P, c) for columns (M, c)."""
        return self._by_column(lambda z: self.space.flatten(self.rows.transposed(z)), Z)

    def _by_column(self, function: Callable[[Tensor], Tensor], V: Tensor) -> Tensor:
        """As many columns together as have intermediate results of a bounded size, each about that of the rows."""
        together = max(1, MAX_BYTES // max(1, self.rows.bytes))
        columns = torch.vmap(function, out_dims=1, chunk_size=together)(V.mT.contiguous())
        return math.sqrt(self.scale) * columns.to(V)

    @linalg.full_precision()
    def _matmat(self, V: Tensor) -> Tensor:
        return self._transpose_times(self._times(V))

    @linalg.full_precision()
    def to_dense(self) -> Tensor:
        require_dense_size(self.space)
        rows = self.rows.to_dense().to(self.space.dtype)
        return self.scale * linalg.matmul(rows.mT, rows)

    def diagonal(self) -> Tensor:
        return self.scale * self.space.flatten(self.rows.squares()).to(self.space.dtype)

    def trace(self) -> Tensor:
        return self.gram.trace()

    def frobenius_norm(self) -> Tensor:
        return self.gram.norm()

    def _eigenvalues(self) -> Tensor:
        values = linalg.eigenvalues_of(self.gram).clamp(min=0)
        return torch.cat([values.new_zeros(self.space.size), values])[-self.space.size :]

    def _require_damping(self, damping: float) -> None:
        """Raise `NotDefinite` for a damping within the rounding of the eigenvalues, most of which are zero."""
        rounding = linalg.eigenvalue_rounding(self.gram.norm())
        if not damping > rounding / 10:
            raise linalg.NotDefinite(repr(self), torch.zeros_like(rounding), rounding, damping)

    def _cholesky(self, damping: float) -> Tensor:
        self._require_damping(damping)
        if self._root is None or self._root[0] != damping:
            self._root = damping, linalg.cholesky(self.gram, damping, repr(self))
        return self._root[1]

    @linalg.full_precision()
    def _solve(self, V: Tensor, damping: float) -> Tensor:
        inner = torch.cholesky_solve(self._times(V), self._cholesky(damping))
        return (V - self._transpose_times(inner)) / damping

    def inverse(self, damping: float = 0.0) -> Operator:
        self._cholesky(float(damping))
        return Inverse(self, damping)

    def logdet(self, damping: float = 0.0) -> Tensor:
        logdet = 2 * self._cholesky(float(damping)).diagonal().log().sum()
        return logdet + (self.space.size - len(self.gram)) * math.log(damping)

    @linalg.full_precision()
    def _inverse_root(self, Z: Tensor, damping: float) -> Tensor:
        self._require_damping(damping)
        values, vectors = self._spectrum
        root, roots = math.sqrt(damping), (values + damping).sqrt()
        change = 1 / (root * roots * (root + roots))  # (1 / root - 1 / roots) / values
        return Z / root - self._transpose_times(vectors @ (change[:, None] * (vectors.mT @ self._times(Z))))

    def scaled(self, factor: float) -> Operator:
        if not factor > 0:
            return super().scaled(factor)
        multiple = SampleSpace(self.space, self.rows, self.scale * linalg.require_finite(factor))
        if "gram" in vars(self):
            multiple.gram = factor * self.gram
        return multiple

    def _details(self) -> list[str]:
        return [f"{self.rows.shape[0]} rows"]
