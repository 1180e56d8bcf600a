"""Figures with matplotlib of what builders return, and of an optimizer's run.

In: matrices, or an optimizer's history. Out: axes. Every function draws into the given axes, or into a new
figure, and returns the axes. None shows or saves a figure or changes matplotlib's settings.
"""

from curvature.plots.figures import factors, matrix, spectra, training

__all__ = ["factors", "matrix", "spectra", "training"]
