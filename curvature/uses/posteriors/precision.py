"""The curvature of the summed negative log-likelihood plus a prior precision for each layer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from curvature.linalg import cholesky_with_jitter, matmul, psd_eigh, stack, try_cholesky, widen, widest
from curvature.operators import BlockDiagonal, Dense, Operator


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
