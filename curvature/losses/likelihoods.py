"""The likelihoods behind losses: Fisher information at the output, gradients at sampled labels, predicted labels.

With p(y | f) the likelihood of the label of one term of the loss at output f, the Fisher information is

    H = E[s s^T] = -E[d^2 log p(y | f) / df^2],     s = -d log p(y | f) / df,     y drawn from p(. | f)

It is the Hessian of the term if that does not depend on the label (``is_hessian``), else the expected Hessian. Root of
the categorical: Martens, Sutskever & Swersky 2012, arXiv:1206.6464; its Cholesky root: Tanabe & Sagae 1992,
doi:10.1111/j.2517-6161.1992.tb01875.x.

Every `Likelihood` is for terms of mass 1. ``eps``, ``u`` and all results have shape (k, *output.shape); classes and
heads are dim 1 of the output. A nan in the output makes nan of everything that depends on it.

A `LabelDistribution` is what posteriors predict labels by. With L the summed loss, constants left out, the negative
log-likelihood of all labels is ``factor * L + constant``. The factor is 1 but for squared errors: ``nn.MSELoss`` says
nothing of how noisy labels are, so the standard deviation of the noise is a number of its own, and the factor is
``1 / (2 noise^2)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from curvature.linalg import symmetric_eigh

DRAWN_ELEMENTS = 1 << 22  # entries that are drawn together
PROBABILITY_EPS = 1e-12  # torch divides the gradient of BCELoss by at least this
NODES = 32  # of the quadrature over a normal log-rate


class Likelihood:
    """H at one output, as a root, as a product, and as the second moment of sampled gradients.

    In all classes but `Categorical` it is diagonal, the square of ``scale``, and so is written here.
    """

    is_hessian: ClassVar[bool] = True
    spares_last_class: ClassVar[bool] = False  # whether `thin_root` needs no vector for it
    output: Tensor
    scale: Tensor

    def root(self, eps: Tensor) -> Tensor:
        """S eps, with S square and S S^T = H."""
        return self.scale * eps

    def thin_root(self, eps: Tensor) -> Tensor:
        """T eps, with T T^T = H, T having as few columns that are not zero as H allows."""
        return self.root(eps)

    def product(self, u: Tensor) -> Tensor:
        """H u."""
        return self.scale.square() * u

    def diagonal(self) -> Tensor:
        """The diagonal of H, broadcastable to the shape of the output."""
        return self.scale.square()

    def draw(self, k: int, generator: torch.Generator) -> Tensor:
        """k gradients s at independently drawn labels, so that E s s^T = H."""
        raise NotImplementedError

    def drawn_root(self, k: int, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        """eps -> S eps, S S^T the sum of s s^T over k draws but for products of different terms, whose mean is zero."""
        root = self.draw_squares(k, generator).sqrt()
        return lambda eps: root * eps

    def draw_squares(self, k: int, generator: torch.Generator) -> Tensor:
        """The sum of s^2 over k draws, in the shape of the output."""
        size = max(1, DRAWN_ELEMENTS // self.output.numel())
        parts = (min(size, k - start) for start in range(0, k, size))
        return torch.stack([self.draw(part, generator).square().sum(0) for part in parts]).sum(0)

    def blank(self, k: int) -> Tensor:
        """Of the shape of k draws, to be filled."""
        return self.output.new_empty(k, *self.output.shape)


class Categorical(Likelihood):
    """Of logits (N, C, ...): H = diag(p) - p p^T, of rank C - 1.

    The root S mixes all classes alike, which keeps the variance of random signs low (`propagated`). The Cholesky root
    T has no column for the last class: the columns of all others suffice for an exact sum.
    """

    spares_last_class = True

    def __init__(self, output: Tensor) -> None:
        self.output, self.p = output, output.softmax(1)

    def root(self, eps: Tensor) -> Tensor:
        mixed = self.p.sqrt() * eps
        return mixed - self.p * mixed.sum(2, keepdim=True)

    def thin_root(self, eps: Tensor) -> Tensor:
        # T_jj^2 = p_j q_j / (p_j + q_j) and T_ij = -p_i T_jj / q_j for i > j, q_j = sum_(i > j) p_i
        rest = self.p.flip(1).cumsum(1).flip(1)
        after = torch.cat([rest[:, 1:], torch.zeros_like(rest[:, :1])], 1)
        share = (self.p / rest).sqrt()  # of roots, since quotients of the least numbers overflow
        along = torch.where(after == 0, 0, share / after.sqrt()) * eps
        before = along.cumsum(2) - along
        return torch.where(rest == 0, 0, share * after.sqrt()) * eps - self.p * before

    def product(self, u: Tensor) -> Tensor:
        # H 1 = 0: relative to the likeliest class nothing cancels, however near to one its probability is
        mixed = u - u.gather(2, self.likeliest.expand(len(u), *self.likeliest.shape))
        mixed *= self.p
        return mixed.addcmul_(self.p, mixed.sum(2, keepdim=True), value=-1)

    def diagonal(self) -> Tensor:
        others = self.p.scatter(1, self.likeliest, 0).sum(1, keepdim=True)
        return self.p * (1 - self.p).scatter(1, self.likeliest, others)

    @cached_property
    def likeliest(self) -> Tensor:
        """The class with the largest probability at every place, (N, 1, ...)."""
        return self.p.argmax(1, keepdim=True)

    def draw(self, k: int, generator: torch.Generator) -> Tensor:
        label = draw_classes(self.output, k, generator)
        return self.p.expand(k, *self.p.shape).scatter_add(2, label, self.p.new_full((), -1.0).expand_as(label))

    def drawn_root(self, k: int, generator: torch.Generator) -> Callable[[Tensor], Tensor]:
        times = draw_class_counts(self.p, k, generator).sqrt()
        drawn = lambda eps: times * eps  # column c: the gradient at class c, as often as it was drawn
        return lambda eps: self.p * drawn(eps).sum(2, keepdim=True) - drawn(eps)


class LogProbabilities(Likelihood):
    """Of log-probabilities (N, C, ...) whose exponentials sum to one: H = diag(p).

    The term is linear in them, so its Hessian is zero. After a log-softmax this gives the Fisher information of
    `Categorical`. The gradient at a label is minus its unit vector. Its mean -p is backpropagated to zero by a
    normalized model; here a random sign makes the mean zero at once, so that terms do not correlate.
    """

    is_hessian = False

    def __init__(self, output: Tensor) -> None:
        self.output, self.scale = output, (output / 2).exp()

    def draw(self, k: int, generator: torch.Generator) -> Tensor:
        label = draw_classes(self.output, k, generator)
        nothing = torch.where(self.output.isnan(), math.nan, torch.zeros_like(self.output))
        signs = torch.randint(2, label.shape, generator=generator, dtype=nothing.dtype, device=nothing.device) * 2 - 1
        return nothing.expand(k, *nothing.shape).scatter_add(2, label, signs)

    def draw_squares(self, k: int, generator: torch.Generator) -> Tensor:
        return draw_class_counts(self.output.exp(), k, generator)


class Bernoulli(Likelihood):
    """Of logits: H = p (1 - p)."""

    def __init__(self, output: Tensor) -> None:
        self.output, self.p, self.q = output, output.sigmoid(), (-output).sigmoid()
        self.scale = (self.p * self.q).sqrt()

    def draw(self, k: int, generator: torch.Generator) -> Tensor:
        return self.p - (self.blank(k).uniform_(generator=generator) < self.p).to(self.p.dtype)

    def draw_squares(self, k: int, generator: torch.Generator) -> Tensor:
        rare, common = torch.minimum(self.p, self.q), torch.maximum(self.p, self.q)
        times = torch.binomial(torch.full_like(rare, k), rare, generator=generator)
        return times * common.square() + (k - times) * rare.square()


class BernoulliProbability(Bernoulli):
    """Of probabilities: H = 1 / (p (1 - p)); 0 where p is 0 or 1, as in torch."""

    is_hessian = False

    def __init__(self, output: Tensor) -> None:
        self.output, self.p, self.q = output, output, 1 - output
        variance = self.p * self.q
        self.divisor = variance.clamp(min=PROBABILITY_EPS)
        self.scale = variance.sqrt() / self.divisor

    def draw(self, k: int, generator: torch.Generator) -> Tensor:
        return super().draw(k, generator) / self.divisor

    def draw_squares(self, k: int, generator: torch.Generator) -> Tensor:
        return super().draw_squares(k, generator) / self.divisor.square()


class Normal(Likelihood):
    """Of means with variance 1/2, whose negative log-likelihood is the squared error: H = 2."""

    def __init__(self, output: Tensor) -> None:
        self.output, self.scale = output, output.new_full((), math.sqrt(2))

    def draw(self, k: int, generator: torch.Generator) -> Tensor:
        return self.scale * self.blank(k).normal_(generator=generator)


class Poisson(Likelihood):
    """Of log-rates: H = exp(f)."""

    def __init__(self, output: Tensor) -> None:
        self.output, self.scale = output, (output / 2).exp()

    def draw(self, k: int, generator: torch.Generator) -> Tensor:
        rate = self.output.exp()
        return rate - draw_counts(rate, k, generator)


class PoissonRate(Likelihood):
    """Of rates: H = f / (f + eps)^2, where the loss adds ``eps`` to the rate inside its logarithm."""

    is_hessian = False

    def __init__(self, output: Tensor, eps: float) -> None:
        self.output, self.eps, self.scale = output, eps, output.sqrt() / (output + eps)

    def draw(self, k: int, generator: torch.Generator) -> Tensor:
        rate = torch.where(self.output < 0, math.nan, self.output)
        return (rate - draw_counts(rate, k, generator)) / (rate + self.eps)


class NormalHeads(Likelihood):
    """Of means and variances, each (N, d, ...), concatenated along dim 1: H = 1/v for a mean, 1/(2 v^2) for v."""

    is_hessian = False

    def __init__(self, mean: Tensor, variance: Tensor) -> None:
        self.output = mean
        self.scale = torch.cat([variance.rsqrt(), math.sqrt(0.5) / variance], 1)

    def draw(self, k: int, generator: torch.Generator) -> Tensor:
        z = self.blank(k).normal_(generator=generator)
        return self.scale * torch.cat([-z, math.sqrt(0.5) * (1 - z.square())], 2)


def draw_classes(output: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """Draw k classes at every place of (N, C, ...) with probabilities proportional to exp(output): (k, N, 1, ...)."""
    # an exponential race has the winner distributed as p; unlike multinomial, it passes nan on without a device error
    times = output.new_empty(k, *output.shape).exponential_(generator=generator)
    return times.log_().neg_().add_(output).argmax(2, keepdim=True)


def draw_class_counts(p: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """How often each class occurs in k draws at every place of p (N, C, ...), which need not sum to one: like p."""
    # one binomial number for each class, the rarest first: the quotients then keep their digits
    shares, order = p.sort(1)
    rest = shares.flip(1).cumsum(1).flip(1)
    left = torch.full_like(p[:, 0], k)
    counts = []
    for share in torch.where(rest == 0, 0, shares / rest).clamp(max=1).unbind(1):
        counts.append(torch.binomial(left, share, generator=generator))
        left = left - counts[-1]
    return torch.zeros_like(p).scatter(1, order, torch.stack(counts, 1))


def draw_counts(rate: Tensor, k: int, generator: torch.Generator) -> Tensor:
    finite = rate.nan_to_num(0.0, 0.0, 0.0)  # nan is a device error in torch.poisson
    return torch.poisson(finite.expand(k, *rate.shape), generator=generator)


class Prediction(NamedTuple):
    """Mean and variance of a new label, entry by entry. Of classes, the means are their probabilities."""

    mean: Tensor
    variance: Tensor


class LabelDistribution:
    """Base class. ``f`` is an output (N, ...), ``variance`` that of its entries; only `NormalLabel` uses ``noise``."""

    has_noise: ClassVar[bool] = False

    def of(self, loss: Any) -> LabelDistribution:
        """The distribution behind a loss with its settings."""
        return self

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
        """Where the output is normal with mean f."""
        raise NotImplementedError

    def log_loss(self, loss: Any, f: Tensor, variance: Tensor, target: Any, noise: Tensor) -> Tensor:
        """Of labels where the output is normal with mean f: the summed ``-log p(target)``, constants left out."""
        raise NotImplementedError


class ClassLabel(LabelDistribution):
    """Classes, where the output is normal by MacKay's probit approximation (doi:10.1162/neco.1992.4.5.720)."""

    def confidence(self, f: Tensor, variance: Tensor) -> Tensor:
        """The mean probability of the likeliest class."""
        raise NotImplementedError

    def classes(self, f: Tensor) -> int:
        raise NotImplementedError

    def marginal(self, f: Tensor, variance: Tensor, noise: Tensor) -> Prediction:
        return self.given(_shrunk(f, variance), noise)

    def log_loss(self, loss: Any, f: Tensor, variance: Tensor, target: Any, noise: Tensor) -> Tensor:
        return loss(_shrunk(f, variance), target)


class NormalLabel(LabelDistribution):
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

    def log_loss(self, loss: Any, f: Tensor, variance: Tensor, target: Any, noise: Tensor) -> Tensor:
        return _normal_log_loss(self.marginal(f, variance, noise), target)


class CategoricalLabel(ClassLabel):
    """``softmax(f)`` along dim 1."""

    def given(self, f: Tensor, noise: Tensor) -> Prediction:
        p = f.softmax(1)
        return Prediction(p, p * (1 - p))

    def classes(self, f: Tensor) -> int:
        return f.shape[1]

    def confidence(self, f: Tensor, variance: Tensor) -> Tensor:
        return _shrunk(f, variance).softmax(1).amax(1).mean()


class BernoulliLabel(ClassLabel):
    """1 with probability ``sigmoid(f)``, else 0."""

    def given(self, f: Tensor, noise: Tensor) -> Prediction:
        p = f.sigmoid()
        return Prediction(p, p * (1 - p))

    def classes(self, f: Tensor) -> int:
        return 2

    def confidence(self, f: Tensor, variance: Tensor) -> Tensor:
        return _shrunk(f, variance).abs().sigmoid().mean()


class PoissonLabel(LabelDistribution):
    """Poisson with rate ``exp(f)``, whose mean over a normal f is log-normal."""

    def count(self, output: Tensor, target: Any) -> Tensor:
        return torch.lgamma(target.to(output.dtype) + 1).expand_as(output).sum()

    def given(self, f: Tensor, noise: Tensor) -> Prediction:
        return Prediction(f.exp(), f.exp())

    def marginal(self, f: Tensor, variance: Tensor, noise: Tensor) -> Prediction:
        rate = (f + variance / 2).exp()
        return Prediction(rate, rate + variance.expm1() * rate.square())

    def log_loss(self, loss: Any, f: Tensor, variance: Tensor, target: Any, noise: Tensor) -> Tensor:
        nodes, weights = (values.to(f) for values in _normal_quadrature())
        at = (..., *[None] * f.ndim)
        rates = f + variance.sqrt() * nodes[at]
        return -(weights.log()[at] + target * rates - rates.exp()).logsumexp(0).sum()


class NormalHeadsLabel(LabelDistribution):
    """Normal; the halves of dim 1 are mean and variance, at least eps. Only the uncertainty of the mean counts."""

    def __init__(self, eps: float = 0.0) -> None:
        self.eps = eps

    def of(self, loss: Any) -> LabelDistribution:
        return NormalHeadsLabel(loss.eps)

    def count(self, output: Tensor, target: Any) -> Tensor:
        return output.new_tensor(output.numel() / 4 * math.log(2 * math.pi))

    def given(self, f: Tensor, noise: Tensor) -> Prediction:
        mean, spread = f.chunk(2, 1)
        return Prediction(mean, spread.clamp(min=self.eps))

    def marginal(self, f: Tensor, variance: Tensor, noise: Tensor) -> Prediction:
        mean, spread = self.given(f, noise)
        return Prediction(mean, spread + variance.chunk(2, 1)[0])

    def log_loss(self, loss: Any, f: Tensor, variance: Tensor, target: Any, noise: Tensor) -> Tensor:
        return _normal_log_loss(self.marginal(f, variance, noise), target)


def _shrunk(f: Tensor, variance: Tensor) -> Tensor:
    """The logits of a class whose logit is normal."""
    return f / (1 + math.pi / 8 * variance).sqrt()


def _normal_quadrature() -> tuple[Tensor, Tensor]:
    """Nodes and weights that integrate over a standard normal variable (Golub & Welsch 1969)."""
    beside = torch.arange(1, NODES, dtype=torch.float64, device="cpu").sqrt()
    nodes, vectors = symmetric_eigh(beside.diag(1) + beside.diag(-1))
    return nodes, vectors[0].square()


def _normal_log_loss(label: Prediction, target: Tensor) -> Tensor:
    return ((target - label.mean).square() / label.variance + label.variance.log()).sum() / 2
