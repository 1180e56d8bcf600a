"""Per-sample gradients: gradients, norms and inner products of samples, and Jacobians.

In: a recorded pass and the backprops at its uses. Out: the terms of every parameter, sample by sample, exact. Where the
samples are is found by experiment at the first call and kept as a `Plan`; what no rule explains takes the general path
(`vmap`, or a loop). Both are verified against autograd.
"""

from curvature.gradients.batch import Batch, Loss, usable
from curvature.gradients.jacobian import Centred, Jacobian, residual_jacobian
from curvature.gradients.jvp import output_changes
from curvature.gradients.parameter_terms import explained, joint_bias
from curvature.gradients.per_sample import check_gradients, per_sample_gradients, per_sample_gram, per_sample_norms
from curvature.gradients.plans import PLANS, Plan, key_of, signature_of
from curvature.gradients.sample_axes import guesses, sample_layouts
from curvature.gradients.verification import alone_in, by_general_path, refuse_mixing, studied

__all__ = [
    "Batch",
    "Centred",
    "Jacobian",
    "Loss",
    "PLANS",
    "Plan",
    "alone_in",
    "by_general_path",
    "check_gradients",
    "explained",
    "guesses",
    "joint_bias",
    "key_of",
    "output_changes",
    "per_sample_gradients",
    "per_sample_gram",
    "per_sample_norms",
    "refuse_mixing",
    "residual_jacobian",
    "sample_layouts",
    "signature_of",
    "studied",
    "usable",
]
