"""How noisy gradients are: the batch size at which noise and signal are equal."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from curvature.gradients.batch import Batch
from curvature.gradients.data import either_form, pairs, require_pairs
from curvature.gradients.per_sample import sample_terms
from curvature.linalg import stack, widen
from curvature.losses import Loss
from curvature.terms import contractions


class NoiseScale(NamedTuple):
    """What `gradient_noise_scale` returns.

    Attributes:
        value: ``trace / squared_norm``, in samples; infinite where the data are too few to tell the mean from zero.
        trace: of the covariance of the samples' gradients.
        squared_norm: of their mean. Over several calls, average this and `trace`, not their quotient.
    """

    value: float
    trace: float
    squared_norm: float


@either_form
def gradient_noise_scale(
    model: nn.Module, loss: Loss, data: Any, *, sample_dim: int | tuple[int, int, int] = 0
) -> NoiseScale:
    """The simple noise scale ``tr(Sigma) / |G|^2`` (McCandlish et al. 2018, arXiv:1812.06162, equation 2.9).

    G is the mean and Sigma the covariance of the samples' own gradients. In a batch of this size the noise of the mean
    is as large as the mean. Of N samples, ``tr(Sigma) = (sum_n |g_n|^2 - N |mean|^2) / (N - 1)`` and
    ``|G|^2 = |mean|^2 - tr(Sigma) / N`` have no bias (appendix A.1, for batches of 1 and N); their quotient has one
    that falls as 1 / N.

    ``model``, ``loss`` and ``sample_dim`` are those of `per_sample_gradients`. All samples count alike.

    Args:
        data: one pair ``(x, y)``, or an iterable of pairs (a DataLoader), over which sums are streamed.

    Raises:
        ValueError: fewer than two samples, or as for `per_sample_gradients`.
        TypeError: the data are neither a pair nor an iterable of pairs.
    """
    require_pairs(data)
    count, squares = 0, 0.0
    sums: dict[str, Tensor] = {}
    for x, y in pairs(data):
        batch = Batch.of(model, loss, x, y, sample_dim)
        terms = sample_terms(batch)
        count += batch.count
        squares += float(stack(widen(x).sum() for x in contractions.each_norms_squared(terms.values())).sum())
        for name, parts in terms.items():
            ones = torch.ones(batch.count, device=parts[0].device)
            found = contractions.weighted_sum(parts, ones)
            found = widen(torch.view_as_real(found.resolve_conj()) if found.is_complex() else found)
            sums[name] = sums[name] + found if name in sums else found
    if count < 2:
        raise ValueError(f"data: a covariance needs two samples at least, found {count}")
    mean = float(stack(total.square().sum() for total in sums.values()).sum()) / count**2
    trace = (squares - count * mean) / (count - 1)
    norm = mean - trace / count
    return NoiseScale(trace / norm if norm > 0 else float("inf"), trace, norm)
