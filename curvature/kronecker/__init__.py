"""Kronecker factors of one layer: how they are measured, rotated, inverted and added.

In: terms of a weight (`curvature.terms`). Out: second moments of activations and backprops (`Scheme`), squares of
per-sample gradients in the factors' eigenbasis (`Basis`), damped inverses of products (`factored_inverses`) and of sums
of products (`invert_kronecker_sum`); symmetric sides in half the memory (`pack`). Nothing here averages over batches.
"""

from curvature.kronecker.diagonal_blocks import cuts_of
from curvature.kronecker.eigenbasis import Basis
from curvature.kronecker.factors import Affine, Reading, Scheme, at_least_float32
from curvature.kronecker.inverses import (
    KroneckerInverse,
    carry_diagonal,
    eigen_inverses,
    eigenbases,
    factored_inverses,
    inverses_in_blocks,
    nonzero_or_one,
)
from curvature.kronecker.packing import Packed, Side, as_packed, diagonal_of, entries_of, pack, whole
from curvature.kronecker.statistics import KroneckerStatistics, merge_products
from curvature.kronecker.subsampling import subsample_samples
from curvature.kronecker.sums import KroneckerSumInverse, Pair, invert_kronecker_sum, invert_kronecker_sums
from curvature.kronecker.waiting import kept_activations

__all__ = [
    "Affine", "Basis", "KroneckerInverse", "KroneckerStatistics", "KroneckerSumInverse", "Packed", "Pair", "Reading",
    "Scheme", "Side", "as_packed", "at_least_float32", "carry_diagonal", "cuts_of", "diagonal_of",
    "eigen_inverses", "eigenbases", "entries_of", "factored_inverses", "inverses_in_blocks",
    "invert_kronecker_sum", "invert_kronecker_sums", "kept_activations", "merge_products",
    "nonzero_or_one", "pack", "subsample_samples", "whole",
]  # fmt: skip
