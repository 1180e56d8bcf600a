"""Linear algebra: decompositions that retry, low-rank inverses, tolerances.

In: symmetric matrices, or batches of them. Out: Cholesky factors, inverses and eigenvalues, from the first attempt that
works (as given, in float64, on the CPU, with jitter); damped inverses from the largest eigenvalues; tolerances for
rounding errors. Nothing here knows about networks.
"""

from curvature.linalg.decompositions import (
    RECOVERIES,
    NotDefinite,
    careful_spd_inverse,
    cholesky,
    cholesky_with_jitter,
    count_recovery,
    damp_eigenvalues,
    eigenvalue_rounding,
    eigenvalues_of,
    largest_eigenpairs,
    psd_eigh,
    psd_eighs,
    qr,
    recovery_counts,
    require_finite,
    symmetric_eigh,
    symmetric_eighs,
    symmetrize,
    try_cholesky,
    try_decompose,
    try_spd_inverse,
)
from curvature.linalg.devices import (
    PRODUCTS,
    ByDevice,
    absolute_sums,
    by_device,
    cat,
    copy_to_host_async,
    full_precision,
    look,
    matmul,
    noise_floor,
    own_precision,
    product_rounding,
    read,
    rounding_tolerance,
    stack,
    to_device,
    to_host,
    widen,
    widest,
    without_autocast,
)
from curvature.linalg.low_rank import LOW_RANK_MIN_SIZE, low_rank_inverses

__all__ = [
    "ByDevice", "LOW_RANK_MIN_SIZE", "NotDefinite", "PRODUCTS", "RECOVERIES", "absolute_sums", "by_device",
    "careful_spd_inverse", "cat", "cholesky", "cholesky_with_jitter", "copy_to_host_async", "count_recovery",
    "damp_eigenvalues", "eigenvalue_rounding", "eigenvalues_of", "full_precision", "largest_eigenpairs", "look",
    "low_rank_inverses", "matmul", "noise_floor", "own_precision", "product_rounding", "psd_eigh", "psd_eighs",
    "qr", "read", "recovery_counts", "require_finite", "rounding_tolerance", "stack", "symmetric_eigh",
    "symmetric_eighs", "symmetrize", "to_device", "to_host", "try_cholesky", "try_decompose", "try_spd_inverse",
    "widen", "widest", "without_autocast",
]  # fmt: skip
