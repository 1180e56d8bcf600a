"""Random projections of per-sample gradients: a few numbers for each sample, in place of as many as parameters.

In: a model, a loss, data, and a projection (`SignProjection`, `NormalProjection`, `KroneckerProjection`: small values
that name a linear map by a seed). Out: projected gradients (N, K) of a batch (`per_sample_projections`), or of all data
in a file (`store_projections`). Neither the gradients nor the map exist as a whole.
"""
