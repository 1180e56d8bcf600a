"""Attribution: which training samples a model's answers come from.

In: a trained model, a loss, training data, queries, and a matrix of curvature (`curvature.operators`). Out: the score
of every training sample for every query.
"""
