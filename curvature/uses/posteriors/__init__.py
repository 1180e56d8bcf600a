"""Laplace posteriors: a normal distribution over the parameters, from the curvature of the loss at its minimum.

In: a trained model, a loss that is a negative log-likelihood, the data. Out: a `LaplacePosterior` that predicts with
the linearised model, gives the log marginal likelihood and draws parameters. `builder` makes the curvature of the
summed loss (`curvature.matrices`), to which `precision` adds a prior, layer by layer; `posterior` predicts; `search`
finds where a function of few numbers is least.
"""
