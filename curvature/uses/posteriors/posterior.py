"""A normal distribution over a model's parameters, and what follows from it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from curvature.arguments import check_flag, check_whole
from curvature.gradients import require_pairs
from curvature.linalg import NotDefinite, full_precision, matmul, psd_eigh, widen
from curvature.losses import ClassLabel, LabelDistribution, Loss, Prediction
from curvature.matrices import DataSource, RecordedBatch
from curvature.operators import BlockDiagonal, EigenKronecker, Operator, flat_parameters
from curvature.structures import rows_of
from curvature.terms import OuterProduct, TermsByVector, chunks
from curvature.uses.posteriors.precision import LayeredCurvature, noise_of
from curvature.uses.posteriors.search import least_that_passes, one_by_one

log = logging.getLogger("curvature")

ROWS_ELEMENTS = 1 << 24  # entries of the rows of a layer's Jacobian at a time
CAUTION = 4e-5  # by so much of the log loss of guesses the default prior may raise that of the training data
DECADES = -3.0, 5.0  # of priors that are tried, around the precision of the parameters' own spread
UNSURE = (
    "laplace: with the prior %s the mean confidence on the training data falls from %.2f to %.2f, so predictions on "
    "other data may be hardly better than chance; leave the prior out of laplace(), or take "
    "optimize_prior(validation=(x, y))"
)
Prior = float | Tensor | Mapping[str, float]
TermsOfOutputs = Mapping[str, TermsByVector]  # by parameter, of each entry of the output


@dataclass(frozen=True)
class Confidence:
    """The network's mean probability of the likeliest class on some of the data, which are pairs."""

    labels: ClassLabel
    data: Sequence[tuple[Any, Any]]
    mean: float
    chance: float  # one by the number of classes


@dataclass(frozen=True)
class DataFit:
    """How likely the data are: the summed loss, and what the constant of the likelihood depends on, scalars."""

    loss: Loss
    labels: LabelDistribution
    total: Tensor
    count: Tensor
    sure: Confidence | None = None

    def log_likelihood(self, noise: Tensor) -> Tensor:
        """``log p(labels | inputs, parameters)``, a scalar."""
        return -(self.labels.factor(noise) * self.total + self.labels.constant(self.count, noise))


@dataclass(frozen=True, repr=False)
class LaplacePosterior:
    """The normal distribution ``N(mean, Sigma)`` of a model's parameters, made by `laplace`.

    Attributes:
        model: as it was, with the parameters at the mean; it must stay so for `predict` and `outputs`.
        fit: the likelihood of the data at the mean.
        curvature: of the summed loss, by layers.
        mean: the parameters as a flat vector (P,), those of the posterior alone.
        prior: the prior precision, a scalar or one for each of `layers`.
        noise: standard deviation of the labels, a scalar; of no meaning where the loss is not ``nn.MSELoss``.
    """

    model: nn.Module
    fit: DataFit
    curvature: LayeredCurvature
    mean: Tensor
    prior: Tensor
    noise: Tensor

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers, in the order of a prior precision for each."""
        return self.curvature.layers

    @cached_property
    def precision(self) -> BlockDiagonal:
        """``Sigma^-1``, the curvature of the summed negative log-likelihood plus the prior precision."""
        return self.curvature.precision(self.fit.labels.factor(self.noise), self.prior)

    @cached_property
    def covariance(self) -> BlockDiagonal:
        """``Sigma``.

        Raises:
            ValueError: the prior is less than the rounding of the curvature; the message says which prior is not.
        """
        with self._explain_by_prior():
            inverse = self.precision.inverse()
        assert isinstance(inverse, BlockDiagonal)
        return inverse

    @contextmanager
    def _explain_by_prior(self) -> Iterator[None]:
        """Say in terms of the prior that the precision cannot be inverted."""
        try:
            yield
        except NotDefinite as error:
            larger = [float(f"{value * error.needed / error.damping:.2g}") for value in self.prior.reshape(-1).tolist()]
            dtype = str(self.curvature.space.dtype).removeprefix("torch.")
            raise ValueError(
                f"prior: {_text_of(self.prior.reshape(-1).tolist())} is below the rounding of {dtype} beside this "
                f"curvature; take posterior.with_prior({_text_of(larger)}), or laplace() of model.double()"
            ) from error

    def outputs(self, x: Any) -> tuple[Tensor, Tensor]:
        """Mean and covariance of the outputs of the model linearised at the mean (arXiv:2008.08217, equation 9).

        Args:
            x: the model's input, as in the data: a tensor, a tuple of positional or a dict of keyword arguments.

        Returns:
            The outputs (N, ...), and ``J Sigma J^T`` (N, D, D) for the D entries of each sample's output, in the order
            of the flattened output.

        Memory is that of D backward passes on x; of a layer that is read at one place (linear layers without tokens)
        with Kronecker factors no Jacobian is built, of others some rows at a time.

        Raises:
            RuntimeError: the parameters are no longer those of the posterior.
            ValueError: as for `covariance`, or samples are not independent.
        """
        results: list[tuple[Tensor, Tensor]] = []
        self.each((x, None), lambda f, covariance, _: results.append((f, covariance)))
        return results[0]

    def each(self, data: Any, visit: Callable[[Tensor, Tensor, Any], None]) -> None:
        """Call ``visit(outputs, covariance, y)`` for every batch of the data, as for `outputs`."""
        if not torch.equal(flat_parameters(self.curvature.space, self.model), self.mean):
            raise RuntimeError("model: its parameters have changed since the posterior was made; call laplace() again")

        def outputs_of(run: RecordedBatch) -> None:
            require_no_draws(run)
            dtype = torch.promote_types(run.output.dtype, torch.float32)
            visit(run.output.detach(), output_covariance(run, self.covariance).to(dtype), run.batch.y)

        DataSource(self.model, self.fit.loss, data, parameters=self.curvature.space.names).each(outputs_of)

    def predict(self, x: Any, samples: int | None = None, *, generator: torch.Generator | None = None) -> Prediction:
        """Mean and variance of new labels, entry by entry, with the linearised model.

        Args:
            x: as for `outputs`.
            samples: number of draws of the outputs to average over; None: no draws, see below.
            generator: for the draws; by default one with a fixed seed. The global random state is not touched.

        Returns:
            ``mean`` and ``variance``. For squared errors those of y in the shape of the output, exact: the variance of
            the output plus noise^2 (for ``GaussianNLLLoss`` plus the variance that the model gives). For classes, the
            mean is the probability of each class, by MacKay's probit approximation (for the softmax class by class)
            where there are no draws, and the variance p (1 - p) that of the one-hot label. For counts the mean and
            variance of y, exact for a log-normal rate.

        Raises:
            TypeError: `samples` is no number of draws.
            RuntimeError, ValueError: as for `outputs`.
        """
        if samples is not None:
            require_draws("samples", samples)
        labels = self.fit.labels
        f, covariance = self.outputs(x)
        if samples is None:
            return labels.marginal(f, variances(f, covariance), self.noise)
        values, vectors = psd_eigh(covariance)
        generator = self.curvature.space.generator(generator)
        e = torch.randn(samples, *values.shape, generator=generator, dtype=values.dtype, device=generator.device)
        draws = ((e.to(values.device) * values.sqrt())[..., None, :] @ vectors.mT).reshape(samples, *f.shape).to(f) + f
        each = labels.given(draws.flatten(0, 1), self.noise)
        mean, variance = (entry.unflatten(0, (samples, len(f))) for entry in each)
        return Prediction(mean.mean(0), variance.mean(0) + mean.var(0, correction=0))

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Draw n sets of parameters: ``{name: (n, *shape)}``, for `torch.func.functional_call` under `torch.func.vmap`.

        Args:
            n: number of draws.
            generator: by default the posterior's own, seeded with 0 at its first use: every call gives new draws and
                leaves the global random state untouched.

        Raises:
            TypeError: n is no number of draws.
            ValueError: as for `covariance`.
        """
        require_draws("n", n)
        with self._explain_by_prior():
            draws = self.precision.sample(n, generator=generator)
        dtypes = {name: p.dtype for name, p in self.model.named_parameters()}
        parameters = self.curvature.space.split(self.mean + draws)
        return {name: drawn.to(torch.promote_types(dtypes[name], torch.float32)) for name, drawn in parameters.items()}

    def log_marginal_likelihood(self, prior: Prior | None = None, noise: float | Tensor | None = None) -> Tensor:
        """``log p(labels | inputs)`` in Laplace's approximation, a scalar tensor differentiable in prior and noise.

        ``log p(y | theta) + log p(theta) + P/2 log(2 pi) - 1/2 log det Sigma^-1`` (MacKay 1992; arXiv:2104.04975,
        equation 8) at the mean, whatever prior and noise are: exact for a linear model with squared errors at its
        minimum. In the widest precision of the device.

        Args:
            prior: precision, in the forms that `laplace` takes; by default that of the posterior.
            noise: standard deviation of labels; likewise.

        Raises:
            ValueError: prior or noise are not positive and finite, or noise is given for a loss that has its own.
            TypeError: an argument of the wrong kind.
        """
        precision = self.prior if prior is None else self.curvature.prior(prior)
        return self._evidence(precision, self._noise(noise))

    def _evidence(self, prior: Tensor, noise: Tensor) -> Tensor:
        sizes = self.curvature.sums_by_layer(torch.ones_like(self.mean))
        squares = self.curvature.sums_by_layer(self.mean.square())
        logdet = self.curvature.logdet(self.fit.labels.factor(noise), prior)
        penalty = (prior * squares - sizes * prior.log()).sum()
        return self.fit.log_likelihood(noise) - (penalty + logdet) / 2

    def with_prior(self, prior: Prior, noise: float | Tensor | None = None) -> LaplacePosterior:
        """The posterior with another prior precision, and another noise if given; no pass over the data.

        Arguments and errors as for `log_marginal_likelihood`.
        """
        return replace(self, prior=self.curvature.prior(prior).detach(), noise=self._noise(noise).detach())

    def _noise(self, given: float | Tensor | None) -> Tensor:
        if given is not None and not self.fit.labels.has_noise:
            raise ValueError(f"noise: {type(self.fit.loss).__name__} has its own; only MSELoss takes one")
        return self.noise if given is None else noise_of(given, self.curvature.space.device)

    def optimize_prior(self, validation: Any = None, *, per_layer: bool = False, steps: int = 50) -> LaplacePosterior:
        """The posterior with the best prior precision, and for ``nn.MSELoss`` noise; mean and curvature stay.

        Without validation data, that of largest `log_marginal_likelihood`, by L-BFGS in log space. With them, that of
        least log loss of their labels: a grid of half decades for one prior of all layers, then golden sections, of one
        number at a time. For classes take validation data: at the end of training, the curvature of their loss has
        almost vanished, and the marginal likelihood is largest at a prior with which predictions are close to chance.

        Args:
            validation: a pair ``(x, y)`` that the model was not trained with, or an iterable of pairs as in `laplace`.
            per_layer: whether each layer gets its own precision.
            steps: of L-BFGS, at most.

        Raises:
            ValueError: there is no maximum (where the outputs meet the labels exactly, none of the noise).
            TypeError: an argument of the wrong kind.
        """
        check_flag("per_layer", per_layer)
        check_whole("steps", steps, 1)
        if validation is not None:
            return self._fit_to_validation(validation, per_layer)
        has_noise = self.fit.labels.has_noise
        start = self.prior.expand(len(self.layers)) if per_layer else self.prior
        logs = [start.log().clone().requires_grad_(), self.noise.log().clone().requires_grad_(has_noise)]
        free = [x for x in logs if x.requires_grad]
        search = torch.optim.LBFGS(free, max_iter=steps, line_search_fn="strong_wolfe")

        def closure() -> float:
            prior, noise = (x.exp() for x in logs)
            if not all(bool(((x > 0) & x.isfinite()).all()) for x in (prior, noise)):
                raise ValueError(
                    "optimize_prior: the marginal likelihood has no maximum (do the outputs meet the labels exactly?); "
                    "choose prior and noise with with_prior()"
                )
            loss = -self._evidence(prior, noise)
            for x, slope in zip(free, torch.autograd.grad(loss, free), strict=True):
                x.grad = slope
            return float(loss.detach())

        with torch.enable_grad():
            search.step(closure)
        prior, noise = (x.detach().exp() for x in logs)
        best = self.with_prior(prior, noise if has_noise else None)
        best.warn_if_unsure()
        return best

    def _fit_to_validation(self, validation: Any, per_layer: bool) -> LaplacePosterior:
        """By the log loss of validation data; points are decades: of the prior or each layer's, then of the noise."""
        require_pairs(validation, "validation")
        has_noise = self.fit.labels.has_noise

        def at(point: Sequence[float]) -> LaplacePosterior:
            values = [10.0**x for x in point]
            prior, noise = (values[:-1], values[-1]) if has_noise else (values, None)
            return self.with_prior(self.prior.new_tensor(prior if len(prior) > 1 else prior[0]), noise)

        value = lambda point: at(point)._log_loss(validation)
        # the noise of the training data, which the network has fitted, is where to begin
        fitted = float((self.fit.total / self.fit.count).sqrt().log10()) if has_noise else 0.0
        noise = [fitted if math.isfinite(fitted) else float(self.noise.log10())] if has_noise else []
        low, high = (self._decades() + end for end in DECADES)
        grid = [low + k / 2 for k in range(int(2 * (high - low)) + 1)]
        losses = [value([x, *noise]) for x in grid]
        if not math.isfinite(min(losses)):
            at([grid[-1], *noise]).covariance.trace()  # says why, if it is the prior
            raise ValueError("validation: the log loss is not finite with any prior; are there NaN in x or y?")
        start = [grid[losses.index(min(losses))], *noise]
        point = one_by_one(value, start, 0.5)
        if per_layer and len(self.layers) > 1:
            point = one_by_one(value, [point[0]] * len(self.layers) + point[1:], 1.0)
        return at(point)

    def _decades(self) -> float:
        """The precision of which the parameters are a draw, in decades."""
        mean_square = float(widen(self.mean).square().mean())
        return -math.log10(mean_square) if mean_square else 0.0

    def _log_loss(self, data: Any) -> float:
        """Summed over labels, constants left out; infinite where a prior is below rounding."""
        try:
            self.covariance  # noqa: B018
        except ValueError:
            return math.inf
        losses: list[Tensor] = []

        def visit(f: Tensor, covariance: Tensor, y: Any) -> None:
            summed = self.fit.labels.log_loss(self.fit.loss, f, variances(f, covariance), y, self.noise)
            losses.append(widen(summed))

        self.each(data, visit)
        total = float(torch.stack(losses).sum())
        return total if math.isfinite(total) else math.inf

    def confidence(self, sure: Confidence) -> float:
        """Mean probability of the likeliest class on the same inputs; 0 where the prior is below rounding."""
        try:
            self.covariance  # noqa: B018
        except ValueError:
            return 0.0
        parts: list[Tensor] = []
        rate = lambda f, covariance: sure.labels.confidence(f, variances(f, covariance))
        self.each(sure.data, lambda f, covariance, _: parts.append(rate(f, covariance)))
        return float(torch.stack(parts).mean())

    def with_cautious_prior(self, sure: Confidence) -> LaplacePosterior:
        """With the least prior by which the log loss of the training data is nearly that of the network."""
        low, high = (self._decades() + end for end in DECADES)
        losses: list[Tensor] = []

        def visit(f: Tensor, _: Tensor, y: Any) -> None:
            # guesses, where each class is as likely, have the class weights and ignored labels of the loss
            losses.append(torch.stack([widen(self.fit.loss(at, y)) for at in (f, torch.zeros_like(f))]))

        self.with_prior(10.0**high).each(sure.data, visit)
        of_network, of_guesses = torch.stack(losses).sum(0).tolist()
        most = of_network + CAUTION * of_guesses
        passes = lambda x: self.with_prior(10.0**x)._log_loss(sure.data) <= most
        return self.with_prior(10.0 ** least_that_passes(passes, low, high))

    def warn_if_unsure(self) -> None:
        """Log a warning where half of the confidence above chance on the training data is lost."""
        sure = self.fit.sure
        if sure is None:
            return
        now = self.confidence(sure)
        if now - sure.chance < (sure.mean - sure.chance) / 2:
            log.warning(UNSURE, _text_of(self.prior.reshape(-1).tolist()), sure.mean, now)

    def __repr__(self) -> str:
        loss = type(self.fit.loss).__name__
        prior = ", ".join(f"{value:.4g}" for value in self.prior.reshape(-1).tolist())
        noise = f", noise {float(self.noise):.4g}" if self.fit.labels.has_noise else ""
        return f"LaplacePosterior({loss}, {len(self.mean)} parameters, prior {prior}{noise})"


def _text_of(prior: list[float]) -> str:
    one, *others = [f"{value:.3g}" for value in prior]
    return f"[{', '.join([one, *others])}]" if others else one


def variances(f: Tensor, covariance: Tensor) -> Tensor:
    """Of the entries of the output, in its shape."""
    return covariance.diagonal(dim1=1, dim2=2).reshape(f.shape).to(f)


def require_draws(what: str, given: Any) -> None:
    if isinstance(given, bool) or not isinstance(given, Integral) or given < 1:
        raise TypeError(f"{what}: expected a number of draws, found {given!r}")


def require_no_draws(run: RecordedBatch) -> None:
    if run.random:
        raise ValueError("model: the forward pass draws random numbers (dropout?); call model.eval()")


@full_precision()
def output_covariance(run: RecordedBatch, covariance: BlockDiagonal) -> Tensor:
    """``J Sigma J^T`` (N, D, D) for the D entries of each sample's output.

    Indices below: n sample, c and d outputs, g group, i input, o output of a layer.
    """
    count, output = run.batch.count, run.output
    size = output.numel() // count
    eye = torch.eye(size, dtype=output.dtype, device=output.device)
    terms = run.terms(eye[:, None].expand(-1, count, -1).reshape(size, *output.shape))
    total = torch.zeros(count, size, size, dtype=covariance.space.dtype, device=output.device)
    for block in covariance.blocks.values():
        factored = _by_factors(block, terms)
        total += (_by_rows(block, terms, size, count) if factored is None else factored).to(total.device)
    return total


def _by_factors(block: Operator, terms: TermsOfOutputs) -> Tensor | None:
    """For a layer read at one place, ``sum_o b_co b_do sum_i a_i^2 variance_oi`` in the eigenbasis; None for others."""
    if not isinstance(block, EigenKronecker):
        return None
    of_weight = terms.get(block.space.names[0], ())
    alone = (parts[0] for parts in of_weight if len(parts) == 1)
    products = [term for term in alone if isinstance(term, OuterProduct) and term.places == 1]
    if not products or len(products) < len(of_weight):
        return None
    a, b = products[0].a[:, 0], torch.stack([term.b[:, 0] for term in products])
    if len(block.space.names) > 1:
        a = torch.cat([a, torch.ones_like(a[..., :1])], -1)
    if (a.shape[1], b.shape[3], a.shape[2]) != block.sides:
        return None
    a, b = a.to(block.space.dtype), b.to(block.space.dtype)
    if block.column_vectors is not None:
        a = matmul(a[:, :, None], block.column_vectors)[:, :, 0]
    if block.row_vectors is not None:
        b = matmul(b[..., None, :], block.row_vectors)[..., 0, :]
    spread = torch.einsum("ngi,goi->ngo", a.square(), block.values)
    return torch.einsum("cngo,dngo->ncd", b * spread, b)


def _by_rows(block: Operator, terms: TermsOfOutputs, outputs: int, count: int) -> Tensor:
    """The same from the rows of this layer's Jacobian, of some samples at a time."""
    terms_of_block = {name: terms[name] for name in block.space.names if name in terms}
    covariances = []
    for part in chunks(count, ROWS_ELEMENTS, outputs * block.space.size):
        some = ({name: [t.samples(part) for t in of[k]] for name, of in terms_of_block.items()} for k in range(outputs))
        rows = torch.stack([rows_of(block.space, row, part.stop - part.start) for row in some], 1)  # (n, c, p)
        spread = (block @ rows.flatten(0, 1).T).T.reshape(rows.shape)
        covariances.append(matmul(rows, spread.mT))
    return torch.cat(covariances)
