"""Per-sample gradients of one parameter, in the forms in which layers hand them over.

A layer that reads a weight at t places gives ``sum_t b[n,t,g,o] a[n,t,g,i]`` (`Outer`; `Convolved` and `ConvolvedBack`
before unfolding), an embedding gives rows to add at indices (`Rows`), a scale entry by entry `Entrywise`, everything
else is given outright (`Dense`). A parameter that is cut into rows before it is read has a `Part` for each.

Indices: n sample, t place, g group, i input, o output.
"""

from curvature.terms.convolved import Convolved, ConvolvedBack
from curvature.terms.part import Part, Term, at_least, moved
from curvature.terms.plain import Dense, Entrywise, Outer, Rows

__all__ = ["Convolved", "ConvolvedBack", "Dense", "Entrywise", "Outer", "Part", "Rows", "Term", "at_least", "moved"]
