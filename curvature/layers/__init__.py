"""One rule per layer: how its input and its backprop are viewed per sample. The table is `RULES`."""

from curvature.layers import contraction, convolution, elementwise, embedding, normalisation
from curvature.layers.base import RULES, Call, Layout, Rule, Unsupported, reduced, register
from curvature.layers.rewrites import rewritten

__all__ = [
    "RULES",
    "Call",
    "Layout",
    "Rule",
    "Unsupported",
    "contraction",
    "convolution",
    "elementwise",
    "embedding",
    "normalisation",
    "reduced",
    "register",
    "rewritten",
]
