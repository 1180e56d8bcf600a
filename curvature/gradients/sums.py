"""Sums over samples' gradients: clipped and with noise, as in private training; and how noisy their mean is."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from curvature.gradients.batch import Batch, SampleDim, either_form
from curvature.gradients.data import pairs, require_pairs
from curvature.gradients.per_sample import sample_terms
from curvature.linalg import stack, widen
from curvature.losses import Loss
from curvature.recording import fresh_random_numbers
from curvature.terms import contractions


@either_form
def clipped_gradient(
    model: nn.Module, loss: Loss, x: Any, y: Any, max_norm: float, *, noise: float = 0.0, mask: Tensor | None = None,
    microbatch: int | None = None, generator: torch.Generator | None = None, parameters: Iterable[str] | None = None,
    sample_dim: SampleDim = 0,
) -> dict[str, Tensor]:  # fmt: skip
    """``sum_n g_n min(1, max_norm / |g_n|) + noise * max_norm * z``, z standard normal: the private gradient of DP-SGD.

    g_n is the gradient of the sample's own loss over all parameters together, or over those asked for, as in
    `per_sample_gradients`. One sample more or less changes the sum by ``max_norm`` at most, whatever the loss's
    reduction. Divide by the expected batch size, not by the number of samples drawn, to get the mean. ``model``,
    ``loss``, ``x``, ``y``, ``parameters`` and ``sample_dim`` are those of `per_sample_gradients`. A batch may be empty.
    Losses that divide by the weights of the whole batch (which reveal who is in it) are logged: own losses count alike.

    Args:
        max_norm: to which each g_n is clipped, in units of loss / parameter.
        noise: standard deviation of the noise on the sum, in units of ``max_norm`` (the accountants' noise multiplier).
        mask: (N,), bool: which samples count. All others, which fill a batch up to its usual size, must be finite.
        microbatch: samples at a time, which bounds memory; the result is the same.
        generator: for the noise; by default torch's own, which moves on: noise that repeats is no privacy.

    Returns:
        ``{name: tensor like the parameter}``, for ``.grad``, in the order of ``named_parameters()``.

    Raises:
        ValueError: ``max_norm`` is not positive, ``noise`` negative, ``mask`` not (N,) of bool, or as for
            `per_sample_gradients`: BatchNorm in training mode is refused by name.

    It takes one forward pass and one backward pass to the layers' outputs: from their backprops come the norms (ghost
    clipping, arXiv:2110.05679) and then the weighted sum (arXiv:2210.00038). Per-sample gradients are built only where
    no rule explains a parameter. In single precision norms are right to 3e-4, and so is the bound. In training mode
    torch's random state moves on. Source: Abadi et al. 2016, arXiv:1607.00133, algorithm 1.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm: expected a positive norm, found {max_norm}")
    if not noise >= 0:
        raise ValueError(f"noise: expected a standard deviation in units of max_norm, found {noise}")
    batch = replace(Batch.of(model, loss, x, y, sample_dim, parameters), are_clipped=True)
    device = next(iter(batch.parameters.values())).device
    counted = torch.ones(batch.count, dtype=torch.bool, device=device) if mask is None else mask
    if counted.shape != (batch.count,) or counted.dtype is not torch.bool:
        raise ValueError(f"mask: expected ({batch.count},) of bool, found {tuple(counted.shape)} of {counted.dtype}")
    total = {name: torch.zeros_like(p, requires_grad=False) for name, p in batch.parameters.items()}
    for turn, part in batch.parts(microbatch, "microbatch"):
        counts = counted[part].clone()
        counts[: turn - part.start] = False  # their turn has been
        with fresh_random_numbers(batch.model) if batch.model.training else nullcontext():
            _add_clipped(total, batch.part(part), counts, max_norm)
    if noise:
        for g in (torch.view_as_real(g) if g.is_complex() else g for g in total.values()):
            source = g.device if generator is None else generator.device
            z = torch.randn(g.shape, dtype=g.dtype, device=source, generator=generator)
            g.add_(z.to(g.device), alpha=noise * max_norm)
    return total


def _add_clipped(total: dict[str, Tensor], batch: Batch, counted: Tensor, max_norm: float) -> None:
    """Add the clipped gradients of the samples that count."""
    terms = sample_terms(batch)
    norms = stack(contractions.each_norms_squared(terms.values())).sum(0).sqrt()
    weights = torch.where(norms > max_norm, max_norm / norms, 1).where(counted.to(norms.device), 0)
    for name, parts in terms.items():
        weighted = contractions.weighted_sum(parts, weights.to(parts[0].device))
        total[name] += weighted.to(total[name].dtype)


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
def gradient_noise_scale(model: nn.Module, loss: Loss, data: Any, *, sample_dim: SampleDim = 0) -> NoiseScale:
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
            summed = contractions.weighted_sum(parts, torch.ones(batch.count, device=parts[0].device))
            summed = widen(torch.view_as_real(summed.resolve_conj()) if summed.is_complex() else summed)
            sums[name] = sums[name] + summed if name in sums else summed
    if count < 2:
        raise ValueError(f"data: a covariance needs two samples at least, found {count}")
    mean = float(stack(total.square().sum() for total in sums.values()).sum()) / count**2
    trace = (squares - count * mean) / (count - 1)
    norm = mean - trace / count
    return NoiseScale(trace / norm if norm > 0 else float("inf"), trace, norm)
