"""Compression: networks with fewer weights, or coarser ones, at the least loss.

In: a matrix of curvature (`curvature.operators`) and the parameters where it was taken. Out: what each weight is worth
(`saliencies`), and new parameters by name, in which those that are left make up for the others (`prune`).
"""

from curvature.compression.pruning import prune, saliencies

__all__ = ["prune", "saliencies"]
