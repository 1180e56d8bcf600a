"""Kronecker-factored matrices of one layer: ``kron(B, A)`` per group, or diagonal in a Kronecker-factored basis.

The entries of the weight, with the bias as its last input, are arranged as X (g, o, i). ``kron(B, A)`` acts as
``B X A``: for a row-major X, ``kron(B, A) vec(X) = vec(B X A^T)``.

Indices: g group, o output, i input, c column.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from curvature import linalg
from curvature.operators.base import Operator
from curvature.operators.space import Space, require_dense_size
from curvature.terms import AffineLayout


def two_sided(left: Tensor | None, x: Tensor, right: Tensor | None) -> Tensor:
    """``left @ x @ right`` for x (*batch, g, o, i); a side is (g, d, d), its diagonal (g, d), or None for identity."""
    if left is not None:
        x = left[..., None] * x if left.ndim == 2 else linalg.matmul(left, x)
    if right is not None:
        x = x * right[:, None, :] if right.ndim == 2 else linalg.matmul(x, right)
    return x


class LayerOperator(Operator):
    """A matrix over the parameters of one layer, whose entries are where the arrangement says in (g, o, i)."""

    def __init__(self, space: Space, arrangement: AffineLayout) -> None:
        super().__init__(space)
        if tuple(map(tuple, arrangement.shapes)) != space.shapes:
            raise ValueError(f"the arrangement is of shapes {arrangement.shapes}, the space of {space.shapes}")
        self.arrangement = arrangement

    @property
    def sides(self) -> tuple[int, int, int]:
        """g, o and i."""
        return self.arrangement.sides

    def _side(self, matrix: Tensor, what: str, size: int, is_symmetric: bool) -> Tensor:
        """Check a factor (g, size, size), or (g, size) if it is diagonal."""
        if matrix.ndim == 2:
            return self.space.kept(matrix, (self.sides[0], size), what)
        matrix = self.space.kept(matrix, (self.sides[0], size, size), what)
        return matrix if is_symmetric else linalg.symmetrize(matrix, what)

    def _to_matrices(self, V: Tensor) -> Tensor:
        """Columns (P, c) to (c, g, o, i)."""
        parts = zip(V.T.split(self.space.sizes, 1), self.space.shapes, strict=True)
        return self.arrangement.to_matrices([part.reshape(-1, *shape) for part, shape in parts])

    def _to_columns(self, X: Tensor) -> Tensor:
        """The inverse of `_to_matrices`."""
        return torch.cat([part.flatten(1) for part in self.arrangement.from_matrices(X)], 1).T

    def _describe(self, **matrices: Tensor | None) -> list[str]:
        """The number of groups, if there are several, and the form of each of these matrices."""
        form = lambda x: "identity" if x is None else "diagonal" if x.ndim == 2 else f"{x.shape[1]} x {x.shape[1]}"
        number = [f"{self.sides[0]} groups"] if self.sides[0] > 1 else []
        return [*number, *(f"{name} {form(matrix)}" for name, matrix in matrices.items())]


class EigenKronecker(LayerOperator):
    """``Q diag(values) Q^T`` with ``Q = kron(U_B, U_A)`` per group (EKFAC, arXiv:1806.03884).

    Args:
        space: of the weight, or of the weight and the bias.
        arrangement: likewise.
        row_vectors: U_B, orthogonal, eigenvectors as columns (g, o, o); None for the identity.
        column_vectors: U_A (g, i, i), or None.
        values: the eigenvalues, (g, o, i).
        rounding: uncertainty of the values by rounding, (g, o, i). By default, it follows from the largest value that
            the eigenvectors mix with each, and is zero if both are the identity.

    Raises:
        ValueError: wrong shapes, dtype or device, vectors that are not orthogonal, or entries that are not finite.
    """

    fields = ("space", "arrangement", "row_vectors", "column_vectors", "values", "rounding")

    def __init__(
        self,
        space: Space,
        arrangement: AffineLayout,
        row_vectors: Tensor | None,
        column_vectors: Tensor | None,
        values: Tensor,
        rounding: Tensor | None = None,
    ) -> None:
        super().__init__(space, arrangement)
        _, outputs, inputs = self.sides
        self.row_vectors = self._vectors(row_vectors, "row_vectors", outputs)
        self.column_vectors = self._vectors(column_vectors, "column_vectors", inputs)
        self.values = space.kept(values, self.sides, "values")
        if rounding is None:
            mixed = [dim for dim, U in ((1, self.row_vectors), (2, self.column_vectors)) if U is not None]
            largest = self.values.abs().amax(mixed, keepdim=True) if mixed else torch.zeros_like(self.values)
            rounding = linalg.eigenvalue_rounding(largest).expand(self.sides)
        self.rounding = space.kept(rounding, self.sides, "rounding")

    def _vectors(self, vectors: Tensor | None, what: str, size: int) -> Tensor | None:
        if vectors is None:
            return None
        vectors = self.space.kept(vectors, (self.sides[0], size, size), what)
        eye = torch.eye(size, dtype=vectors.dtype, device=vectors.device)
        # This catches mistakes, so it is loose enough for products in reduced precision, and for vectors in 16 bits.
        if not ((linalg.matmul(vectors.mT, vectors) - eye).abs() <= torch.finfo(torch.float32).eps ** 0.25).all():
            raise ValueError(f"{what} of the parameters {list(self.space.names)} are not orthogonal")
        return vectors

    def _spectral(self, V: Tensor, values: Tensor) -> Tensor:
        """``Q diag(values) Q^T V`` for columns (P, c)."""
        rows = self.row_vectors
        inner = two_sided(None if rows is None else rows.mT, self._to_matrices(V), self.column_vectors)
        return self._rotate_back(values * inner)

    def _rotate_back(self, X: Tensor) -> Tensor:
        """``Q x`` for (c, g, o, i), as columns (P, c)."""
        columns = self.column_vectors
        return self._to_columns(two_sided(self.row_vectors, X, None if columns is None else columns.mT))

    def _damped(self, damping: float) -> Tensor:
        return linalg.damp_eigenvalues(self.values, self.rounding, damping, repr(self))

    def _with(self, values: Tensor, rounding: Tensor) -> EigenKronecker:
        """The same basis with other eigenvalues."""
        rows, columns = self.row_vectors, self.column_vectors
        return EigenKronecker(self.space, self.arrangement, rows, columns, values, rounding)

    def _matmat(self, V: Tensor) -> Tensor:
        return self._spectral(V, self.values)

    def diagonal(self) -> Tensor:
        rows, columns = self.row_vectors, self.column_vectors
        squares = two_sided(
            None if rows is None else rows.square(), self.values[None], None if columns is None else columns.square().mT
        )
        return self._to_columns(squares)[:, 0]

    def trace(self) -> Tensor:
        return self.values.sum()

    def frobenius_norm(self) -> Tensor:
        return self.values.norm()

    def _eigenvalues(self) -> Tensor:
        return self.values.flatten().sort().values

    def _solve(self, V: Tensor, damping: float) -> Tensor:
        return self._spectral(V, 1 / self._damped(damping))

    def _inverse_root(self, Z: Tensor, damping: float) -> Tensor:
        noise = Z.T.reshape(-1, *self.sides)  # the noise is independent, so its order is irrelevant
        return self._rotate_back(noise / self._damped(damping).sqrt())

    def inverse(self, damping: float = 0.0) -> Operator:
        values = 1 / self._damped(float(damping))
        return self._with(values, self.rounding * values.square())

    def logdet(self, damping: float = 0.0) -> Tensor:
        return self._damped(float(damping)).log().sum()

    def scaled(self, factor: float) -> Operator:
        return self._with(linalg.require_finite(factor) * self.values, abs(factor) * self.rounding)

    def damped(self, damping: float) -> Operator:
        return self._with(self.values + linalg.require_finite(damping), self.rounding)

    def _details(self) -> list[str]:
        return self._describe(rows=self.row_vectors, columns=self.column_vectors)


class Kronecker(LayerOperator):
    """``kron(B, A)`` per group (KFAC, arXiv:1503.05671).

    Without damping the inverse is that of the factors, by Cholesky decomposition, where these are far from singular.
    Damped solves, eigenvalues, determinants and draws use an exact eigendecomposition.

    Args:
        space: of the weight, or of the weight and the bias.
        arrangement: likewise.
        rows: B, from backprops, (g, o, o), or (g, o) if it is diagonal.
        columns: A, from activations, (g, i, i), or (g, i) if it is diagonal.
        is_symmetric: whether the factors are known to be symmetric up to rounding; otherwise that is tested, which
            takes about a tenth as long as the sums over a batch that they are made of.

    Raises:
        ValueError: wrong shapes, dtype or device, not symmetric, or not finite.
    """

    fields = ("space", "arrangement", "rows", "columns")

    def __init__(
        self, space: Space, arrangement: AffineLayout, rows: Tensor, columns: Tensor, *, is_symmetric: bool = False
    ) -> None:
        super().__init__(space, arrangement)
        _, outputs, inputs = self.sides
        self.rows = self._side(rows, "rows", outputs, is_symmetric)
        self.columns = self._side(columns, "columns", inputs, is_symmetric)
        self._inverse: Kronecker | None = None

    @property
    def A(self) -> Tensor:
        """The factor of the activations, `columns`."""
        return self.columns

    @property
    def B(self) -> Tensor:
        """The factor of the backprops, `rows`."""
        return self.rows

    @cached_property
    def eigen(self) -> EigenKronecker:
        """The same matrix in its eigenbasis, which is computed at first use."""
        row_values, row_rounding, row_vectors = _eigendecompose(self.rows)
        values, rounding, vectors = _eigendecompose(self.columns)
        products = row_values[:, :, None] * values[:, None, :]
        # The rounding of each factor times the values of the other, far less than that of the largest product.
        unsure = row_rounding[:, :, None] * values.abs()[:, None, :] + row_values.abs()[:, :, None] * rounding[:, None]
        return EigenKronecker(self.space, self.arrangement, row_vectors, vectors, products, unsure)

    def _matmat(self, V: Tensor) -> Tensor:
        return self._to_columns(two_sided(self.rows, self._to_matrices(V), self.columns))

    def to_dense(self) -> Tensor:
        require_dense_size(self.space)
        dense = torch.zeros(self.shape, dtype=self.space.dtype, device=self.space.device)
        (places,) = self._to_matrices(torch.arange(self.space.size, device=self.space.device)[:, None])
        for group, where in enumerate(places.flatten(1)):
            B, A = (side[group] if side.ndim == 3 else side[group].diag() for side in (self.rows, self.columns))
            dense[where[:, None], where] = torch.kron(B.contiguous(), A.contiguous())
        return dense

    def diagonal(self) -> Tensor:
        rows, columns = _diagonal(self.rows), _diagonal(self.columns)
        return self._to_columns((rows[:, :, None] * columns[:, None, :])[None])[:, 0]

    def trace(self) -> Tensor:
        return (_diagonal(self.rows).sum(1) * _diagonal(self.columns).sum(1)).sum()

    def frobenius_norm(self) -> Tensor:
        return (self.rows.flatten(1).norm(dim=1) * self.columns.flatten(1).norm(dim=1)).norm()

    def _decomposed(self) -> EigenKronecker:
        return self.eigen

    def _of_inverses(self) -> Kronecker | None:
        """``kron(B^-1, A^-1)``; None where a factor may be singular, or where eigenvalues are known already."""
        if self._inverse is None and "eigen" not in vars(self):
            rows, columns = map(_invert, (self.rows, self.columns))
            if rows is not None and columns is not None:
                self._inverse = Kronecker(self.space, self.arrangement, rows, columns, is_symmetric=True)
        return self._inverse

    def _solve(self, V: Tensor, damping: float) -> Tensor:
        inverse = None if damping else self._of_inverses()
        return self.eigen._solve(V, damping) if inverse is None else inverse._matmat(V)

    def inverse(self, damping: float = 0.0) -> Operator:
        inverse = None if damping else self._of_inverses()
        return self.eigen.inverse(damping) if inverse is None else inverse

    def scaled(self, factor: float) -> Operator:
        rows = linalg.require_finite(factor) * self.rows
        return Kronecker(self.space, self.arrangement, rows, self.columns, is_symmetric=True)

    def damped(self, damping: float) -> Operator:
        return self.eigen.damped(damping)

    def _in_16_bits(self) -> Any:
        return self.eigen.to(torch.bfloat16)

    def factored_damping(self, damping: float) -> Kronecker:
        """``kron(B + sqrt(damping) / pi I, A + pi sqrt(damping) I)`` (arXiv:1503.05671, section 6.3).

        This equals ``M + damping I`` plus two terms that are not small, but its inverse is a Kronecker product, too.
        Per group, ``pi^2 = mean eigenvalue of A / mean eigenvalue of B``; pi = 1 if one of them is not positive.

        Raises:
            ValueError: the damping is negative.
        """
        if not damping >= 0:
            raise ValueError(f"a damping in factors cannot be negative, found {damping}")
        means = [_diagonal(side).mean(1) for side in (self.columns, self.rows)]
        positive = (means[0] > 0) & (means[1] > 0)
        pi = torch.where(positive, means[0] / means[1], torch.ones_like(means[0])).sqrt()[:, None]
        rows = _shift_diagonal(self.rows, damping**0.5 / pi)
        return Kronecker(self.space, self.arrangement, rows, _shift_diagonal(self.columns, damping**0.5 * pi))

    def _details(self) -> list[str]:
        return self._describe(B=self.rows, A=self.columns)


def _diagonal(side: Tensor) -> Tensor:
    """The diagonal (g, d) of a factor."""
    return side if side.ndim == 2 else side.diagonal(dim1=1, dim2=2)


def _shift_diagonal(side: Tensor, shift: Tensor) -> Tensor:
    """Add (g, 1) to the diagonal of a factor."""
    return side + (shift if side.ndim == 2 else shift.expand(side.shape[:2]).diag_embed())


def _eigendecompose(side: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Eigenvalues (g, d), their rounding (g, d), and eigenvectors, None if the factor is diagonal."""
    if side.ndim == 2:
        return side, torch.zeros_like(side), None
    values, vectors = linalg.symmetric_eigh(side)
    rounding = linalg.eigenvalue_rounding(values.abs().amax(1, keepdim=True)).expand(values.shape)
    return values, rounding, vectors


@linalg.full_precision()
def _invert(side: Tensor) -> Tensor | None:
    """The inverse of a factor; None if it may not be positive definite to working precision."""
    if side.ndim == 2:
        return 1 / side if bool((side > 0).all()) else None
    inverse, ok = linalg.try_spd_inverse(side)
    # the product of the traces is no less than the condition number
    worst = linalg.eigenvalue_rounding(_diagonal(side).sum(1)) * _diagonal(inverse).sum(1)
    return (inverse.mT + inverse) / 2 if all(linalg.look([ok, (worst < 1).all()])) else None
