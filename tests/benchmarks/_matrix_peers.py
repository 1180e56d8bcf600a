"""Curvature matrices: one adapter per peer and quantity.

`run` does the work of one call, `named` makes of its result what can be compared: a diagonal by parameter, or the
products with `vectors`, by parameter. Each draws anew at every run where the quantity is random.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from _matrix_references import by_parameter, times_kronecker, vectors
from _peers import BackPACK
from _rows import Method, Named
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvature

PROBES = 3  # vectors by which Kronecker factors are compared


class Matrix(Method):
    """Base."""

    def named(self, result: Any) -> Named:
        """What is compared with the reference."""
        return result


class Curvature(Matrix):
    """A builder of ours."""

    def __init__(self, *setting: Any, build: Callable[..., Any], inject: Any) -> None:
        super().__init__(*setting)
        self.build, self.inject = build, inject
        self.generator = torch.Generator(self.x.device).manual_seed(0)

    def run(self) -> Any:
        return self.build(self.model, self.loss, (self.x, self.y), self.inject, generator=self.generator)

    def named(self, result: Any) -> Named:
        return result if isinstance(result, dict) else by_parameter(self.model, result @ vectors(self.model, PROBES))


class BackPACKDiagonal(BackPACK, Matrix):
    name, attribute = "DiagGGNExact", "diag_ggn_exact"


class BackPACKSampled(BackPACK, Matrix):
    name, attribute, options = "DiagGGNMC", "diag_ggn_mc", {"mc_samples": 1}


class NNGeometry(Matrix):
    """`FIM`, or `FIM_MonteCarlo` of one trial, as `PMatDiag` or `PMatKFAC`."""

    def __init__(self, *setting: Any, metric: str, form: str) -> None:
        super().__init__(*setting)
        self.metric, self.form = metric, form

    def run(self) -> Any:
        import nngeometry.object as forms
        from nngeometry import metrics

        make = getattr(metrics, self.metric)
        return make(self.model, (self.x, self.y), getattr(forms, self.form), device=self.x.device)

    def named(self, result: Any) -> Named:
        if self.form == "PMatKFAC":
            return times_kronecker(self.model, result.data, vectors(self.model, PROBES))
        return {name: part[0] for name, part in by_parameter(self.model, result.get_diag()[:, None]).items()}


class CurvlinopsFactors(Matrix):
    """`KFACLinearOperator`, its check for determinism off, the sizes of the data given: no pass but the one needed."""

    def __init__(self, *setting: Any, kind: str) -> None:
        super().__init__(*setting)
        self.kind, self.seeds = kind, itertools.count()

    def run(self) -> Any:
        from curvlinops import KFACLinearOperator

        operator = KFACLinearOperator(
            self.model, self.loss, list(self.parameters.values()), [(self.x, self.y)], check_deterministic=False,
            seed=next(self.seeds), fisher_type=self.kind, num_per_example_loss_terms=self.y[0].numel(),
            separate_weight_and_bias=False, num_data=len(self.x),
        )  # fmt: skip
        operator.compute_kronecker_factors()
        return operator

    def named(self, result: Any) -> Named:
        return by_parameter(self.model, result @ vectors(self.model, PROBES))


class Products(Matrix):
    """`curvature.gauss_newton` or `hessian` times some columns, inside `curvature.kept`; the operator is made once."""

    def __init__(self, *setting: Any, count: int, name: str) -> None:
        super().__init__(*setting)
        self.name, self.columns = name, vectors(self.model, count)
        self.operator = self.made()

    def made(self) -> Any:
        operator, self.block = getattr(curvature, self.name)(self.model, self.loss, (self.x, self.y)), ExitStack()
        self.block.enter_context(curvature.kept(operator))
        return operator

    def run(self) -> Tensor:
        return self.operator @ self.columns

    def named(self, result: Any) -> Named:
        return by_parameter(self.model, result)


class CurvlinopsProducts(Products):
    """Fused attention, which torch cannot differentiate twice, is turned off."""

    def made(self) -> Any:
        import curvlinops

        data, parameters = [(self.x, self.y)], list(self.parameters.values())
        return getattr(curvlinops, self.name)(self.model, self.loss, parameters, data, check_deterministic=False)

    def run(self) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return super().run()


class BackPACKProducts(Products):
    """Its functions in `hessianfree`, vector by vector through one graph, fused attention turned off."""

    def made(self) -> Any:
        from backpack.hessianfree import ggnvp, hvp

        return {"ggn": ggnvp.ggn_vector_product, "hessian": hvp.hessian_vector_product}[self.name]

    def run(self) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            output, parameters = self.model(self.x), list(self.parameters.values())
            value = self.loss(output, self.y)
            given = (value, output, self.model) if self.name == "ggn" else (value, parameters)
            found = []
            for v in self.columns.unbind(1):
                parts = zip(v.split([p.numel() for p in parameters]), parameters, strict=True)
                product = self.operator(*given, [part.reshape(p.shape) for part, p in parts])
                found.append(torch.cat([g.flatten() for g in product]))
            return torch.stack(found, 1)


Kinds = dict[str, Callable[..., Matrix]]
SAMPLED, EXACT = curvature.sampled(1), curvature.exact()
DIAGONAL: Kinds = {
    "curvature": partial(Curvature, build=curvature.fisher_diagonal, inject=EXACT),
    "BackPACK": BackPACKDiagonal,
    "nngeometry": partial(NNGeometry, metric="FIM", form="PMatDiag"),
}
SAMPLED_DIAGONAL: Kinds = {
    "curvature": partial(Curvature, build=curvature.fisher_diagonal, inject=SAMPLED),
    "BackPACK": BackPACKSampled,
    "nngeometry": partial(NNGeometry, metric="FIM_MonteCarlo", form="PMatDiag"),
}
FACTORS: Kinds = {
    "curvature": partial(Curvature, build=curvature.kfac, inject=EXACT),
    "curvlinops": partial(CurvlinopsFactors, kind="type-2"),
    "nngeometry": partial(NNGeometry, metric="FIM", form="PMatKFAC"),
}
SAMPLED_FACTORS: Kinds = {
    "curvature": partial(Curvature, build=curvature.kfac, inject=SAMPLED),
    "curvlinops": partial(CurvlinopsFactors, kind="mc"),
    "nngeometry": partial(NNGeometry, metric="FIM_MonteCarlo", form="PMatKFAC"),
}
GAUSS_NEWTON: Kinds = {
    "curvature": partial(Products, name="gauss_newton"),
    "curvlinops": partial(CurvlinopsProducts, name="GGNLinearOperator"),
    "BackPACK": partial(BackPACKProducts, name="ggn"),
}
HESSIAN: Kinds = {
    "curvature": partial(Products, name="hessian"),
    "curvlinops": partial(CurvlinopsProducts, name="HessianLinearOperator"),
    "BackPACK": partial(BackPACKProducts, name="hessian"),
}
