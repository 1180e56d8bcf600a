"""Torch functions in terms of simpler ones.

`plain_form` gives a fused function (a recurrent kernel, weight normalization) as a composition of plain ones, so that
every read of a parameter can be recorded. `FORMULAS` gives norms, softmax, attention and others as formulas with
correct derivatives of any order, `RECURRENT` recurrent layers as loops; the context `ExactNorms` runs norms as theirs,
and `TwiceDifferentiable` bags of embeddings, too; in `ContiguousNorms` batch norms of one sample have right gradients.
`own_functions` names the functions in autograd's graph that torch does not know; `batched_vjp` sends vectors back.
"""

from curvature.functional.contexts import ContiguousNorms, ExactNorms, TwiceDifferentiable
from curvature.functional.formulas import FORMULAS, NORMS, MixesSamples, chosen_rows, flat_bags, weights_in_bags
from curvature.functional.graph import (
    batched_vjp,
    graph_nodes,
    is_of_the_user,
    own_functions,
    require_second_derivatives,
)
from curvature.functional.plain_forms import PLAIN_FORMS, plain_form, traceable_body
from curvature.functional.recurrent import RECURRENT

__all__ = [
    "ContiguousNorms", "ExactNorms", "FORMULAS", "MixesSamples", "NORMS", "PLAIN_FORMS",
    "RECURRENT", "TwiceDifferentiable", "batched_vjp", "chosen_rows", "flat_bags", "graph_nodes", "is_of_the_user",
    "own_functions", "plain_form", "require_second_derivatives", "traceable_body", "weights_in_bags",
]  # fmt: skip
