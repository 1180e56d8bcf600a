"""The public builders: Fisher, Gauss-Newton, Hessian, K-FAC.

In: a model, a loss and data. Out: an operator (`curvature.operators`). A builder goes over the data, sends an
injection's vectors back from every batch, and adds up what they make of each layer.
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

__all__ = [
    "ekfac",
    "empirical_fisher",
    "fisher",
    "fisher_blocks",
    "fisher_diagonal",
    "gauss_newton",
    "hessian",
    "kfac",
]
