"""Pictures of what the builders and the estimators return and of an optimizer's run, with matplotlib.

Every function draws into the axes that it is given, or into a new figure, and returns the axes. None shows or saves
anything, and none changes matplotlib's settings. All else is left to the caller, by way of the axes returned.
"""

from curvature.plots.convergence import agreement, apart, drift
from curvature.plots.heatmaps import comparison, factors, matrix
from curvature.plots.spectra import spectra, spectral_density
from curvature.plots.training import training

__all__ = ["agreement", "apart", "comparison", "drift", "factors", "matrix", "spectra", "spectral_density", "training"]
