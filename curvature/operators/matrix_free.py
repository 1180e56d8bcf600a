"""Matrices known by their products, or by fewer rows than they have columns: gradients of samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from curvature import linalg
from curvature.operators.base import Operator
from curvature.operators.conjugate_gradient import conjugate_gradient
from curvature.operators.space import DENSE_LIMIT, MAX_DIRECT_SIZE, Space, require_dense_size

MAX_BYTES = 1 << 26  # of the intermediate results of products


def _nothing(limit: int) -> None:  # not a lambda: operators are pickled
    return None


class Passes(Protocol):
    """The passes over data that make the products; inside, what products share is kept, or that of a single batch."""

    def keeping(self) -> AbstractContextManager[None]: ...
    def keeping_one_batch(self) -> AbstractContextManager[None]: ...


class MatrixFree(Operator):
    """A matrix given by its product with columns.

    With up to 2000 parameters, or rows in sample space, `solve` and `inverse` build and decompose the matrix there;
    with more, they use `conjugate_gradient` with its default tolerance (call that directly for a preconditioner).
    No result is kept: ``compact()`` gives a matrix that several calls can share. All other methods but
    ``eigenvalues(k)`` build the matrix, with up to `DENSE_LIMIT` rows, and warn of the cost above 2000.

    Args:
        space: of the parameters.
        matmat: columns (P, c) to columns (P, c), linear and symmetric.
        diagonal: a cheaper exact way to compute the diagonal, (P,).
        dense: a cheaper exact way to compute the matrix, (P, P).
        trace: a cheaper exact way to compute the trace, a scalar tensor.
        in_sample_space: returns the same matrix as `SampleSpace` if it has at most this many rows, else None.
        passes: what `curvature.kept` keeps the graphs of.
    """

    is_known_by_products = True

    def __init__(
        self,
        space: Space,
        matmat: Callable[[Tensor], Tensor],
        *,
        diagonal: Callable[[], Tensor] | None = None,
        dense: Callable[[], Tensor] | None = None,
        trace: Callable[[], Tensor] | None = None,
        in_sample_space: Callable[[int], Operator | None] = _nothing,
        passes: Passes | None = None,
    ) -> None:
        super().__init__(space)
        self.passes = passes
        self._product = matmat
        self._known_diagonal, self._known_dense, self._known_trace = diagonal, dense, trace
        self._in_sample_space = in_sample_space

    def _matmat(self, V: Tensor) -> Tensor:
        return self.space.checked(self._product(V), V.shape, "the product with the matrix")

    def _one_call(self) -> AbstractContextManager[None]:
        return nullcontext() if self.passes is None else self.passes.keeping_one_batch()

    def to_dense(self) -> Tensor:
        require_dense_size(self.space)
        return super().to_dense() if self._known_dense is None else self._known_dense()

    def diagonal(self) -> Tensor:
        return super().diagonal() if self._known_diagonal is None else self._known_diagonal()

    def trace(self) -> Tensor:
        return super().trace() if self._known_trace is None else self._known_trace()

    def compact(self) -> Operator:
        """The same matrix for several solves: by the rows of the samples where these are fewer than the parameters.

        Raises:
            ValueError: both are more than `DENSE_LIMIT`.
        """
        return self._in_sample_space(min(self.space.size - 1, DENSE_LIMIT)) or self.materialise()

    def _direct(self) -> Operator | None:
        """As `compact`, if it is small enough to do unasked."""
        return self.compact() if self.space.size <= MAX_DIRECT_SIZE else self._in_sample_space(MAX_DIRECT_SIZE)

    def _solve(self, V: Tensor, damping: float) -> Tensor:
        held = self._direct()
        return conjugate_gradient(self, V, damping) if held is None else held._solve(V, damping)

    def inverse(self, damping: float = 0.0) -> Operator:
        held = self._direct()
        return Inverse(self, damping) if held is None else held.inverse(damping)


class Inverse(Operator):
    """``K^-1`` with ``K = M + damping I``; each product solves with M."""

    is_known_by_products = True

    def __init__(self, inner: Operator, damping: float) -> None:
        super().__init__(inner.space)
        self.inner, self.damping = inner, float(damping)

    def _matmat(self, V: Tensor) -> Tensor:
        return self.inner._solve(V, self.damping)

    def to_dense(self) -> Tensor:
        return self.inner.materialise().inverse(self.damping).to_dense()

    def _solve(self, V: Tensor, damping: float) -> Tensor:
        def product(x: Tensor) -> Tensor:
            return self.inner._matmat(x) + self.damping * x

        if damping < 0:
            return super()._solve(V, damping)
        # (K^-1 + e I)^-1 = K (I + e K)^-1
        return product(self.inner._solve(V, self.damping + 1 / damping)) / damping if damping else product(V)


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
