"""The public builders: Fisher, Gauss-Newton, Hessian, K-FAC.

In: a model, a loss and data. Out: an operator (`curvature.operators`). A builder goes over the data (`passes`), sends
an injection's vectors back from the output of every batch, and adds up the terms that result, in one structure for each
layer (`blocks`). Matrix-free operators go over the data at every product (`products`).
`DataSource` and `RecordedBatch` are that pass, for what else needs the terms of ``J^T v``.
"""

from curvature.matrices.builders import (
    ekfac,
    empirical_fisher,
    fisher,
    fisher_blocks,
    fisher_diagonal,
    gauss_newton,
    hessian,
    kfac,
    per_sample_fisher_diagonals,
    per_sample_hessian_diagonals,
)
from curvature.matrices.jacobians import per_sample_jacobians
from curvature.matrices.matrix_free import kept
from curvature.matrices.passes import DataSource, RecordedBatch

__all__ = [
    "DataSource", "RecordedBatch", "ekfac", "empirical_fisher", "fisher",
    "fisher_blocks", "fisher_diagonal", "gauss_newton", "hessian", "kept", "kfac", "per_sample_fisher_diagonals",
    "per_sample_hessian_diagonals", "per_sample_jacobians",
]  # fmt: skip
