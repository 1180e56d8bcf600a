"""Forward propagation of values, first derivatives and one sum of second derivatives through torch functions.

A forward Laplacian (arXiv:2307.08214), which is Taylor mode of second order with the second derivatives added up on
the way (arXiv:2505.13644): through ``z = f(h)`` the gradients h_i go as ``f' h_i`` and the sum
``L = sum_ij C_ij d_i d_j h`` as ``f' L + f'' sum_ij C_ij h_i h_j``. One rule for each kind of function; the table is
`RULES`.
"""

from curvature.forward_laplacian import linear, pointwise
from curvature.forward_laplacian.jet import RULES, Form, Jet, NoRule, Recorded
from curvature.forward_laplacian.laplacian import laplacian
from curvature.forward_laplacian.mode import Taylor

__all__ = [
    "Form",
    "Jet",
    "NoRule",
    "RULES",
    "Recorded",
    "Taylor",
    "laplacian",
    "linear",
    "pointwise",
]
