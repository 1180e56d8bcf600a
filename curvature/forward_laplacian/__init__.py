"""Laplacians in one forward pass (arXiv:2307.08214).

`laplacian` runs the model on a `Jet` in place of x: the value, its gradient by every input, and one weighted sum of
second derivatives. This is Taylor mode of second order with the second derivatives summed on the way
(arXiv:2505.13644). The mode `Taylor` sends every torch function of jets to its rule in `RULES`: through ``z = f(h)``
the gradients h_i become ``f' h_i``, and ``L = sum_ij C_ij d_i d_j h`` becomes ``f' L + f'' sum_ij C_ij h_i h_j``.
"""

from curvature.forward_laplacian.jet import Jet, NoRule, QuadraticForm, Recorded
from curvature.forward_laplacian.laplacian import laplacian
from curvature.forward_laplacian.rules import RULES, Taylor

__all__ = ["QuadraticForm", "Jet", "NoRule", "RULES", "Recorded", "Taylor", "laplacian"]
