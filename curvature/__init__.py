"""Second-order information for PyTorch: activations and backprops of every layer, and what follows from them."""

from curvature.block import Block
from curvature.capture import Listener, capture
from curvature.compiled import Eagerly, unwrapped
from curvature.derivatives import Jacobian, residual_jacobian
from curvature.estimators import (
    conjugate_gradient,
    hutchinson_diagonal,
    hutchinson_trace,
    hutchpp_trace,
    lanczos_eigenvalues,
    lanczos_logdet,
    spectral_density,
    xdiag,
    xtrace,
)
from curvature.factors import Blocks, RunningFactors
from curvature.gradients import check_gradients, per_sample_gradients, per_sample_gram, per_sample_norms
from curvature.injection import Injection, empirical, exact, isotropic, propagated, sampled
from curvature.jacobian import output_changes
from curvature.kronecker import EigenKronecker, Kronecker
from curvature.laplacian import laplacian
from curvature.layers import Layout
from curvature.leastsquares import LeastSquares
from curvature.linalg import full_precision, symmetric_eigh, watched
from curvature.matrices import (
    ekfac,
    empirical_fisher,
    fisher,
    fisher_blocks,
    fisher_diagonal,
    gauss_newton,
    hessian,
    kfac,
)
from curvature.matrixfree import MatrixFree
from curvature.operators import BlockDiagonal, Dense, Diagonal, Operator, Space, load
from curvature.prepared import invert
from curvature.residualblocks import ResidualBlock, residual_blocks
from curvature.structure import sample_layouts
from curvature.tape import Tape, Use, is_sharded
from curvature.wholecurvature import WholeCurvature
from curvature.written_out import WrittenOut

__all__ = [
    "Block",
    "BlockDiagonal",
    "Blocks",
    "Dense",
    "Diagonal",
    "Eagerly",
    "EigenKronecker",
    "Injection",
    "Jacobian",
    "Kronecker",
    "Layout",
    "LeastSquares",
    "Listener",
    "MatrixFree",
    "Operator",
    "ResidualBlock",
    "RunningFactors",
    "Space",
    "Tape",
    "Use",
    "WholeCurvature",
    "WrittenOut",
    "capture",
    "check_gradients",
    "conjugate_gradient",
    "ekfac",
    "empirical",
    "empirical_fisher",
    "exact",
    "fisher",
    "fisher_blocks",
    "fisher_diagonal",
    "full_precision",
    "gauss_newton",
    "hessian",
    "hutchinson_diagonal",
    "hutchinson_trace",
    "hutchpp_trace",
    "invert",
    "is_sharded",
    "isotropic",
    "kfac",
    "lanczos_eigenvalues",
    "lanczos_logdet",
    "laplacian",
    "load",
    "output_changes",
    "per_sample_gradients",
    "per_sample_gram",
    "per_sample_norms",
    "propagated",
    "residual_blocks",
    "residual_jacobian",
    "sample_layouts",
    "sampled",
    "spectral_density",
    "symmetric_eigh",
    "unwrapped",
    "watched",
    "xdiag",
    "xtrace",
]
