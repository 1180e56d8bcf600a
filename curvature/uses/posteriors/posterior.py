"""A normal distribution over a model's parameters, and what follows from it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from curvature.linalg import (
    NotDefinite,
    cholesky_with_jitter,
    full_precision,
    matmul,
    psd_eigh,
    stack,
    try_cholesky,
    widen,
    widest,
)
from curvature.losses import LabelDistribution, Loss, Prediction
from curvature.matrices import DataSource, RecordedBatch, rows_of
from curvature.operators import BlockDiagonal, Dense, EigenKronecker, Operator, flat_parameters
from curvature.terms import OuterProduct, TermsByVector, chunks

ROWS_ELEMENTS = 1 << 24  # entries of the rows of a layer's Jacobian at a time
Prior = float | Tensor | Mapping[str, float]
TermsOfOutputs = Mapping[str, TermsByVector]  # by parameter, of each entry of the output


@dataclass(frozen=True)
class DataFit:
    """How likely the data are: the summed loss, and what the constant of the likelihood depends on, scalars."""

    loss: Loss
    labels: LabelDistribution
    total: Tensor
    count: Tensor

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
        with self._known_precision():
            inverse = self.precision.inverse()
        assert isinstance(inverse, BlockDiagonal)
        return inverse

    @contextmanager
    def _known_precision(self) -> Iterator[None]:
        """Say in terms of the prior that the precision cannot be inverted."""
        try:
            yield
        except NotDefinite as error:
            larger = [float(f"{value * error.needed / error.damping:.2g}") for value in self.prior.reshape(-1).tolist()]
            dtype = str(self.curvature.space.dtype).removeprefix("torch.")
            raise ValueError(
                f"prior: {_shown(self.prior.reshape(-1).tolist())} is below the rounding of {dtype} beside this "
                f"curvature; take posterior.with_prior({_shown(larger)}), or laplace() of model.double()"
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
        if not torch.equal(flat_parameters(self.curvature.space, self.model), self.mean):
            raise RuntimeError("model: its parameters have changed since the posterior was made; call laplace() again")
        results: list[tuple[Tensor, Tensor]] = []

        def visit(run: RecordedBatch) -> None:
            require_no_draws(run)
            dtype = torch.promote_types(run.output.dtype, torch.float32)
            results.append((run.output.detach(), output_covariance(run, self.covariance).to(dtype)))

        DataSource(self.model, self.fit.loss, (x, None), parameters=self.curvature.space.names).each(visit)
        return results[0]

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
            return labels.marginal(f, covariance.diagonal(dim1=1, dim2=2).reshape(f.shape).to(f), self.noise)
        values, vectors = psd_eigh(covariance)
        generator = generator or self.curvature.space.generator()
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
        with self._known_precision():
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

    def optimize_prior(self, *, per_layer: bool = False, steps: int = 50) -> LaplacePosterior:
        """The posterior with the prior precision, and for ``nn.MSELoss`` the noise, of largest marginal likelihood.

        L-BFGS in log space on `log_marginal_likelihood`; mean and curvature stay.

        Args:
            per_layer: whether each layer gets its own precision.
            steps: of L-BFGS, at most.

        Raises:
            ValueError: there is no maximum (where the outputs meet the labels exactly, none of the noise).
        """
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
        return self.with_prior(prior, noise if has_noise else None)

    def __repr__(self) -> str:
        loss = type(self.fit.loss).__name__
        prior = ", ".join(f"{value:.4g}" for value in self.prior.reshape(-1).tolist())
        noise = f", noise {float(self.noise):.4g}" if self.fit.labels.has_noise else ""
        return f"LaplacePosterior({loss}, {len(self.mean)} parameters, prior {prior}{noise})"


def _shown(prior: list[float]) -> str:
    one, *others = [f"{value:.3g}" for value in prior]
    return f"[{', '.join([one, *others])}]" if others else one


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
    own = {name: terms[name] for name in block.space.names if name in terms}
    covariances = []
    for part in chunks(count, ROWS_ELEMENTS, outputs * block.space.size):
        some = ({name: [t.samples(part) for t in of[k]] for name, of in own.items()} for k in range(outputs))
        rows = torch.stack([rows_of(block.space, row, part.stop - part.start) for row in some], 1)  # (n, c, p)
        spread = (block @ rows.flatten(0, 1).T).T.reshape(rows.shape)
        covariances.append(matmul(rows, spread.mT))
    return torch.cat(covariances)


# -- the curvature of the summed negative log-likelihood plus a prior precision for each layer


class Precision(Operator):
    """``M + prior``. The prior, a number or (P,), counts as exact: solves and draws take it as the damping of M, whose
    eigenvalues may be so large that their rounding exceeds it."""

    def __init__(self, curvature: Operator, prior: Tensor) -> None:
        super().__init__(curvature.space)
        self.curvature, self.prior = curvature, prior.to(self.space.device, self.space.dtype)

    def _matmat(self, V: Tensor) -> Tensor:
        return self.curvature._matmat(V) + self.prior.reshape(-1, 1) * V

    def to_dense(self) -> Tensor:
        return self.curvature.to_dense() + self._each().diag()

    def diagonal(self) -> Tensor:
        return self.curvature.diagonal() + self.prior

    def trace(self) -> Tensor:
        return self.curvature.trace() + self._each().sum()

    def state(self) -> dict[str, Any]:
        if self.prior.ndim:
            return Dense(self.space, self.to_dense()).state()
        return self.curvature.damped(float(self.prior)).state()

    def _eigenvalues(self) -> Tensor:
        return super()._eigenvalues() if self.prior.ndim else self.curvature._eigenvalues() + self.prior

    def _each(self) -> Tensor:
        return self.prior.expand(self.space.size)

    def _damped(self, damping: float) -> tuple[Operator, float, Tensor]:
        """``N, d, r`` with ``M + prior + damping = diag(1 / r) (N + d I) diag(1 / r)``, r (P, 1), or (1,) for ones."""
        if not self.prior.ndim:
            return self.curvature, float(self.prior) + damping, self.prior.new_ones(1)
        r = (self.prior + damping).rsqrt()[:, None]
        return Dense(self.space, r * self.curvature.to_dense() * r.T), 1.0, r

    def _solve(self, V: Tensor, damping: float) -> Tensor:
        N, d, r = self._damped(damping)
        return r * N._solve(r * V, d)

    def _inverse_root(self, Z: Tensor, damping: float) -> Tensor:
        N, d, r = self._damped(damping)
        return r * N._inverse_root(Z, d)

    def inverse(self, damping: float = 0.0) -> Operator:
        N, d, r = self._damped(float(damping))
        inverse = N.inverse(d)
        return Dense(self.space, r * inverse.to_dense() * r.T) if self.prior.ndim else inverse

    def logdet(self, damping: float = 0.0) -> Tensor:
        N, d, r = self._damped(float(damping))
        return N.logdet(d) - 2 * r.log().sum()


class LayeredCurvature:
    """M by layers, so that ``factor * M + prior`` and its log-determinant are quick for any factor and prior."""

    def __init__(self, matrix: BlockDiagonal) -> None:
        self.space = matrix.space
        # Damping by nothing leaves Kronecker products in their eigenbasis, which is computed once.
        self.blocks = [block.damped(0.0) for block in matrix.blocks.values()]
        # a block belongs to the layer of its first parameter, unless it is the only one and spans them all
        spans_all = len(self.blocks) == 1
        names = ((name, block.space.names[0]) for block in self.blocks for name in block.space.names)
        owners = {name: module_of(name if spans_all else first) for name, first in names}
        self.layers = tuple(dict.fromkeys(owners[name] for name in self.space.names))
        self.layer_of = {name: self.layers.index(owners[name]) for name in self.space.names}
        self._spectra: dict[int, Tensor] = {}
        self._semidefinite: dict[int, Tensor] = {}

    def sums_by_layer(self, each: Tensor) -> Tensor:
        """Sums over the entries of each layer: (P,) to (layers,), in the widest precision."""
        each = widen(each)
        sizes = zip(self.space.names, self.space.sizes, strict=True)
        where = torch.cat([each.new_full((size,), self.layer_of[name], dtype=torch.long) for name, size in sizes])
        return each.new_zeros(len(self.layers)).index_add_(0, where, each)

    def prior(self, given: Any) -> Tensor:
        """A prior precision as a tensor: a scalar, or (layers,)."""
        if isinstance(given, Mapping):
            if set(given) != set(self.layers):
                raise ValueError(f"prior: expected a precision for each of {list(self.layers)}, found {list(given)}")
            given = torch.stack([positive("prior", given[layer], self.space.device) for layer in self.layers])
        prior = positive("prior", given, self.space.device)
        if prior.ndim and prior.shape != (len(self.layers),):
            raise ValueError(
                f"prior: expected a number, or one for each of the {len(self.layers)} layers {list(self.layers)}; "
                f"found shape {tuple(prior.shape)}"
            )
        return prior

    def precision(self, factor: Tensor, prior: Tensor) -> BlockDiagonal:
        """``factor * M + prior``."""
        scaled, prior = float(factor), prior.detach()
        return BlockDiagonal(self.space, [Precision(b.scaled(scaled), self._prior_of(b, prior)) for b in self.blocks])

    def _prior_of(self, block: Operator, prior: Tensor) -> Tensor:
        """The prior precision of a block: a scalar, or (p,) where it spans several layers with their own."""
        if prior.ndim == 0:
            return prior
        layers = [self.layer_of[name] for name in block.space.names]
        if len(set(layers)) == 1:
            return prior[layers[0]]
        sizes = zip(layers, block.space.sizes, strict=True)
        return torch.cat([prior[layer].expand(size) for layer, size in sizes])

    def logdet(self, factor: Tensor, prior: Tensor) -> Tensor:
        """``log det(factor * M + prior)``, differentiable in both."""
        return stack(self._logdet(k, factor, prior) for k in range(len(self.blocks))).sum().to(self.space.device)

    def _logdet(self, number: int, factor: Tensor, prior: Tensor) -> Tensor:
        block = self.blocks[number]
        factor, block_prior = (x.to(block.space.device) for x in (factor, self._prior_of(block, prior)))
        if block_prior.ndim:
            if number not in self._semidefinite:  # despite rounding, so that every positive prior has a determinant
                values, vectors = psd_eigh(widen(block.to_dense()))
                self._semidefinite[number] = matmul(vectors * values, vectors.mT)
            matrix = factor * self._semidefinite[number] + block_prior.diag()
            root, ok = try_cholesky(matrix)
            if not bool(ok):
                root = cholesky_with_jitter(matrix, f"the precision of {', '.join(block.space.names)}")
            return 2 * root.diagonal().log().sum()
        if number not in self._spectra:
            self._spectra[number] = widen(block.eigenvalues()).clamp(min=0)
        return (factor * self._spectra[number] + block_prior).log().sum()


def positive(what: str, given: Any, device: torch.device) -> Tensor:
    """A positive number, or several, as a tensor in the widest precision of the device."""
    if not isinstance(given, Tensor | int | float) or isinstance(given, bool):
        raise TypeError(f"{what}: expected a positive number or a tensor, found {given!r:.80}")
    values = torch.as_tensor(given, dtype=widest(device.type), device=device)
    if not bool(((values > 0) & (values < math.inf)).all()):
        raise ValueError(f"{what}: expected positive, finite numbers, found {given}")
    return values


def noise_of(given: Any, device: torch.device) -> Tensor:
    value = positive("noise", given, device)
    if value.ndim:
        raise ValueError(f"noise: expected a single number, found shape {tuple(value.shape)}")
    return value


def module_of(name: str) -> str:
    """The name of the module that holds a parameter; that of the parameter where it is the model itself."""
    return name.rpartition(".")[0] or name
