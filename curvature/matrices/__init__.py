"""The public builders: Fisher, Gauss-Newton, Hessian, K-FAC.

In: a model, a loss and data. Out: an operator (`curvature.operators`). A builder goes over the data (`passes`), sends
an injection's vectors back from the output of every batch, and adds up the terms that result (`accumulators`), one
accumulator for each layer (`block_structure`). Matrix-free operators go over the data at every product (`products`).
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
)

__all__ = ["ekfac", "empirical_fisher", "fisher", "fisher_blocks", "fisher_diagonal", "gauss_newton", "hessian", "kfac"]
