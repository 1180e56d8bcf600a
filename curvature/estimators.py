"""Estimates from matrix products alone: the names of `curvature.operators` that take an operator and random vectors."""

from curvature.operators import (
    Estimate,
    Tridiagonal,
    conjugate_gradient,
    lanczos,
    lanczos_eigenpairs,
    lanczos_eigenvalues,
    lanczos_logdet,
    spectral_density,
    xdiag,
    xtrace,
)

__all__ = [
    "Estimate", "Tridiagonal", "conjugate_gradient",
    "lanczos", "lanczos_eigenpairs", "lanczos_eigenvalues", "lanczos_logdet", "spectral_density", "xdiag", "xtrace",
]  # fmt: skip
