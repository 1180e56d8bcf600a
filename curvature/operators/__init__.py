"""The algebra of symmetric matrices over a model's parameters.

In: blocks and factors, or a product with vectors. Out: operators with `@`, `solve`, `trace`, `diagonal`, `logdet`,
`sample`, `to_dense`, ... `Operator` has dense defaults, each structure faster overrides. As quadratic models of
losses they are penalties (`quadratic_penalty`), whose sums have a minimum (`merge`).
"""

from curvature.operators.base import Dense, Operator, Scaled, Sum
from curvature.operators.block_diagonal import BlockDiagonal, Diagonal, RowBlocks
from curvature.operators.conjugate_gradient import conjugate_gradient, truncated_conjugate_gradient
from curvature.operators.costs import DENSE_LIMIT, require_held_size
from curvature.operators.export import restore
from curvature.operators.kronecker import EigenKronecker, Kronecker, two_sided
from curvature.operators.loading import load
from curvature.operators.matrix_free import MatrixFree
from curvature.operators.quadratic import Parameters, flat_parameters, merge, quadratic_penalty
from curvature.operators.sample_space import SampleSpace
from curvature.operators.space import Space

__all__ = [
    "BlockDiagonal", "DENSE_LIMIT", "Dense", "Diagonal", "EigenKronecker", "Kronecker", "MatrixFree", "Operator",
    "Parameters", "RowBlocks", "SampleSpace", "Scaled", "Space", "Sum", "conjugate_gradient", "flat_parameters", "load",
    "merge", "quadratic_penalty", "require_held_size", "restore", "truncated_conjugate_gradient", "two_sided",
]  # fmt: skip
