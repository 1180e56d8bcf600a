"""What products alone tell of a matrix: solutions, traces, diagonals, eigenvalues, log-determinants."""

from curvature.estimators.estimate import Estimate
from curvature.estimators.lanczos import Tridiagonal, lanczos
from curvature.estimators.solvers import conjugate_gradient
from curvature.estimators.spectra import lanczos_eigenpairs, lanczos_eigenvalues, lanczos_logdet, spectral_density
from curvature.estimators.traces import hutchinson_diagonal, hutchinson_trace, hutchpp_trace, xdiag, xtrace

__all__ = [
    "Estimate",
    "Tridiagonal",
    "conjugate_gradient",
    "hutchinson_diagonal",
    "hutchinson_trace",
    "hutchpp_trace",
    "lanczos",
    "lanczos_eigenpairs",
    "lanczos_eigenvalues",
    "lanczos_logdet",
    "spectral_density",
    "xdiag",
    "xtrace",
]
