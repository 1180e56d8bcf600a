"""A loss at the output of the model: per-sample losses, their Hessians, and the vectors to backpropagate.

In: a torch loss or a callable, the model's output and the targets. Out: the loss of each sample; the mass of each
sample in the batch, found where torch does not say it; the Hessian at the output, or a root of it; injections
(`exact`, `sampled`, `propagated`, `isotropic`, `empirical`), which turn loss and output into vectors.
"""

from curvature.losses.injections import (
    SEED,
    Curved,
    Injection,
    VectorPair,
    empirical,
    exact,
    isotropic,
    propagated,
    sampled,
)
from curvature.losses.labels import naming_labels, require_labels
from curvature.losses.likelihoods import ClassLabel, LabelDistribution, Prediction
from curvature.losses.masses import (
    LossVaries,
    NoWeightedSum,
    SampleMasses,
    count_alike,
    require_repeats,
    require_terms,
    require_weighted_sum,
    shares_of_parts,
)
from curvature.losses.table import (
    LOSS_FUNCTIONS,
    TORCH_LOSSES,
    Loss,
    is_entrywise,
    join_heads,
    name_of,
    per_sample_losses,
    reduction_of,
    resolve,
    settings_of,
)

__all__ = [
    "ClassLabel",
    "Curved", "Injection", "LOSS_FUNCTIONS", "LabelDistribution", "Loss", "LossVaries", "NoWeightedSum", "Prediction",
    "SEED", "SampleMasses", "TORCH_LOSSES", "VectorPair", "count_alike", "empirical", "exact",
    "is_entrywise", "isotropic", "join_heads", "name_of", "naming_labels", "per_sample_losses", "propagated",
    "reduction_of", "require_labels", "require_repeats", "require_terms", "require_weighted_sum", "resolve",
    "sampled", "settings_of", "shares_of_parts",
]  # fmt: skip
