"""Torch functions written out in simpler ones.

In: a fused function of torch (a norm, a softmax, a recurrent kernel, weight normalization). Out: the same values from
plain functions, whose reads of parameters can be recorded and which have correct derivatives of any order.
"""

from curvature.functional.exact_norms import ExactNorms
from curvature.functional.formulas import FORMULAS, NORMS, MixesSamples
from curvature.functional.unfused import rewritten

__all__ = [
    "FORMULAS",
    "MixesSamples",
    "NORMS",
    "ExactNorms",
    "rewritten",
]
