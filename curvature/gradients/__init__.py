"""Per-sample gradients: gradients, norms and inner products of samples, and Jacobians.

In: a recorded pass and the backprops at its uses. Out: the terms of every parameter, sample by sample, exact. Where the
samples are is found by experiment at the first call and kept as a `Plan`; what no rule explains takes the general path
(`vmap`, or a loop). Both are verified against autograd.
"""

from curvature.gradients.batch import Batch, Loss, validate_loss
from curvature.gradients.jacobian import CentredJacobian, Jacobian, residual_jacobian
from curvature.gradients.jvp import output_changes
from curvature.gradients.parameter_terms import joint_bias, terms_by_parameter
from curvature.gradients.per_sample import check_gradients, per_sample_gradients, per_sample_gram, per_sample_norms
from curvature.gradients.plans import PLANS, Plan, plan_key, tape_signature
from curvature.gradients.sample_axes import candidate_axes, sample_layouts
from curvature.gradients.verification import (
    general_path_terms,
    learn_and_verify,
    require_independent_samples,
    single_sample_reference,
)

__all__ = [
    "Batch",
    "CentredJacobian",
    "Jacobian",
    "Loss",
    "PLANS",
    "Plan",
    "single_sample_reference",
    "general_path_terms",
    "check_gradients",
    "terms_by_parameter",
    "candidate_axes",
    "joint_bias",
    "plan_key",
    "output_changes",
    "per_sample_gradients",
    "per_sample_gram",
    "per_sample_norms",
    "require_independent_samples",
    "residual_jacobian",
    "sample_layouts",
    "tape_signature",
    "learn_and_verify",
    "validate_loss",
]
