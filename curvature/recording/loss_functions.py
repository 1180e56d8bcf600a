"""Torch's loss functions: their first arguments are outputs of a model, with samples along the first axis."""

from __future__ import annotations

import torch.nn.functional as F

LOSSES = {
    F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits, F.kl_div, F.poisson_nll_loss, F.gaussian_nll_loss, F.soft_margin_loss,
    F.multilabel_soft_margin_loss, F.multilabel_margin_loss, F.multi_margin_loss, F.hinge_embedding_loss,
    F.cosine_embedding_loss, F.margin_ranking_loss, F.triplet_margin_loss, F.triplet_margin_with_distance_loss,
}  # fmt: skip
