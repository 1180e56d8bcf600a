"""Per-sample gradients of one parameter, in the forms in which layers hand them over.

A layer that reads a weight at t places gives ``sum_t b[n,t,g,o] a[n,t,g,i]`` (`Outer`; `Convolved` and `ConvolvedBack`
before unfolding), an embedding gives rows to add at indices (`Rows`), a scale entry by entry `Entrywise`, everything
else is given outright (`Dense`). A parameter that is cut into rows before it is read has a `Part` for each.

Indices: n sample, t place, g group, i input, o output.
"""

from curvature.terms import contractions, squared_gradients
from curvature.terms.affine_layout import Arrangement
from curvature.terms.basic import Dense, Entrywise, Outer, Rows
from curvature.terms.contractions import gradients, merged, pieces, sum_of, unfolded
from curvature.terms.convolution import Convolved, ConvolvedBack
from curvature.terms.row_slices import Part, Term, at_least, moved
from curvature.terms.squared_gradients import Vectors, products, squared

__all__ = [
    "Arrangement",
    "Convolved",
    "ConvolvedBack",
    "Dense",
    "Entrywise",
    "Outer",
    "Part",
    "Rows",
    "Term",
    "Vectors",
    "at_least",
    "contractions",
    "gradients",
    "merged",
    "moved",
    "pieces",
    "products",
    "squared",
    "squared_gradients",
    "sum_of",
    "unfolded",
]
