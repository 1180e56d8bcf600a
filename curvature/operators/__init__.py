"""The algebra of symmetric matrices over a model's parameters.

In: blocks and factors, or a product with vectors. Out: operators with `@`, `solve`, `trace`, `diagonal`, `logdet`,
`sample`, `to_dense`, ... `Operator` has dense defaults, each structure faster overrides. What products alone tell of a
matrix is estimated (`estimators`), with standard errors. As quadratic models of losses operators are
penalties (`quadratic_penalty`), whose sums have a minimum (`merge`).
"""

from curvature.operators.base import Dense, Operator, Scaled, Sum
from curvature.operators.block_diagonal import BlockDiagonal, Curvature, Diagonal, as_operator
from curvature.operators.conjugate_gradient import conjugate_gradient, truncated_conjugate_gradient
from curvature.operators.estimators import (
    Estimate,
    Tridiagonal,
    lanczos,
    lanczos_eigenpairs,
    lanczos_eigenvalues,
    lanczos_logdet,
    spectral_density,
    xdiag,
    xtrace,
)
from curvature.operators.kronecker import EigenKronecker, Kronecker
from curvature.operators.matrix_free import MatrixFree, SampleSpace
from curvature.operators.quadratic import Parameters, flat_parameters, merge, quadratic_penalty
from curvature.operators.space import DENSE_LIMIT, Named, Space, name_of_rows, rows_of_name
from curvature.operators.stored import blocks_of, in_memory, load

__all__ = [
    "BlockDiagonal", "Curvature", "DENSE_LIMIT", "Dense", "Diagonal", "EigenKronecker", "Estimate", "Kronecker",
    "MatrixFree", "Named", "Operator", "Parameters", "SampleSpace", "Scaled", "Space", "Sum",
    "Tridiagonal", "as_operator", "blocks_of", "conjugate_gradient", "flat_parameters", "in_memory", "lanczos",
    "lanczos_eigenpairs", "lanczos_eigenvalues", "lanczos_logdet", "load", "merge", "name_of_rows",
    "quadratic_penalty", "rows_of_name", "spectral_density", "truncated_conjugate_gradient", "xdiag", "xtrace",
]  # fmt: skip
