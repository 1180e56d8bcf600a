"""Curvature matrices: one adapter per peer and quantity.

`run` does the work of one call, `named` makes of its result what can be compared: a diagonal by parameter, or the
products with `vectors`, by parameter. Each draws anew at every run where the quantity is random.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from typing import Any

import torch
from _matrix_references import by_parameter, times_kronecker, vectors
from _peers import BackPACK
from _rows import Method, Named
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

PROBES = 3  # vectors by which Kronecker factors are compared


class Matrix(Method):
    """Base."""

    def named(self, result: Any) -> Named:
        """What is compared with the reference."""
        return result


class Diagonal(Matrix):
    """`curvature.fisher_diagonal`."""

    def __init__(self, *setting: Any) -> None:
        super().__init__(*setting)
        self.generator = torch.Generator(self.x.device).manual_seed(0)

    def inject(self) -> Any:
        import curvature

        return curvature.exact()

    def run(self) -> Any:
        import curvature

        data = self.x, self.y
        return curvature.fisher_diagonal(self.model, self.loss, data, self.inject(), generator=self.generator)


class SampledDiagonal(Diagonal):
    """The same with one label drawn for each sample."""

    def inject(self) -> Any:
        import curvature

        return curvature.sampled(1)


class Factors(Diagonal):
    """`curvature.kfac`."""

    def run(self) -> Any:
        import curvature

        return curvature.kfac(self.model, self.loss, (self.x, self.y), self.inject(), generator=self.generator)

    def named(self, result: Any) -> Named:
        return by_parameter(self.model, result @ vectors(self.model, PROBES))


class SampledFactors(Factors, SampledDiagonal):
    """The same with one label drawn for each sample."""


class BackPACKDiagonal(BackPACK, Matrix):
    """`DiagGGNExact`."""

    attribute = "diag_ggn_exact"

    def extension(self) -> object:
        from backpack.extensions import DiagGGNExact

        return DiagGGNExact()

    def run(self) -> Named:
        return self.backward()


class BackPACKSampledDiagonal(BackPACKDiagonal):
    """`DiagGGNMC`."""

    attribute = "diag_ggn_mc"

    def extension(self) -> object:
        from backpack.extensions import DiagGGNMC

        return DiagGGNMC(mc_samples=1)


class NNGeometryDiagonal(Matrix):
    """`FIM` as `PMatDiag`."""

    def made(self, form: str) -> Any:
        import nngeometry.object as forms
        from nngeometry import metrics

        return metrics.FIM(self.model, (self.x, self.y), getattr(forms, form), device=self.x.device)

    def run(self) -> Any:
        return self.made("PMatDiag")

    def named(self, result: Any) -> Named:
        return {name: part[0] for name, part in by_parameter(self.model, result.get_diag()[:, None]).items()}


class NNGeometrySampledDiagonal(NNGeometryDiagonal):
    """`FIM_MonteCarlo` of one trial."""

    def made(self, form: str) -> Any:
        import nngeometry.object as forms
        from nngeometry import metrics

        return metrics.FIM_MonteCarlo(self.model, (self.x, self.y), getattr(forms, form), device=self.x.device)


class NNGeometryFactors(NNGeometryDiagonal):
    """`FIM` as `PMatKFAC`."""

    def run(self) -> Any:
        return self.made("PMatKFAC")

    def named(self, result: Any) -> Named:
        return times_kronecker(self.model, result.data, vectors(self.model, PROBES))


class NNGeometrySampledFactors(NNGeometryFactors, NNGeometrySampledDiagonal):
    """`FIM_MonteCarlo` as `PMatKFAC`."""


class CurvlinopsFactors(Matrix):
    """`KFACLinearOperator`, its check for determinism off, the sizes of the data given: no pass but the one needed."""

    kind = "type-2"

    def __init__(self, *setting: Any) -> None:
        super().__init__(*setting)
        self.seeds = itertools.count()

    def run(self) -> Any:
        from curvlinops import KFACLinearOperator

        operator = KFACLinearOperator(
            self.model,
            self.loss,
            list(self.parameters.values()),
            [(self.x, self.y)],
            check_deterministic=False,
            seed=next(self.seeds),
            fisher_type=self.kind,
            num_per_example_loss_terms=self.y[0].numel(),
            separate_weight_and_bias=False,
            num_data=len(self.x),
        )
        operator.compute_kronecker_factors()
        return operator

    def named(self, result: Any) -> Named:
        return by_parameter(self.model, result @ vectors(self.model, PROBES))


class CurvlinopsSampledFactors(CurvlinopsFactors):
    """The same with one label drawn for each sample."""

    kind = "mc"


class Products(Matrix):
    """`curvature.gauss_newton` times some columns, inside `curvature.kept`; the operator is made once, beforehand."""

    def __init__(self, *setting: Any, count: int) -> None:
        super().__init__(*setting)
        self.columns = vectors(self.model, count)
        self.operator = self.made()

    def made(self) -> Any:
        import curvature

        return self.kept(curvature.gauss_newton(self.model, self.loss, (self.x, self.y)))

    def kept(self, operator: Any) -> Any:
        import curvature

        self.block = ExitStack()
        self.block.enter_context(curvature.kept(operator))
        return operator

    def run(self) -> Tensor:
        return self.operator @ self.columns

    def named(self, result: Any) -> Named:
        return by_parameter(self.model, result)


class HessianProducts(Products):
    """The same of `curvature.hessian`."""

    def made(self) -> Any:
        import curvature

        return self.kept(curvature.hessian(self.model, self.loss, (self.x, self.y)))


class CurvlinopsProducts(Products):
    """`GGNLinearOperator`. Fused attention, which torch cannot differentiate twice, is turned off."""

    def made(self) -> Any:
        return self.of("GGNLinearOperator")

    def of(self, kind: str) -> Any:
        import curvlinops

        data, parameters = [(self.x, self.y)], list(self.parameters.values())
        return getattr(curvlinops, kind)(self.model, self.loss, parameters, data, check_deterministic=False)

    def run(self) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return super().run()


class CurvlinopsHessianProducts(CurvlinopsProducts):
    """`HessianLinearOperator`."""

    def made(self) -> Any:
        return self.of("HessianLinearOperator")


class BackPACKProducts(Products):
    """`hessianfree.ggn_vector_product`, vector by vector through one graph, fused attention turned off."""

    def made(self) -> Any:
        from backpack.hessianfree.ggnvp import ggn_vector_product

        return ggn_vector_product

    def product(self, output: Tensor, value: Tensor, v: list[Tensor]) -> Any:
        return self.operator(value, output, self.model, v)

    def run(self) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            output = self.model(self.x)
            value = self.loss(output, self.y)
            found = []
            for v in self.columns.unbind(1):
                parts = v.split([p.numel() for p in self.parameters.values()])
                pairs = zip(parts, self.parameters.values(), strict=True)
                shaped = [part.reshape(p.shape) for part, p in pairs]
                found.append(torch.cat([g.flatten() for g in self.product(output, value, shaped)]))
            return torch.stack(found, 1)


class BackPACKHessianProducts(BackPACKProducts):
    """`hessianfree.hessian_vector_product`."""

    def made(self) -> Any:
        from backpack.hessianfree.hvp import hessian_vector_product

        return hessian_vector_product

    def product(self, output: Tensor, value: Tensor, v: list[Tensor]) -> Any:
        return self.operator(value, list(self.parameters.values()), v)


Kinds = dict[str, type[Matrix]]
DIAGONAL: Kinds = {"curvature": Diagonal, "BackPACK": BackPACKDiagonal, "nngeometry": NNGeometryDiagonal}
SAMPLED_DIAGONAL: Kinds = {
    "curvature": SampledDiagonal,
    "BackPACK": BackPACKSampledDiagonal,
    "nngeometry": NNGeometrySampledDiagonal,
}
FACTORS: Kinds = {"curvature": Factors, "curvlinops": CurvlinopsFactors, "nngeometry": NNGeometryFactors}
SAMPLED_FACTORS: Kinds = {
    "curvature": SampledFactors,
    "curvlinops": CurvlinopsSampledFactors,
    "nngeometry": NNGeometrySampledFactors,
}
GAUSS_NEWTON: Kinds = {"curvature": Products, "curvlinops": CurvlinopsProducts, "BackPACK": BackPACKProducts}
HESSIAN: Kinds = {
    "curvature": HessianProducts,
    "curvlinops": CurvlinopsHessianProducts,
    "BackPACK": BackPACKHessianProducts,
}
