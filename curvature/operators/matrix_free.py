"""Matrices known by their products."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor

from curvature.operators.base import Operator
from curvature.operators.conjugate_gradient import conjugate_gradient
from curvature.operators.space import DENSE_LIMIT, MAX_DIRECT_SIZE, Space, require_dense_size


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
