"""Figures with matplotlib of what builders return, and of an optimizer's run.

In: matrices, or an optimizer's history. Out: axes. Every function draws into the given axes, or into a new
figure, and returns the axes. None shows or saves a figure or changes matplotlib's settings.
"""

from curvature.plots.heatmaps import comparison, factors, matrix
from curvature.plots.spectra import spectra, spectral_density
from curvature.plots.style import colours
from curvature.plots.training import training

__all__ = ["colours", "comparison", "factors", "matrix", "spectra", "spectral_density", "training"]
