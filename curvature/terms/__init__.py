"""Per-sample gradients of one parameter, in the form that each layer gives them.

In: a layer's activations and backprops. Out: terms, which sum to the per-sample gradients. A layer that reads a weight
at t places gives ``sum_t b[n,t,g,o] a[n,t,g,i]`` (`OuterProduct`; before unfolding `Convolution` and
`TransposedConvolution`), an embedding gives rows to add at indices (`IndexedRows`), a scale an `ElementwiseProduct`,
everything else the gradients themselves (`DenseGradients`). A parameter whose row ranges are read separately has one
`RowSlice` for each. `contractions` turns terms into gradients, norms, Gram matrices and linear maps,
`squared_gradients` into diagonals.

Indices: n sample, t place, g group, i input, o output.
"""

from curvature.terms import contractions, squared_gradients
from curvature.terms.basic import (
    AffineLayout,
    DenseGradients,
    ElementwiseProduct,
    IndexedRows,
    OuterProduct,
    without_bias,
)
from curvature.terms.contractions import (
    RowSlice,
    Term,
    TermsByVector,
    chunks,
    gradients,
    joined,
    merge_places,
    pieces,
    project_sides,
    promote,
    row_ranges,
    sum_in_place,
    to_device,
    unfold,
)
from curvature.terms.convolution import Convolution, TransposedConvolution
from curvature.terms.squared_gradients import sum_of_products, sum_of_squares

__all__ = [
    "AffineLayout", "Convolution", "DenseGradients", "ElementwiseProduct", "IndexedRows", "OuterProduct", "RowSlice",
    "Term", "TermsByVector", "TransposedConvolution", "chunks", "contractions", "gradients", "joined",
    "merge_places", "pieces", "project_sides", "promote", "row_ranges",
    "squared_gradients", "sum_in_place", "sum_of_products", "sum_of_squares", "to_device", "unfold", "without_bias",
]  # fmt: skip
