"""The distribution of a label given the model's output, for each loss that is a negative log-likelihood.

With L the summed loss, constants left out, the negative log-likelihood of all labels is ``factor * L + constant``. The
factor is 1 but for squared errors: ``nn.MSELoss`` says nothing of how noisy labels are, so the standard deviation of
the noise is a number of its own, and the factor is ``1 / (2 noise^2)``.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor


class Prediction(NamedTuple):
    """Mean and variance of a new label, entry by entry. Of classes, the means are their probabilities."""

    mean: Tensor
    variance: Tensor


class LabelDistribution:
    """Base class. ``f`` is an output (N, ...), ``variance`` that of its entries; only `Normal` uses ``noise``."""

    has_noise: ClassVar[bool] = False

    def factor(self, noise: Tensor) -> Tensor:
        """What the summed loss is multiplied by."""
        return torch.ones_like(noise)

    def count(self, output: Tensor, target: Any) -> Tensor:
        """What a batch adds to the count that `constant` takes."""
        return output.new_zeros(())

    def constant(self, count: Tensor, noise: Tensor) -> Tensor:
        """The part of the negative log-likelihood that does not depend on the model."""
        return count

    def given(self, f: Tensor, noise: Tensor) -> Prediction:
        """Mean and variance of the label at the output f."""
        raise NotImplementedError

    def marginal(self, f: Tensor, variance: Tensor, noise: Tensor) -> Prediction:
        """Where the output is normal with mean f: by MacKay's probit approximation (doi:10.1162/neco.1992.4.5.720)."""
        return self.given(f / (1 + math.pi / 8 * variance).sqrt(), noise)


class Normal(LabelDistribution):
    """``y = f + noise * e``, e standard normal, behind ``nn.MSELoss``."""

    has_noise = True

    def factor(self, noise: Tensor) -> Tensor:
        return 0.5 / noise.square()

    def count(self, output: Tensor, target: Any) -> Tensor:
        return output.new_tensor(output.numel())

    def constant(self, count: Tensor, noise: Tensor) -> Tensor:
        return count * (noise.log() + 0.5 * math.log(2 * math.pi))

    def given(self, f: Tensor, noise: Tensor) -> Prediction:
        return Prediction(f, noise.to(f).square().expand_as(f))

    def marginal(self, f: Tensor, variance: Tensor, noise: Tensor) -> Prediction:
        return Prediction(f, variance + noise.to(f).square())


class Categorical(LabelDistribution):
    """``softmax(f)`` along dim 1."""

    def given(self, f: Tensor, noise: Tensor) -> Prediction:
        p = f.softmax(1)
        return Prediction(p, p * (1 - p))


class Bernoulli(LabelDistribution):
    """1 with probability ``sigmoid(f)``, else 0."""

    def given(self, f: Tensor, noise: Tensor) -> Prediction:
        p = f.sigmoid()
        return Prediction(p, p * (1 - p))


class Poisson(LabelDistribution):
    """Poisson with rate ``exp(f)``, whose mean over a normal f is log-normal."""

    def count(self, output: Tensor, target: Any) -> Tensor:
        return torch.lgamma(target.to(output.dtype) + 1).sum()

    def given(self, f: Tensor, noise: Tensor) -> Prediction:
        return Prediction(f.exp(), f.exp())

    def marginal(self, f: Tensor, variance: Tensor, noise: Tensor) -> Prediction:
        rate = (f + variance / 2).exp()
        return Prediction(rate, rate + variance.expm1() * rate.square())


class NormalHeads(LabelDistribution):
    """Normal; the halves of dim 1 are mean and variance. Of the output's uncertainty only that of the mean counts."""

    def count(self, output: Tensor, target: Any) -> Tensor:
        return output.new_tensor(output.numel() / 4 * math.log(2 * math.pi))

    def given(self, f: Tensor, noise: Tensor) -> Prediction:
        return Prediction(*f.chunk(2, 1))

    def marginal(self, f: Tensor, variance: Tensor, noise: Tensor) -> Prediction:
        mean, spread = f.chunk(2, 1)
        return Prediction(mean, spread + variance.chunk(2, 1)[0])
