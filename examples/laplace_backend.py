"""A backend for laplace-torch: its posteriors on this package's exact curvature, for every layer type.

    python examples/laplace_backend.py        # a network that laplace-torch's own backends refuse: it has a LayerNorm

Copy the file into your project, and give one of its classes to laplace-torch 0.3::

    la = Laplace(model, "classification", hessian_structure="kron", backend=CurvatureGGN)

In: what `laplace.curvature.CurvatureInterface` asks for. Out: numbers in its units, those of the loss summed over the
samples, halved for squared errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from laplace import Laplace
from laplace.curvature import CurvatureInterface, EFInterface, GGNInterface
from laplace.utils import Kron
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from curvature import (
    Injection,
    Kronecker,
    Operator,
    empirical,
    exact,
    fisher,
    fisher_diagonal,
    hessian,
    kfac,
    per_sample_gradients,
    per_sample_jacobians,
    sampled,
)

__all__ = ["CurvatureEF", "CurvatureGGN", "CurvatureHessian"]


class CurvatureBackend(CurvatureInterface):
    """What all backends share: Jacobians and gradients of single samples."""

    def jacobians(self, x: Any, enable_backprop: bool = False) -> tuple[Tensor, Tensor]:
        """Jacobians (N, *outputs, P) and outputs (N, *outputs); differentiable ones are laplace-torch's own."""
        if enable_backprop:
            return super().jacobians(x, enable_backprop=True)
        jacobians = per_sample_jacobians(self.model, arguments(x), parameters=self._names())
        parameters = dict(self.model.named_parameters())
        rows = [part.reshape(*part.shape[: part.ndim - parameters[name].ndim], -1) for name, part in jacobians.items()]
        return self._chosen(self._in_dtype(torch.cat(rows, -1))), self._outputs(x)

    def gradients(self, x: Any, y: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients (N, P) of the summed loss, and its value."""
        gradients = per_sample_gradients(self.model, self.lossfunc, arguments(x), y, parameters=self._names())
        rows = torch.cat([part.flatten(1) for part in gradients.values()], 1)
        return self._chosen(rows), self.lossfunc(self._outputs(x), y)

    def _problem(self, x: Any, y: Tensor) -> tuple[nn.Module, Any, tuple[Any, Tensor]]:
        return self.model, self.lossfunc, (arguments(x), y)

    def _options(self) -> dict[str, Any]:
        """The parameters, and a generator that goes on with torch's global random numbers, as laplace-torch's draws."""
        seed = int(torch.randint(1 << 62, (), device="cpu"))
        generator = torch.Generator(self.params[0].device).manual_seed(seed)
        return {"parameters": self._names(), "generator": generator}

    def _names(self) -> list[str]:
        """The parameters of the posterior: with `last_layer` those of that layer."""
        chosen = set(map(id, self.params))
        return [name for name, p in self.model.named_parameters() if id(p) in chosen]

    def _in_dtype(self, tensor: Tensor) -> Tensor:
        """In the precision of the model, which laplace-torch goes on in; sums here are in single precision at least."""
        return tensor.to(self.params[0].dtype)

    def _chosen(self, rows: Tensor) -> Tensor:
        return rows if self.subnetwork_indices is None else rows[..., self.subnetwork_indices]

    def _outputs(self, x: Any) -> Tensor:
        with torch.no_grad():
            return self.model(x)

    def _loss(self, x: Any, y: Tensor) -> Tensor:
        return self.factor * self.lossfunc(self._outputs(x), y)


class FisherBackend(CurvatureBackend):
    """Matrices that are sums of outer products of backpropagated vectors."""

    def inject(self, mc_samples: int | None) -> Injection:
        """The vectors whose outer products make up the matrix."""
        raise NotImplementedError

    def full(self, x: Any, y: Tensor, N: int | None = None, mc_samples: int | None = None) -> tuple[Tensor, Tensor]:
        """Loss and matrix (P, P) of this batch, whatever the number N of all samples."""
        matrix = fisher(*self._problem(x, y), self.inject(mc_samples), **self._options()).to_dense()
        return self._loss(x, y), self.factor * self._chosen(self._chosen(self._in_dtype(matrix)).mT)

    def diag(self, x: Any, y: Tensor, N: int | None = None, mc_samples: int | None = None) -> tuple[Tensor, Tensor]:
        """Loss and diagonal (P,) of the matrix of this batch."""
        by_name = fisher_diagonal(*self._problem(x, y), self.inject(mc_samples), **self._options())
        diagonal = torch.cat([part.flatten() for part in by_name.values()])
        return self._loss(x, y), self.factor * self._chosen(self._in_dtype(diagonal))

    def kron(
        self, x: Any, y: Tensor, N: int, kfac_approx: str = "expand", mc_samples: int | None = None
    ) -> tuple[Tensor, Kron]:
        """Loss and Kronecker factors of this batch, of N samples in all: activations weigh 1 / N, backprops add up.

        Args:
            kfac_approx: "expand" or "reduce", see ``sharing`` of `curvature.kfac`.
            mc_samples: labels to draw, where the backend is stochastic; by default its own number. Both as for
                laplace-torch's curvlinops backend.

        Raises:
            NotImplementedError: a parameter has no pair of factors that laplace-torch can hold.
        """
        dense = vectors_dense(self.model, self._names())
        problem, inject = self._problem(x, y), self.inject(mc_samples)
        K = kfac(*problem, inject, sharing=kfac_approx, structure=dense, **self._options())
        pairs = {name: factors(block, name, len(y), N) for block in K.blocks.values() for name in block.space.names}
        return self._loss(x, y), self.factor * Kron(
            [[self._in_dtype(side) for side in pairs[name]] for name in K.space.names]
        )


class CurvatureGGN(FisherBackend, GGNInterface):
    """The Gauss-Newton matrix, or with ``stochastic=True`` the Fisher matrix from `num_samples` drawn labels."""

    def inject(self, mc_samples: int | None) -> Injection:
        return sampled(mc_samples or self.num_samples) if self.stochastic else exact()


class CurvatureEF(FisherBackend, EFInterface):
    """The empirical Fisher matrix, of the gradients at the labels.

    As in laplace-torch the matrix of squared errors, whose gradients are twice those of the log-likelihood, is halved.
    """

    def inject(self, mc_samples: int | None) -> Injection:
        return empirical()


class CurvatureHessian(CurvatureBackend):
    """The Hessian: full or its diagonal. It has no Kronecker factors."""

    def full(self, x: Any, y: Tensor, N: int | None = None) -> tuple[Tensor, Tensor]:
        matrix = hessian(*self._problem(x, y), parameters=self._names()).to_dense()
        return self._loss(x, y), self.factor * self._chosen(self._chosen(self._in_dtype(matrix)).mT)

    def diag(self, x: Any, y: Tensor, N: int | None = None) -> tuple[Tensor, Tensor]:
        diagonal = hessian(*self._problem(x, y), parameters=self._names()).diagonal()
        return self._loss(x, y), self.factor * self._chosen(self._in_dtype(diagonal))

    def kron(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Kron]:
        raise NotImplementedError("the Hessian has no Kronecker factors; take CurvatureGGN or CurvatureEF")


def vectors_dense(model: nn.Module, names: list[str]) -> dict[str, str]:
    """Exact blocks for layers of vectors alone (norms): laplace-torch holds a whole block for a vector anyway."""
    trained = {name: p for name, p in model.named_parameters() if name in names}
    layers = {name.rpartition(".")[0] for name in trained} - {""}
    vectors = {layer: all(p.ndim == 1 for n, p in trained.items() if n.rpartition(".")[0] == layer) for layer in layers}
    return {layer: "dense" for layer, are_all in vectors.items() if are_all}


def arguments(x: Any) -> Any:
    """laplace-torch hands a dict on as one argument."""
    return (dict(x),) if isinstance(x, Mapping) else x


def factors(block: Operator, name: str, here: int, all_of_them: int) -> list[Tensor]:
    """A pair of factors for a weight, the exact block of a vector; sums of these over batches are those of all data.

    laplace-torch adds pairs factor by factor, so that the first is to be a sum over samples, the second a mean.

    Args:
        here, all_of_them: samples of this batch and of all.

    Raises:
        NotImplementedError: there is no such pair.
    """
    shape = dict(zip(block.space.names, map(torch.Size, block.space.shapes), strict=True))[name]
    if len(shape) == 1:
        return [vector_block(block, name)]
    instead = 'use hessian_structure="full" or "diag", or curvature.laplace'
    if not isinstance(block, Kronecker) or block.sides[0] > 1:
        raise NotImplementedError(
            f"{name}: laplace-torch wants one pair of Kronecker factors, found {block!r}; {instead}"
        )
    inputs = shape.numel() // block.sides[1]
    rows, columns = square(block.rows), square(block.columns)[:inputs, :inputs]
    if block.arrangement.order is None:
        return [rows, here / all_of_them * columns]
    if len(shape) == 2:  # its first axis are the inputs
        return [here * columns, rows / all_of_them]
    raise NotImplementedError(
        f"{name}: laplace-torch wants the outputs along the first axis, found the shape {tuple(shape)}; {instead}"
    )


def square(side: Tensor) -> Tensor:
    """A factor (1, d, d), or its diagonal (1, d), as (d, d)."""
    return torch.diag_embed(side[0]) if side.ndim == 2 else side[0]


def vector_block(block: Operator, name: str) -> Tensor:
    """The block of a bias, or of the scale or shift of a norm."""
    weight = block.space.names[0]
    if isinstance(block, Kronecker) and name != weight and block.sides[0] == 1:
        return square(block.columns)[-1, -1] * square(block.rows)
    positions = block.space.positions([name])
    unit = torch.zeros(block.space.size, len(positions), dtype=block.space.dtype, device=block.space.device)
    unit[positions, torch.arange(len(positions), device=positions.device)] = 1
    return (block @ unit)[positions]


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(200, 4)
    y = (x[:, :2] + torch.randn(200, 2) > 0).sum(1)
    model = nn.Sequential(nn.Linear(4, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(50):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    for structure in ("full", "kron", "diag"):
        la = Laplace(model, "classification", "all", structure, backend=CurvatureGGN)
        la.fit(DataLoader(TensorDataset(x, y), 20))
        la.optimize_prior_precision()
        evidence = float(la.log_marginal_likelihood())
        print(f"{structure}: prior precision {float(la.prior_precision):.3g}, log marginal likelihood {evidence:.2f}")


if __name__ == "__main__":
    main()
