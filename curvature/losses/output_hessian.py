"""Curvature of a loss at the model's output: products with it, roots of it, and gradients at sampled labels.

For sample n, H is a curvature of the per-sample loss l_n at its rows of the output. l_n is a sum of *terms* times their
*masses* (1, or 1/T in a mean of T terms; class weights, ignored places, soft targets that do not sum to 1), and a term
of mass 1 has the H of its likelihood, which `table` names for each torch loss. For every other loss, H is the Hessian,
by differentiating twice. A root is a function eps -> S eps with ``S S^T = H``, S square, applied to every sample; a
product is u -> H u. Arguments and results have shape (k, *output.shape).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from curvature.functional import batched_vjp, require_second_derivatives
from curvature.linalg import symmetric_eigh
from curvature.losses.likelihoods import Likelihood
from curvature.losses.table import (
    TORCH_LOSSES,
    Loss,
    TorchLoss,
    name_of,
    per_sample_losses,
    reduction_of,
    resolve,
    term_masses,
)

LinearMap = Callable[[Tensor], Tensor]  # (k, *output.shape) to the same
Columns = tuple[int, Callable[[int, int], Tensor]]  # number of vectors; (start, stop) -> vectors start..stop
COLUMNS_PER_CHUNK = 64  # columns of H at a time


@dataclass(frozen=True)
class OutputCurvature:
    """H at one output."""

    product: Callable[[], LinearMap]  # builds the graph for products and returns u -> H u
    root: LinearMap | None = None  # eps -> S eps; None if only a decomposition of H gives it
    columns: Columns | None = None  # of a root of H, as few as possible; None if there is no `root`
    diagonal: Callable[[], Tensor] | None = None  # in the shape of the output; None if it needs products


@dataclass(frozen=True)
class OutputBatch:
    """An output (N*m, ...), m consecutive rows for each of ``count`` = N samples; no graph, float32 or float64."""

    output: Tensor
    loss: Any  # a `Loss`, or None where none is needed
    target: Any
    count: int
    generator: torch.Generator | None

    @staticmethod
    def of(
        output: Tensor, loss: Loss | None, target: Any, count: int | None, generator: torch.Generator | None
    ) -> OutputBatch:
        """Check the output, of which ValueErrors tell; ``count`` None means one row per sample."""
        if not isinstance(output, Tensor) or not output.is_floating_point():
            kind = output.dtype if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(f"output must be a real floating point tensor of shape (N, ...), got {kind}")
        if output.ndim == 0 or output.numel() == 0:
            raise ValueError(f"output must have at least one sample along dim 0, got shape {tuple(output.shape)}")
        count = len(output) if count is None else count
        if count < 1 or len(output) % count:
            raise ValueError(f"output must have rows for {count} samples along dim 0, got shape {tuple(output.shape)}")
        dtype = torch.promote_types(output.dtype, torch.float32)
        return OutputBatch(output.detach().to(dtype), loss, target, count, generator)

    def source(self, seed: int) -> torch.Generator:
        """The generator where the output is: the given one, one that it seeds, or one with this seed."""
        given, device = self.generator, self.output.device
        if given is not None and given.device == device:
            return given
        drawn = seed if given is None else torch.randint(2**62, (), generator=given, device=given.device)
        return torch.Generator(device).manual_seed(int(drawn))

    def flat(self, vectors: Tensor) -> Tensor:
        """(k, N*m, ...) to (k, N, D), with D the entries of one sample's output."""
        return vectors.reshape(len(vectors), self.count, -1)

    @property
    def size(self) -> int:
        """D, the number of entries of one sample's output."""
        return self.output.numel() // self.count

    def basis(self, start: int, stop: int) -> Tensor:
        """`unit_vectors` of entries start..stop of a sample's output."""
        return self.unit_vectors(torch.arange(start, stop, device=self.output.device))

    def unit_vectors(self, entries: Tensor) -> Tensor:
        """Unit vectors of these entries (k,) of a sample's output, the same for every sample: (k, *output.shape)."""
        vectors = self.output.new_zeros(len(entries), self.size).scatter_(1, entries[:, None], 1)
        return vectors[:, None].expand(-1, self.count, -1).reshape(len(entries), *self.output.shape)

    def signs(self, k: int, source: torch.Generator) -> Tensor:
        """1 or -1 for each entry of k vectors (k, *output.shape)."""
        return self.output.new_empty(k, *self.output.shape).random_(2, generator=source) * 2 - 1

    @cached_property
    def resolved(self) -> tuple[Any, TorchLoss | None]:
        """The loss in the form that this package knows, and its row if that says something of the Hessian."""
        loss = resolve(self.loss)
        reduction_of(loss)  # refuses "none"
        row = TORCH_LOSSES.get(type(loss))
        return loss, row if row is not None and (row.likelihood or row.is_diagonal) else None

    def curvature(self, is_expected: bool = True) -> OutputCurvature:
        """The Hessian of l_n or, where `is_expected` and it is a negative log-likelihood, its mean over labels."""
        loss, row = self.resolved
        if row is not None and row.likelihood is not None:
            masses = self.masses(signed=True)
            unit = row.likelihood(loss, self.output)
            product = lambda: lambda u: unit.product(u).mul_(masses)
            is_signed = self._may_be_negative(loss) and self._least_negative(masses) is not None
            if is_signed and unit.is_hessian:
                return OutputCurvature(product, diagonal=lambda: masses * unit.diagonal())
            if is_expected or unit.is_hessian:
                if is_signed:
                    self._require_semidefinite(masses)
                scale = masses.sqrt()
                return OutputCurvature(
                    product=product,
                    root=lambda eps: scale * unit.root(eps),
                    columns=self._columns(lambda eps: scale * unit.thin_root(eps), unit.spares_last_class),
                    diagonal=lambda: masses * unit.diagonal(),
                )
        if self.target is None and row is not None:
            raise self._missing_target()
        if row is None or not row.is_diagonal:
            return OutputCurvature(self.product)
        curves = self.product()(torch.ones_like(self.output)[None])[0]
        if self._least_negative(curves) is not None:
            return OutputCurvature(lambda: lambda u: curves * u, diagonal=lambda: curves)
        along = curves.clamp(min=0).sqrt()
        root = lambda eps: along * eps
        return OutputCurvature(lambda: lambda u: curves * u, root, self._columns(root))

    def root(self) -> LinearMap:
        """Return eps -> S eps with ``S S^T`` the `curvature` of every sample; nan where that is not finite."""
        if self.target is None and self.resolved[1] is None:
            raise self._missing_target()
        curvature = self.curvature()
        return curvature.root or self._root_by_eigh(curvature.product())

    def product(self) -> LinearMap:
        """Return u -> H u with H the Hessian of l_n, by differentiating l_n twice; the graph is built once, here."""
        point = self.output.detach().requires_grad_()
        with torch.enable_grad():
            losses = per_sample_losses(self.loss, point, self.target, self.count)
            if not losses.requires_grad:
                raise ValueError(f"{name_of(self.loss)} is not differentiable in the output")
            if type(self.resolved[0]) not in TORCH_LOSSES:
                instead = ". empirical() and isotropic() need no second derivative of the loss"
                require_second_derivatives([losses], f"{name_of(self.loss)}: its Hessian at the output", instead)
            # l_n depends on its own rows alone, so one backward pass serves all samples
            (slope,) = torch.autograd.grad(losses.sum(), point, create_graph=True, materialize_grads=True)
        if not slope.requires_grad:  # linear
            return torch.zeros_like

        def product(u: Tensor) -> Tensor:
            try:
                (products,) = batched_vjp([slope], [point], [u])
            except RuntimeError as error:
                raise RuntimeError(f"{name_of(self.loss)} cannot be differentiated twice: {error}") from error
            return torch.zeros_like(u) if products is None else products

        return product

    def masses(self, strict: bool = True, signed: bool = False) -> Tensor:
        """The mass of each term of the output in l_n; ValueError where one is negative, unless `signed`.

        1 if the loss is a sum, 1/T if it is a mean over T terms per sample; with class indices, the weight of the class
        (0 if ignored) over the sum of these; times ``pos_weight``, ``weight`` and the sum of a soft target. A callable
        counts as one term per sample. The shape is that of the output, with size 1 along a dim of classes. Without a
        target no place is ignored; weights that depend on it are then an error if `strict`, else they count 1.
        """
        (loss, row), output, target = self.resolved, self.output, self.target
        if row is None:
            return torch.ones_like(output)
        if row.classes is not None and output.ndim < 2:
            raise ValueError(f"{name_of(loss)} takes outputs of shape (N, C, ...), got {tuple(output.shape)}")
        if target is None:
            if strict and row.weight and getattr(loss, row.weight) is not None:
                raise ValueError(
                    f"{name_of(loss)} has {row.weight}=, which needs the target, and that is missing: pass target= (in "
                    "an optimizer, which does not see it, choose isotropic() or empirical())"
                )
            target = row.stand_in(output) if row.stand_in else None
        masses = torch.ones_like(output if row.classes is None else output[:, :1])
        if target is not None and row.probe is not None:
            measured = term_masses(loss, output, target, self.count).reshape(masses.shape)
            if not signed and self._may_be_negative(loss):
                self._require_semidefinite(measured)
            return measured
        terms = masses[:, : output.shape[1] // 2] if row.heads else masses
        if isinstance(target, Tensor) and row.classes is None:
            sizes = zip(reversed(target.shape), reversed(terms.shape), strict=False)
            # more terms than entries
            if target.ndim > terms.ndim or any(size not in (1, full) for size, full in sizes):
                raise ValueError(
                    f"{name_of(loss)} compares output {tuple(terms.shape)} and target {tuple(target.shape)} entry by "
                    "entry: give both the same shape"
                )
        # batchmean sums within a sample
        return masses / (terms.numel() // self.count) if getattr(loss, "reduction", "mean") == "mean" else masses

    def drawn_from(self) -> tuple[Likelihood, Tensor]:
        """The likelihood from which labels are drawn, and the roots of the terms' masses."""
        loss, row = self.resolved
        if row is None or row.likelihood is None:
            known = ", ".join(t.__name__ for t, row in TORCH_LOSSES.items() if row.likelihood is not None)
            raise ValueError(
                f"loss: sampled() draws labels from the likelihood of the loss, and {name_of(loss)} has none that is "
                f"known here. Pass one that has, as in loss=nn.CrossEntropyLoss(): {known}. Or choose isotropic(), "
                "which needs no loss, or, in a function that takes the targets, exact() or propagated()"
            )
        return row.likelihood(loss, self.output), self.masses().sqrt()

    def _columns(self, root: LinearMap, spares_last_class: bool = False) -> Columns:
        """The columns of a root, but for those of the last class if it spares them."""
        output = self.output
        each = output[0].numel()  # entries of a row, of which the last class has the last ones
        kept = each - each // output.shape[1] if spares_last_class and output.shape[1] > 1 else each

        def columns(start: int, stop: int) -> Tensor:
            position = torch.arange(start, stop, device=output.device)
            return root(self.unit_vectors(position // kept * each + position % kept))

        return self.size // each * kept, columns

    def _root_by_eigh(self, product: LinearMap) -> LinearMap:
        """A root of H by eigendecomposition, D x D for every sample."""
        size, count = self.size, self.count
        parts = torch.arange(size, device=self.output.device).split(COLUMNS_PER_CHUNK)
        matrix = torch.cat([product(self.unit_vectors(entries)) for entries in parts])
        matrix = matrix.reshape(size, count, size).movedim(0, 1)
        finite = matrix.isfinite().all(2).all(1)[:, None, None]
        values, vectors = symmetric_eigh(torch.where(finite, matrix, 0))
        self._require_semidefinite(values, size)
        root = torch.where(finite, vectors * values.clamp(min=0).sqrt()[:, None, :], math.nan)
        return lambda eps: torch.einsum("nij,knj->kni", root, eps.reshape(len(eps), count, size)).reshape(eps.shape)

    def _may_be_negative(self, loss: Any) -> bool:
        """Whether masses may be, which takes a look at their values."""
        is_soft = isinstance(self.target, Tensor) and self.target.is_floating_point()
        return is_soft or getattr(loss, "weight", None) is not None

    def _least_negative(self, values: Tensor, factor: int = 1) -> float | None:
        """The least value, if it is negative beyond ``factor`` times the rounding error of the largest."""
        finite = values.nan_to_num(0.0, 0.0)
        least = finite.amin()
        is_negative = least < -100 * factor * torch.finfo(values.dtype).eps * finite.abs().amax()
        return least.item() if is_negative else None

    def _require_semidefinite(self, values: Tensor, factor: int = 1) -> None:
        least = self._least_negative(values, factor)
        if least is not None:
            raise ValueError(
                f"{name_of(self.loss)} is not convex in the output: its Hessian there is not positive semi-definite "
                f"(found {least:.3g}), so it has no root. Use isotropic(), or a convex loss"
            )

    def _missing_target(self) -> ValueError:
        return ValueError(
            f"the Hessian of {name_of(self.loss)} depends on the target, which is missing: pass target= (in an "
            "optimizer, choose isotropic(), which needs none)"
        )
