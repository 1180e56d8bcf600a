"""Torch functions in terms of simpler ones.

`plain_form` gives a fused function (a recurrent kernel, weight normalization) as a composition of plain ones, so that
every read of a parameter can be recorded. `FORMULAS` gives norms, softmax, attention and others as formulas with
correct derivatives of any order, `RECURRENT` recurrent layers as loops; the context `ExactNorms` runs norms as theirs,
and `TwiceDifferentiable` bags of embeddings.
"""

from curvature.functional.bags import TwiceDifferentiable, chosen_rows, flat_bags
from curvature.functional.exact_norms import ExactNorms
from curvature.functional.formulas import FORMULAS, NORMS, MixesSamples
from curvature.functional.plain_forms import plain_form
from curvature.functional.recurrent import RECURRENT

__all__ = [
    "ExactNorms", "FORMULAS", "MixesSamples", "NORMS", "RECURRENT", "TwiceDifferentiable", "chosen_rows", "flat_bags",
    "plain_form",
]  # fmt: skip
