"""Second-order information for PyTorch: activations and backprops of every layer, and what follows from them."""

from curvature.blocks import Block
from curvature.capture import Listener, Tape, Use, capture
from curvature.factors import RunningFactors
from curvature.gradients import check_gradients, per_sample_gradients, per_sample_gram, per_sample_norms
from curvature.injection import Injection, empirical, exact, isotropic, propagated, sampled
from curvature.layers import Layout
from curvature.structure import sample_layouts

__all__ = [
    "Block",
    "Injection",
    "Layout",
    "Listener",
    "RunningFactors",
    "Tape",
    "Use",
    "capture",
    "check_gradients",
    "empirical",
    "exact",
    "isotropic",
    "per_sample_gradients",
    "per_sample_gram",
    "per_sample_norms",
    "propagated",
    "sample_layouts",
    "sampled",
]
