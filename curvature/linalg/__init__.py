"""Decompositions that do not give up, and the numerical tools beside them.

In: symmetric matrices, or batches of them. Out: Cholesky factors, inverses and eigenvalues, found on the first rung of
a ladder that works (the precision given, float64, the CPU, jitter); inverses by the largest eigenvalues; sketches of
matrices that are too large to store; the differences that rounding explains. Knows nothing of networks.
"""

from curvature.linalg.decompositions import (
    NotDefinite,
    cholesky,
    cholesky_with_jitter,
    count_recovery,
    damp_eigenvalues,
    eigenvalue_rounding,
    full_precision,
    matmul,
    psd_eigh,
    recovery_counts,
    require_finite,
    spd_inverse,
    symmetric_eigh,
    symmetrize,
    try_cholesky,
    try_decompose,
)
from curvature.linalg.low_rank import LOW_RANK_MIN_SIZE, low_rank_inverse
from curvature.linalg.sketch import (
    MAX_DENSE_SIDE,
    SKETCH_RANK,
    add_moments,
    add_moments_,
    average_moments,
    fill_slot,
    is_sketch,
    moment_diagonal,
    scale_moment,
    sketch_rows,
    sketch_spectrum,
    sum_slots,
)
from curvature.linalg.tolerances import noise_floor, rounding_tolerance

__all__ = [
    "LOW_RANK_MIN_SIZE",
    "NotDefinite",
    "SKETCH_RANK",
    "MAX_DENSE_SIDE",
    "add_moments",
    "add_moments_",
    "try_decompose",
    "cholesky",
    "try_cholesky",
    "damp_eigenvalues",
    "moment_diagonal",
    "psd_eigh",
    "require_finite",
    "full_precision",
    "sum_slots",
    "spd_inverse",
    "is_sketch",
    "low_rank_inverse",
    "matmul",
    "average_moments",
    "noise_floor",
    "count_recovery",
    "cholesky_with_jitter",
    "rounding_tolerance",
    "eigenvalue_rounding",
    "scale_moment",
    "sketch_rows",
    "fill_slot",
    "sketch_spectrum",
    "symmetric_eigh",
    "symmetrize",
    "recovery_counts",
]
