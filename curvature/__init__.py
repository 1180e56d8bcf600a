"""Second-order information for PyTorch: activations and backprops of every layer, and what follows from them."""

from curvature.capture import Tape, Use, capture
from curvature.gradients import check_gradients, per_sample_gradients, per_sample_gram, per_sample_norms

__all__ = [
    "Tape",
    "Use",
    "capture",
    "check_gradients",
    "per_sample_gradients",
    "per_sample_gram",
    "per_sample_norms",
]
