"""The algebra of symmetric matrices over parameters."""

from curvature.operators.base import DENSE_LIMIT, Dense, Operator, Scaled, Sum
from curvature.operators.files import load
from curvature.operators.space import Space
from curvature.operators.structures import BlockDiagonal, Diagonal, RowBlocks

__all__ = [
    "DENSE_LIMIT",
    "BlockDiagonal",
    "Dense",
    "Diagonal",
    "Operator",
    "RowBlocks",
    "Scaled",
    "Space",
    "Sum",
    "load",
]
