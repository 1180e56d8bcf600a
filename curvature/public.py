"""The public names of `curvature`, which imports them when one is first used."""

from curvature.forward_laplacian import laplacian
from curvature.gradients import (
    Jacobian,
    NoiseScale,
    check_gradients,
    clipped_gradient,
    gradient_noise_scale,
    output_changes,
    per_sample_gradients,
    per_sample_gram,
    per_sample_norms,
    per_sample_norms_by_parameter,
    residual_jacobian,
    sample_layouts,
)
from curvature.layers import Layout
from curvature.losses import Injection, empirical, exact, isotropic, propagated, sampled
from curvature.matrices import (
    ekfac,
    empirical_fisher,
    fisher,
    fisher_blocks,
    fisher_diagonal,
    gauss_newton,
    hessian,
    kept,
    kfac,
    per_sample_fisher_diagonals,
    per_sample_hessian_diagonals,
    per_sample_jacobians,
)
from curvature.operators import (
    BlockDiagonal,
    Dense,
    Diagonal,
    EigenKronecker,
    Kronecker,
    MatrixFree,
    Operator,
    SampleSpace,
    Space,
    conjugate_gradient,
    lanczos_eigenvalues,
    lanczos_logdet,
    load,
    merge,
    quadratic_penalty,
    spectral_density,
    xdiag,
    xtrace,
)
from curvature.preconditioners import LeastSquares
from curvature.recording import FunctionModel, Tape, Use, capture
from curvature.structures import Structure
from curvature.uses import (
    KroneckerProjection,
    LaplacePosterior,
    NormalProjection,
    SignProjection,
    influence,
    influence_by_parameter,
    influence_by_place,
    laplace,
    per_sample_projections,
    prune,
    quantize,
    saliencies,
    store_projections,
)

__all__ = [
    "BlockDiagonal", "Dense", "Diagonal", "EigenKronecker", "FunctionModel", "Injection", "Jacobian",
    "Kronecker", "KroneckerProjection", "LaplacePosterior", "Layout", "LeastSquares", "MatrixFree",
    "NoiseScale", "NormalProjection", "Operator", "SampleSpace", "SignProjection", "Space", "Structure", "Tape",
    "Use", "capture", "check_gradients", "clipped_gradient", "conjugate_gradient", "ekfac", "empirical",
    "empirical_fisher", "exact", "fisher", "fisher_blocks", "fisher_diagonal", "gauss_newton",
    "gradient_noise_scale", "hessian", "influence",
    "influence_by_parameter", "influence_by_place", "isotropic", "kept", "kfac", "lanczos_eigenvalues",
    "lanczos_logdet", "laplace", "laplacian", "load", "merge", "output_changes", "per_sample_fisher_diagonals",
    "per_sample_gradients", "per_sample_gram", "per_sample_hessian_diagonals", "per_sample_jacobians",
    "per_sample_norms", "per_sample_norms_by_parameter", "per_sample_projections", "propagated", "prune",
    "quadratic_penalty", "quantize", "residual_jacobian", "saliencies", "sample_layouts", "sampled",
    "spectral_density", "store_projections", "xdiag", "xtrace",
]  # fmt: skip
