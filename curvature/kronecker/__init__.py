"""Kronecker factors of one layer: how they are measured, stored, rotated, inverted and added.

In: terms of a weight (`curvature.terms`). Out: second moments of activations and backprops (`Scheme`) as sides of
products, a type for each form of storage (`Side`); squares of per-sample gradients in the factors' eigenbasis
(`Basis`); damped inverses of products (`factored_inverses`), made of two matrices to apply (`Matrix`), and of sums of
products (`invert_kronecker_sums`). Nothing here averages over batches.
"""

from curvature.kronecker.applied import (
    EigenInverse,
    KroneckerInverse,
    LowRankMatrix,
    Matrix,
    inverse_of_state,
    two_sided,
)
from curvature.kronecker.eigenbasis import Basis
from curvature.kronecker.factors import Affine, Reading, Scheme, by_length, count_rows, subsample_samples
from curvature.kronecker.inverses import Pair, eigen_inverses, eigenbases, factored_inverses, invert_kronecker_sums
from curvature.kronecker.sides import (
    DenseSide,
    DiagonalSide,
    Product,
    Side,
    UncorrelatedSide,
    average_all,
    merge_products,
    nonzero_or_one,
    scale_all,
)

__all__ = [
    "Affine", "Basis", "DenseSide", "DiagonalSide", "EigenInverse", "KroneckerInverse", "LowRankMatrix",
    "Matrix", "Pair", "Product", "Reading", "Scheme", "Side", "UncorrelatedSide", "average_all", "by_length",
    "count_rows", "eigen_inverses", "eigenbases", "factored_inverses", "inverse_of_state", "invert_kronecker_sums",
    "merge_products", "nonzero_or_one", "scale_all", "subsample_samples", "two_sided",
]  # fmt: skip
