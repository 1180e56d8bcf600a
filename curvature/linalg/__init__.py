"""Decompositions that do not give up, and the numerical tools beside them.

In: symmetric matrices, or batches of them. Out: Cholesky factors, inverses and eigenvalues, found on the first rung of
a ladder that works (the precision given, float64, the CPU, jitter); inverses by the largest eigenvalues; sketches of
matrices that are too large to store; the differences that rounding explains. Knows nothing of networks.
"""

from curvature.linalg.decompositions import (
    NotDefinite,
    attempted,
    cholesky,
    cholesky_root,
    damped_values,
    eigh,
    finite,
    full_precision,
    inverse,
    matmul,
    note,
    root_by_ladder,
    rounding_of,
    symmetric_eigh,
    symmetrised,
    watched,
)
from curvature.linalg.low_rank import LARGE, low_rank
from curvature.linalg.sketch import (
    RANK,
    SMALL,
    added,
    diagonal_of,
    gathered,
    is_sketch,
    mixed,
    scaled,
    sketched,
    slotted,
    spectrum,
)
from curvature.linalg.tolerances import noise, rounding

__all__ = [
    "LARGE",
    "NotDefinite",
    "RANK",
    "SMALL",
    "added",
    "attempted",
    "cholesky",
    "cholesky_root",
    "damped_values",
    "diagonal_of",
    "eigh",
    "finite",
    "full_precision",
    "gathered",
    "inverse",
    "is_sketch",
    "low_rank",
    "matmul",
    "mixed",
    "noise",
    "note",
    "root_by_ladder",
    "rounding",
    "rounding_of",
    "scaled",
    "sketched",
    "slotted",
    "spectrum",
    "symmetric_eigh",
    "symmetrised",
    "watched",
]
