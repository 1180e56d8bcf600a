"""Estimates from matrix products alone: traces, diagonals, eigenvalues, log-determinants, spectral densities.

In: an operator. Out: the solution of a linear system, or an estimate, with its standard error if it is random.
"""

from curvature.estimators.estimate import Estimate
from curvature.estimators.spectra import lanczos_eigenpairs, lanczos_eigenvalues, lanczos_logdet, spectral_density
from curvature.estimators.traces import hutchinson_diagonal, hutchinson_trace, hutchpp_trace, xdiag, xtrace
from curvature.estimators.tridiagonal import Tridiagonal, lanczos
from curvature.operators import conjugate_gradient

__all__ = [
    "Estimate", "Tridiagonal", "conjugate_gradient", "hutchinson_diagonal", "hutchinson_trace", "hutchpp_trace",
    "lanczos", "lanczos_eigenpairs", "lanczos_eigenvalues", "lanczos_logdet", "spectral_density", "xdiag", "xtrace",
]  # fmt: skip
