"""Per-sample gradients: gradients, norms and inner products of samples, and Jacobians.

In: a model, a loss and a batch, or values with their graph. Out: for every parameter the terms (`curvature.terms`) of
each sample's gradient, exact. `per_sample` holds the public functions and the five steps behind them: record a forward
pass, take each sample's own loss, find or learn a plan (`plans`), make terms of the backprops
(`parameter_terms`), contract them. What no rule explains takes the `general_path`: vmap, or a loop over samples.
"""

from curvature.gradients.batch import Batch, OtherShapeAlone, either_form
from curvature.gradients.data import (
    kind_of,
    number_of_batches,
    pairs,
    require_order,
    require_pairs,
)
from curvature.gradients.general_path import RefuseNewData, general_path_terms, over_samples, tried_by_vmap
from curvature.gradients.jacobian import CentredJacobian, Jacobian, residual_jacobian
from curvature.gradients.jacobian_products import (
    Linearised,
    are_adjoint,
    batched_vjp,
    changes_by_backward_passes,
    complete_changes,
    output_changes,
)
from curvature.gradients.meeting_samples import UNSTEADY, SamplesMeet, where_samples_meet
from curvature.gradients.parameter_terms import (
    candidate_axes,
    computed_weights,
    layers_of,
    terms_by_parameter,
    weighted_gradients,
)
from curvature.gradients.per_sample import (
    check_gradients,
    per_sample_gradients,
    per_sample_gram,
    per_sample_norms,
    per_sample_norms_by_parameter,
    sample_terms,
)
from curvature.gradients.plans import (
    Plan,
    certain_layouts,
    differences,
    kept_plan,
    learn,
    plan_beside_copy,
    record,
    sample_layouts,
    single_sample_reference,
)
from curvature.gradients.sums import NoiseScale, clipped_gradient, gradient_noise_scale

__all__ = [
    "Batch", "CentredJacobian", "Jacobian", "Linearised", "NoiseScale", "OtherShapeAlone", "Plan", "RefuseNewData",
    "SamplesMeet", "UNSTEADY", "are_adjoint", "batched_vjp", "candidate_axes", "certain_layouts",
    "changes_by_backward_passes", "check_gradients", "clipped_gradient", "complete_changes", "computed_weights",
    "differences", "either_form", "general_path_terms", "gradient_noise_scale", "kept_plan", "kind_of", "layers_of",
    "learn", "number_of_batches", "output_changes", "over_samples", "pairs", "per_sample_gradients",
    "per_sample_gram", "per_sample_norms", "per_sample_norms_by_parameter", "plan_beside_copy", "record",
    "require_order", "require_pairs", "residual_jacobian", "sample_layouts", "sample_terms",
    "single_sample_reference", "terms_by_parameter", "tried_by_vmap", "weighted_gradients", "where_samples_meet",
]  # fmt: skip
