"""Laplace posteriors by dense inverses and determinants, and Bayesian linear regression by its textbook formulas."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from support.oracles.brute_force import Matrices, of_two, trainable


@dataclass
class Posterior:
    """Of the parameters at `index` in the flat vector.

    `matrix` (p, p) is the curvature of the summed loss; `prior` (p,); `noise` where the loss is a sum of squares.
    """

    of: Matrices
    matrix: Tensor
    prior: Tensor
    noise: float | None
    index: Tensor

    @property
    def precision(self) -> Tensor:
        factor = 1.0 if self.noise is None else 0.5 / self.noise**2
        return factor * self.matrix + self.prior.diag()

    @property
    def covariance(self) -> Tensor:
        return torch.linalg.inv(self.precision)

    @property
    def mean(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in trainable(self.of.model).values()])[self.index]

    def output_covariance(self) -> Tensor:
        """(N, D, D) at the data's inputs."""
        rows = [jacobian[:, self.index] for _, jacobian in self.of.jacobians]
        return torch.stack([row @ self.covariance @ row.T for row in rows])

    def log_likelihood(self) -> Tensor:
        """Without the constants that only labels decide on."""
        total = torch.stack(
            [of_two(self.of.loss)(f, y) for (f, _), (_, y) in zip(self.of.jacobians, self.of.samples, strict=True)]
        ).sum()
        if self.noise is None:
            return -total
        entries = sum(f.numel() for f, _ in self.of.jacobians)
        return -total / (2 * self.noise**2) - entries * math.log(self.noise * math.sqrt(2 * math.pi))

    def log_marginal_likelihood(self) -> Tensor:
        normal = torch.distributions.Normal(0.0, self.prior.rsqrt())
        size = len(self.mean)
        return (
            self.log_likelihood()
            + normal.log_prob(self.mean).sum()
            + size / 2 * math.log(2 * math.pi)
            - torch.logdet(self.precision) / 2
        )


@dataclass
class LinearRegression:
    """``y = X w + noise e``, w normal around zero with precision `prior` (P,): everything in closed form."""

    X: Tensor
    y: Tensor
    prior: Tensor
    noise: float

    @property
    def covariance(self) -> Tensor:
        return torch.linalg.inv(self.X.T @ self.X / self.noise**2 + self.prior.diag())

    @property
    def mean(self) -> Tensor:
        return self.covariance @ self.X.T @ self.y / self.noise**2

    def predict(self, X: Tensor) -> tuple[Tensor, Tensor]:
        return X @ self.mean, torch.einsum("ni,ij,nj->n", X, self.covariance, X) + self.noise**2

    def log_evidence(self) -> Tensor:
        """Of y, normal with covariance ``X X^T / prior + noise^2``."""
        covariance = self.X @ (self.X / self.prior).T + self.noise**2 * torch.eye(len(self.X), dtype=self.X.dtype)
        return torch.distributions.MultivariateNormal(torch.zeros_like(self.y), covariance).log_prob(self.y)


def log_loss(posterior: Posterior, data: tuple[Tensor, Tensor]) -> float:
    """The summed ``-log p(y)`` of other data, by label and entry, with MacKay's probit for classes.

    Of counts by adding up a fine grid of normal log-rates; constants that only labels decide on are left out.
    """
    of, total = Matrices(posterior.of.model, posterior.of.loss, data), 0.0
    for (f, rows), (_, y) in zip(of.jacobians, of.samples, strict=True):
        J = rows[:, posterior.index]
        variance = (J @ posterior.covariance @ J.T).diagonal().reshape(f.shape)
        total += float(_of_label(posterior, f, variance, y).sum())
    return total


def _of_label(posterior: Posterior, f: Tensor, variance: Tensor, y: Tensor) -> Tensor:
    loss = posterior.of.loss
    if posterior.noise is not None:
        return -torch.distributions.Normal(f, (variance + posterior.noise**2).sqrt()).log_prob(y)
    if isinstance(loss, torch.nn.PoissonNLLLoss):
        z = torch.linspace(-8, 8, 4001, dtype=f.dtype)[:, None, None]
        weights = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
        rates = (f + variance.sqrt() * z).exp()
        return -(weights * rates.pow(y) * torch.exp(-rates)).sum(0).log()
    return loss(f / torch.sqrt(1 + math.pi * variance / 8), y)
