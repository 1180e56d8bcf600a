"""Compression: networks with fewer weights, or coarser ones, at the least loss.

In: a matrix of curvature (`curvature.operators`) and the parameters where it was taken. Out: what each weight is worth
(`saliencies`), and new parameters by name with zeros (`prune`) or few levels (`quantize`), for which others make up.
"""
