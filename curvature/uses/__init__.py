"""What people do with curvature: posteriors, attribution, projections, compression.

In: a trained model with its loss and data, and matrices of curvature (`curvature.operators`). Out: a Laplace posterior
(`posteriors`), the influence of training samples (`attribution`), random projections of their gradients
(`projections`), networks with fewer or coarser weights (`compression`). None of the four needs another.
"""

from curvature.uses.attribution import influence, influence_by_parameter, influence_by_place
from curvature.uses.compression import prune, quantize, saliencies
from curvature.uses.posteriors.builder import laplace
from curvature.uses.posteriors.posterior import LaplacePosterior
from curvature.uses.projections import (
    KroneckerProjection,
    NormalProjection,
    SignProjection,
    per_sample_projections,
    store_projections,
)

__all__ = [
    "KroneckerProjection", "LaplacePosterior", "NormalProjection", "SignProjection", "influence",
    "influence_by_parameter", "influence_by_place", "laplace", "per_sample_projections", "prune", "quantize",
    "saliencies", "store_projections",
]  # fmt: skip
