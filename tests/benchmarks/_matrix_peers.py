"""Curvature matrices by the definitions, for mean cross-entropy, which `matrices.py` checks all against, and by peers.

`run` does the work of one call, `named` makes of its result what can be compared: a diagonal by parameter, or the
products with `vectors`, columns (P, c), by parameter, (c, *shape). Each draws anew where the quantity is random.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from _networks import LOSS, Workload
from _peers import BackPACK
from _rows import Method, Named
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import curvature

STEP = 1e-10  # of finite differences in double precision; longer, ReLUs switch on the way and Hessians jump
trained = lambda model: {name: p for name, p in model.named_parameters() if p.requires_grad}
_flat = lambda tensors: torch.cat([t.flatten() for t in tensors])


def vectors(model: nn.Module, count: int) -> Tensor:
    """The same columns (P, count) for every method."""
    first = next(model.parameters())
    size = sum(p.numel() for p in trained(model).values())
    return torch.randn(size, count, generator=torch.Generator().manual_seed(1)).to(first)


def by_parameter(model: nn.Module, columns: Tensor) -> Named:
    """(P, c) to {name: (c, *shape)}."""
    named = trained(model)
    parts = columns.T.split([p.numel() for p in named.values()], 1)
    return {name: part.reshape(-1, *p.shape) for (name, p), part in zip(named.items(), parts, strict=True)}


def diagonal(workload: Workload) -> Named:
    """``(1/N) sum_n sum_c p_nc (d log p_nc / d parameter)^2``, one sample and one label at a time."""
    model = workload.model
    named = trained(model)
    sums = {name: torch.zeros_like(p) for name, p in named.items()}
    for x in workload.x.split(1):
        scores = model(x).log_softmax(1)[0]
        for score in scores:
            gradients = torch.autograd.grad(score, list(named.values()), retain_graph=True)
            for total, gradient in zip(sums.values(), gradients, strict=True):
                total.addcmul_(gradient, gradient, value=float(score.exp()) / workload.samples)
    return sums


def kronecker(workload: Workload, columns: Tensor) -> Named:
    """``kron(B, A)`` times the columns, A the mean of ``a a^T`` over samples and places, B over samples."""
    model, inputs, outputs = copy.deepcopy(workload.model).double(), {}, {}

    def keep(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        inputs[names[module]], outputs[names[module]] = given[0].detach(), output

    names = {module: name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)}
    for module in names:
        module.register_forward_hook(keep)
    scores = model(workload.x.double()).log_softmax(1)
    roots = scores.detach().exp().sqrt()
    sent = [
        torch.autograd.grad((roots * scores)[:, c].sum(), list(outputs.values()), retain_graph=True)
        for c in range(scores.shape[1])
    ]
    factors = {}
    for (name, a), *backprops in zip(inputs.items(), *sent, strict=True):
        a = _rows(model.get_submodule(name), a)
        b = torch.cat([(part.flatten(2).mT if part.ndim == 4 else part).flatten(0, -2) for part in backprops])
        factors[name] = a.T @ a / len(a), b.T @ b / workload.samples
    return {name: found.float() for name, found in times_kronecker(model, factors, columns.double()).items()}


def _rows(module: nn.Module, a: Tensor) -> Tensor:
    """Inputs, the bias's as the last: (samples times places, i)."""
    if isinstance(module, nn.Conv2d):
        options = {name: getattr(module, name) for name in ("kernel_size", "dilation", "padding", "stride")}
        a = F.unfold(a, **options).mT
    a = a.flatten(0, -2)
    return a if module.bias is None else torch.cat([a, a.new_ones(len(a), 1)], 1)


def times_kronecker(model: nn.Module, factors: dict[str, tuple[Tensor, Tensor]], columns: Tensor) -> Named:
    """``kron(B, A)`` times the columns, for factors (A, B) by layer, each a weight and perhaps a bias."""
    found = by_parameter(model, columns)
    for layer, (A, B) in factors.items():
        weight, bias = found[f"{layer}.weight"], found.get(f"{layer}.bias")
        rows = weight.flatten(2)
        product = B @ (rows if bias is None else torch.cat([rows, bias[..., None]], 2)) @ A
        found[f"{layer}.weight"] = product[..., : rows.shape[2]].reshape(weight.shape)
        if bias is not None:
            found[f"{layer}.bias"] = product[..., -1]
    return found


def gauss_newton(workload: Workload, columns: Tensor) -> Named:
    """``J^T H J v``: J v by finite differences in double precision, H by its formula, J^T by a backward pass."""
    model, parameters, moved = _movable(workload)

    def product(v: Tensor) -> Tensor:
        ahead, behind = (moved(model, h * v).detach() for h in (STEP, -STEP))
        slope, output = (ahead - behind) / (2 * STEP), moved(model, 0 * v)
        p = output.detach().softmax(1)
        bent = p * slope - p * (p * slope).sum(1, keepdim=True)
        return _flat(torch.autograd.grad(output, parameters, bent / workload.y.numel()))

    return _products(workload, product, columns)


def hessian(workload: Workload, columns: Tensor) -> Named:
    """``H v`` by finite differences of the gradient in double precision."""
    model, parameters, moved = _movable(workload)

    def gradient(step: Tensor) -> Tensor:
        return _flat(torch.autograd.grad(LOSS(moved(model, step), workload.y), parameters))

    return _products(workload, lambda v: (gradient(STEP * v) - gradient(-STEP * v)) / (2 * STEP), columns)


def _movable(workload: Workload) -> tuple[nn.Module, list[Tensor], Callable[[nn.Module, Tensor], Tensor]]:
    """A copy in double precision, its parameters, and its output with a flat step added to them."""
    model = copy.deepcopy(workload.model).double()
    parameters = list(trained(model).values())
    start = nn.utils.parameters_to_vector(parameters).detach()
    x = workload.x.double() if workload.x.is_floating_point() else workload.x

    def moved(model: nn.Module, step: Tensor) -> Tensor:
        nn.utils.vector_to_parameters(start + step, parameters)
        return model(x)

    return model, parameters, moved


def _products(workload: Workload, product: Callable[[Tensor], Tensor], columns: Tensor) -> Named:
    found = torch.stack([product(v) for v in columns.double().unbind(1)], 1)
    return {name: part.float() for name, part in by_parameter(workload.model, found).items()}


def distance(found: Named, reference: Named) -> float:
    """The largest relative distance of a parameter's entries from those of the reference."""
    return max(
        math.inf if not g.isfinite().all() else float((g - reference[k]).norm() / reference[k].norm())
        for k, g in found.items()
    )


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


def fisher(build: Callable[..., Any], inject: Any, metric: str, form: str, **others: Callable[..., Matrix]) -> Kinds:
    ours, theirs = partial(Curvature, build=build, inject=inject), partial(NNGeometry, metric=metric, form=form)
    return {"curvature": ours, **others, "nngeometry": theirs}


def products(ours: str, curvlinops: str, backpack: str) -> Kinds:
    kinds = {"curvature": Products, "curvlinops": CurvlinopsProducts, "BackPACK": BackPACKProducts}
    names = ours, curvlinops, backpack
    return {key: partial(kind, name=name) for (key, kind), name in zip(kinds.items(), names, strict=True)}


DIAGONAL = fisher(curvature.fisher_diagonal, EXACT, "FIM", "PMatDiag", BackPACK=BackPACKDiagonal)
SAMPLED_DIAGONAL = fisher(curvature.fisher_diagonal, SAMPLED, "FIM_MonteCarlo", "PMatDiag", BackPACK=BackPACKSampled)
FACTORS = fisher(curvature.kfac, EXACT, "FIM", "PMatKFAC", curvlinops=partial(CurvlinopsFactors, kind="type-2"))
SAMPLED_FACTORS = fisher(
    curvature.kfac, SAMPLED, "FIM_MonteCarlo", "PMatKFAC", curvlinops=partial(CurvlinopsFactors, kind="mc")
)
GAUSS_NEWTON = products("gauss_newton", "GGNLinearOperator", "ggn")
HESSIAN = products("hessian", "HessianLinearOperator", "hessian")
