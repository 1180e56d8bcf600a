"""A loss at the output of the model: per-sample losses, their Hessians, and the vectors to backpropagate.

In: a torch loss or a callable, the model's output and the targets. Out: the loss of each sample; the mass of each
sample in the batch; the Hessian at the output, or a root of it; injections (`exact`, `sampled`, `propagated`,
`isotropic`, `empirical`), which turn loss and output into vectors.
"""

from curvature.losses.additivity import is_known_to_add_up
from curvature.losses.injections import (
    SEED,
    Curved,
    Injection,
    Random,
    empirical,
    exact,
    isotropic,
    propagated,
    sampled,
)
from curvature.losses.per_sample import (
    GaussianNLLLoss,
    Loss,
    is_entrywise,
    join_heads,
    name_of,
    per_sample_losses,
    reduction_of,
    resolve,
    sample_masses,
)

__all__ = [
    "Curved", "GaussianNLLLoss", "Injection", "Loss", "Random", "SEED", "empirical", "exact", "is_entrywise",
    "is_known_to_add_up", "isotropic", "join_heads", "name_of", "per_sample_losses", "propagated", "reduction_of",
    "resolve", "sample_masses", "sampled",
]  # fmt: skip
