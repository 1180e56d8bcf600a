"""What stands for the curvature of a block of parameters: one class for builders, which sum it over data, and for
optimizers, which average it over steps.

In: terms of ``J^T v`` (`Chunk`). Out: a `Structure`, a value that is added up, scaled and averaged, gives its matrix as
an operator, and its damped inverse. `Choices` are those that a caller has made for some layers, by name or by class.
"""

from curvature.structures.choices import Choice, Choices
from curvature.structures.dense import DenseStructure
from curvature.structures.diagonal import DiagonalStructure
from curvature.structures.eigen import EigenStructure
from curvature.structures.kronecker import KroneckerStructure, factors_of
from curvature.structures.structure import (
    FORMS,
    Accumulator,
    Chunk,
    Structure,
    Vectors,
    average_structures,
    averaged_sparsity,
    rows_of,
    scale_structures,
    shrinkage,
)

__all__ = [
    "FORMS", "Accumulator", "Choice", "Choices", "Chunk", "DenseStructure", "DiagonalStructure", "EigenStructure",
    "KroneckerStructure", "Structure", "Vectors", "average_structures", "averaged_sparsity", "factors_of", "rows_of",
    "scale_structures", "shrinkage",
]  # fmt: skip
