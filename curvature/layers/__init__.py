"""One rule for each torch function that reads parameters: how to view its input and backprop per sample.

In: a recorded call, the backprop at its output, and where the samples are in it (`Layout`). Out: a term for each
parameter (`curvature.terms`). The table is `RULES`; a new rule is one class with `@register`.
"""

from curvature.layers import elementwise, embedding, matrix_products, normalisation
from curvature.layers.base import RULES, Layout, RecordedCall, Rule, Unsupported, register
from curvature.layers.normalisation import uses_running_statistics

__all__ = [
    "Layout", "RULES", "RecordedCall", "Rule", "Unsupported", "elementwise", "embedding",
    "matrix_products", "normalisation", "register", "uses_running_statistics",
]  # fmt: skip
