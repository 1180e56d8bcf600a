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
from curvature.kronecker import DenseSide, DiagonalSide, Product, Side, two_sided
from curvature.operators.base import Operator
from curvature.operators.space import Space, require_dense_size
from curvature.terms import AffineLayout


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

    def _to_matrices(self, V: Tensor) -> Tensor:
        """Columns (P, c) to (c, g, o, i)."""
        parts = zip(V.T.split(self.space.sizes, 1), self.space.shapes, strict=True)
        return self.arrangement.to_matrices([part.reshape(-1, *shape) for part, shape in parts])

    def _to_columns(self, X: Tensor) -> Tensor:
        """The inverse of `_to_matrices`."""
        return torch.cat([part.flatten(1) for part in self.arrangement.from_matrices(X)], 1).T

    def _describe(self, **forms: str) -> list[str]:
        """The number of groups, if there are several, and the forms of matrices by name."""
        number = [f"{self.sides[0]} groups"] if self.sides[0] > 1 else []
        return [*number, *(f"{name} {form}" for name, form in forms.items())]


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
        form = lambda x: "identity" if x is None else f"{x.shape[1]} x {x.shape[1]}"
        return self._describe(rows=form(self.row_vectors), columns=form(self.column_vectors))


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
        sides = self._side(rows, "rows", outputs, is_symmetric), self._side(columns, "columns", inputs, is_symmetric)
        self.factors: Product = sides
        self._inverse: Kronecker | None = None

    def _side(self, matrix: Tensor, what: str, size: int, is_symmetric: bool) -> Side:
        """A factor (g, size, size), or (g, size) if it is diagonal, which is checked."""
        if matrix.ndim == 2:
            return DiagonalSide(self.space.kept(matrix, (self.sides[0], size), what))
        matrix = self.space.kept(matrix, (self.sides[0], size, size), what)
        return DenseSide(matrix if is_symmetric else linalg.symmetrize(matrix, what))

    @property
    def rows(self) -> Tensor:
        """B, the factor of the backprops."""
        return self.factors[0].entries

    @property
    def columns(self) -> Tensor:
        """A, the factor of the activations."""
        return self.factors[1].entries

    A, B = columns, rows

    @cached_property
    def eigen(self) -> EigenKronecker:
        """The same matrix in its eigenbasis, which is computed at first use."""
        (row_values, row_rounding, row_vectors), (values, rounding, vectors) = map(_eigendecompose, self.factors)
        products = row_values[:, :, None] * values[:, None, :]
        # The rounding of each factor times the values of the other, far less than that of the largest product.
        unsure = row_rounding[:, :, None] * values.abs()[:, None, :] + row_values.abs()[:, :, None] * rounding[:, None]
        return EigenKronecker(self.space, self.arrangement, row_vectors, vectors, products, unsure)

    def _matmat(self, V: Tensor) -> Tensor:
        rows, columns = self.factors
        return self._to_columns(columns.right(rows.left(self._to_matrices(V))))

    def to_dense(self) -> Tensor:
        require_dense_size(self.space)
        dense = torch.zeros(self.shape, dtype=self.space.dtype, device=self.space.device)
        (places,) = self._to_matrices(torch.arange(self.space.size, device=self.space.device)[:, None])
        for group, where in enumerate(places.flatten(1)):
            B, A = (side.dense()[group] for side in self.factors)
            dense[where[:, None], where] = torch.kron(B.contiguous(), A.contiguous())
        return dense

    def diagonal(self) -> Tensor:
        rows, columns = (side.diagonal() for side in self.factors)
        return self._to_columns((rows[:, :, None] * columns[:, None, :])[None])[:, 0]

    def trace(self) -> Tensor:
        rows, columns = (side.diagonal().sum(1) for side in self.factors)
        return (rows * columns).sum()

    def frobenius_norm(self) -> Tensor:
        return (self.rows.flatten(1).norm(dim=1) * self.columns.flatten(1).norm(dim=1)).norm()

    def _decomposed(self) -> EigenKronecker:
        return self.eigen

    def _of_inverses(self) -> Kronecker | None:
        """``kron(B^-1, A^-1)``; None where a factor may be singular, or where eigenvalues are known already."""
        if self._inverse is None and "eigen" not in vars(self):
            rows, columns = map(_invert, self.factors)
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
        rows, columns = self.factors
        b, a = (side.diagonal().mean(1) for side in self.factors)
        pi = torch.where((a > 0) & (b > 0), a / b, torch.ones_like(a)).sqrt()
        shifted = _shifted(rows, damping**0.5 / pi), _shifted(columns, damping**0.5 * pi)
        return Kronecker(self.space, self.arrangement, *shifted)

    def _details(self) -> list[str]:
        rows, columns = ("diagonal" if side.is_diagonal else f"{side.size} x {side.size}" for side in self.factors)
        return self._describe(B=rows, A=columns)


def _shifted(side: Side, shift: Tensor) -> Tensor:
    """The entries with a number (g,) of each group added to the diagonal."""
    new = side.with_entries(side.entries.clone())
    new.diagonal().add_(shift[:, None])
    return new.entries


def _eigendecompose(side: Side) -> tuple[Tensor, Tensor, Tensor | None]:
    """Eigenvalues (g, d), their rounding (g, d), and eigenvectors, None if the factor is diagonal."""
    if side.is_diagonal:
        return side.entries, torch.zeros_like(side.entries), None
    values, vectors = linalg.symmetric_eigh(side.entries)
    rounding = linalg.eigenvalue_rounding(values.abs().amax(1, keepdim=True)).expand(values.shape)
    return values, rounding, vectors


@linalg.full_precision()
def _invert(side: Side) -> Tensor | None:
    """The inverse of a factor; None if it may not be positive definite to working precision."""
    if side.is_diagonal:
        return 1 / side.entries if bool((side.entries > 0).all()) else None
    inverse, ok = linalg.try_spd_inverse(side.entries)
    # the product of the traces is no less than the condition number
    worst = linalg.eigenvalue_rounding(side.diagonal().sum(1)) * inverse.diagonal(dim1=1, dim2=2).sum(1)
    return (inverse.mT + inverse) / 2 if all(linalg.look([ok, (worst < 1).all()])) else None
