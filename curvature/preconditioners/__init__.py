"""Running curvature for optimizers, and what solves with it.

In: recorded passes of a training loop. Out: ``(M + damping I)^-1 g`` for gradients g. One block for each layer
(`BlockDiagonalCurvature`), or one for all parameters (`FullCurvature`); least squares with a Jacobian for losses
``1/2 ||r||^2``.
"""

from curvature.preconditioners.block import (
    BatchFacts,
    Block,
    CurvatureStatistics,
    SquaredChange,
    by_class,
    in_parts,
    invert,
)
from curvature.preconditioners.block_diagonal import BlockDiagonalCurvature, CurvatureStore
from curvature.preconditioners.full_curvature import FullCurvature
from curvature.preconditioners.kronecker import KroneckerBlock
from curvature.preconditioners.least_squares import LeastSquares
from curvature.preconditioners.residual_blocks import ResidualBlock, residual_blocks, residual_inverses

__all__ = [
    "BatchFacts", "Block", "BlockDiagonalCurvature", "CurvatureStatistics", "CurvatureStore", "FullCurvature",
    "KroneckerBlock", "LeastSquares", "ResidualBlock", "SquaredChange", "by_class", "in_parts", "invert",
    "residual_blocks", "residual_inverses",
]  # fmt: skip
