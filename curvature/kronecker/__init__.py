"""Kronecker factors of one layer: how they are measured, rotated, inverted and added.

In: terms of a weight (`curvature.terms`). Out: second moments of activations and backprops (`Scheme`), squares of
per-sample gradients in the factors' eigenbasis (`Basis`), damped inverses of products (`factored_inverses`) and of sums
of products (`invert_kronecker_sum`). Nothing here averages over batches.
"""

from curvature.kronecker.eigenbasis import Basis
from curvature.kronecker.factors import Affine, Reading, Scheme, at_least_float32
from curvature.kronecker.inverses import (
    KroneckerInverse,
    carry_diagonal,
    eigen_inverses,
    eigenbases,
    factored_inverses,
    nonzero_or_one,
)
from curvature.kronecker.statistics import KroneckerStatistics, merge_products
from curvature.kronecker.subsampling import subsample_samples
from curvature.kronecker.sums import KroneckerSumInverse, Pair, invert_kronecker_sum

__all__ = [
    "Affine", "Basis", "KroneckerInverse", "KroneckerStatistics", "KroneckerSumInverse", "Pair", "Reading", "Scheme",
    "at_least_float32", "carry_diagonal", "eigen_inverses", "eigenbases", "factored_inverses",
    "invert_kronecker_sum", "merge_products", "nonzero_or_one", "subsample_samples",
]  # fmt: skip
