"""What the methods of `matrices.py` are checked against: plain loops, by the definitions, for mean cross-entropy.

Matrices are compared by what they make of vectors: columns (P, c), the results by parameter, (c, *shape).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from _rows import Named
from _workloads import LOSS, Workload
from torch import Tensor, nn

STEP = 1e-10  # of finite differences in double precision; longer, ReLUs switch on the way and Hessians jump


def trained(model: nn.Module) -> Named:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


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


def _flat(tensors: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([t.flatten() for t in tensors])


def _products(workload: Workload, product: Callable[[Tensor], Tensor], columns: Tensor) -> Named:
    found = torch.stack([product(v) for v in columns.double().unbind(1)], 1)
    return {name: part.float() for name, part in by_parameter(workload.model, found).items()}


def distance(found: Named, reference: Named) -> float:
    """The largest relative distance of a parameter's entries from those of the reference."""
    return max(
        math.inf if not g.isfinite().all() else float((g - reference[k]).norm() / reference[k].norm())
        for k, g in found.items()
    )
