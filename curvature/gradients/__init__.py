"""Per-sample gradients: gradients, norms and inner products of samples, and Jacobians.

In: a model, a loss and a batch, or values with their graph. Out: for every parameter the terms (`curvature.terms`) of
each sample's gradient, exact. `per_sample` holds the public functions. They record a forward pass and hand the tape to
`plans`, which finds the axis of samples at every use by experiment (`sample_axes`), makes terms of the backprops
(`parameter_terms`), checks them against autograd (`verification`), and remembers what it learnt. What no rule explains
takes the `general_path`: vmap, or a loop over samples.
"""

from curvature.gradients.batch import Batch, validate_loss
from curvature.gradients.general_path import general_path_terms
from curvature.gradients.jacobian import CentredJacobian, Jacobian, residual_jacobian
from curvature.gradients.jacobian_products import batched_vjp, output_changes
from curvature.gradients.parameter_terms import (
    Terms,
    computed_weights,
    joint_bias,
    terms_by_parameter,
    weighted_gradients,
)
from curvature.gradients.per_sample import check_gradients, per_sample_gradients, per_sample_gram, per_sample_norms
from curvature.gradients.plans import Plan, find_plan, learn_and_verify, plan_key, record
from curvature.gradients.sample_axes import candidate_axes, sample_layouts
from curvature.gradients.verification import require_independent_samples, single_sample_reference

__all__ = [
    "Batch", "CentredJacobian", "Jacobian", "Plan", "Terms", "batched_vjp", "candidate_axes", "check_gradients",
    "computed_weights", "weighted_gradients",
    "find_plan", "general_path_terms", "joint_bias", "learn_and_verify", "output_changes", "per_sample_gradients",
    "per_sample_gram", "per_sample_norms", "plan_key", "record", "require_independent_samples", "residual_jacobian",
    "sample_layouts", "single_sample_reference", "terms_by_parameter", "validate_loss",
]  # fmt: skip
