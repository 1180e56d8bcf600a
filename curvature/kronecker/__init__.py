"""Kronecker factors of one layer: how they are measured, rotated, inverted and added.

In: terms of a weight (`curvature.terms`). Out: second moments of activations and backprops (`Scheme`), squares of
per-sample gradients in the factors' eigenbasis (`Basis`), damped inverses of products (`factored`) and of sums of
products (`kronecker_sum`). Nothing here averages over batches.
"""

from curvature.kronecker.eigenbasis import Basis
from curvature.kronecker.factors import Reading, Scheme, enough, matched, wide
from curvature.kronecker.inverses import Inverse, bases, carried, factored, in_eigenbases, not_zero
from curvature.kronecker.statistics import KroneckerStatistics
from curvature.kronecker.sums import KroneckerSum, Pair, kronecker_sum

__all__ = [
    "Basis",
    "Inverse",
    "KroneckerStatistics",
    "KroneckerSum",
    "Pair",
    "Reading",
    "Scheme",
    "bases",
    "carried",
    "enough",
    "factored",
    "in_eigenbases",
    "kronecker_sum",
    "matched",
    "not_zero",
    "wide",
]
