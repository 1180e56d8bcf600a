"""Whether the loss of a batch is known to be the mean or sum of the samples' losses."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from curvature.losses.per_sample import REDUCTIONS, Loss, resolve


def is_known_to_add_up(loss: Loss, output: Tensor, target: Any, output_dim: int, target_dim: int) -> bool:
    """Whether torch itself makes the loss of the batch from the same terms as that of each sample.

    False is no refusal: the loss has to be tried.

    Args:
        loss, ..., target_dim: as for `curvature.losses.per_sample_losses`.
    """
    loss = resolve(loss)
    rule = REDUCTIONS.get(type(loss))
    if rule is None or not isinstance(target, Tensor) or getattr(loss, "reduction", "mean") == "batchmean":
        return False
    return rule.dim_of_terms(output, target, output_dim % output.ndim, target_dim % target.ndim) is not None
