"""Calls of the peers for `silently_wrong.py`: each with the truth, and with ours."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from _silently_wrong_cases import Case
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, vmap

import curvature
from optimizers import KFAC
from support.oracles import brute_force, derivatives, kronecker, laplacian

Named = dict[str, Tensor]
Of = Callable[[Case], Named | Tensor]
trained = lambda model: {name: p for name, p in model.named_parameters() if p.requires_grad}
identity = lambda case: torch.eye(sum(p.numel() for p in trained(case.model).values()))
our_rows = lambda case: curvature.per_sample_gradients(case.model, case.loss, *only_batch(case))
dense = lambda case, build: build(case.model, case.loss, case.loader).to_dense()
true_factors = lambda case: kronecker.kronecker(textbook(case))
precision = lambda case, structure: posterior(case, structure).precision.to_dense()
laplacian_by = lambda case, function: function(case.model, only_inputs(case))[2][:, 0]


class NoCase(Exception):
    """The call does not take such a case (a loss, several batches), or the quantity has more than one definition."""


@dataclass(frozen=True)
class Call:
    """A quantity by a peer, by the definition and by ours: one tensor, or tensors by name.

    What a result lacks counts as zero. `other` is another option of the peer's, described by `other_name`.
    `truth_of_ours` is there where ours is defined in another way (scales, blocks).
    """

    peer: str
    name: str
    theirs: Of
    truth: Of
    ours: Of
    other_name: str = ""
    other: Of | None = None
    truth_of_ours: Of | None = None


def matrices(case: Case) -> brute_force.Matrices:
    if case.loss is None:
        raise NoCase("no loss")
    return brute_force.Matrices(case.model, case.loss, case.batches)


def only_batch(case: Case) -> tuple[Tensor, Tensor]:
    if case.loss is None:
        raise NoCase("no loss")
    batches = case.batches
    if len(batches) > 1 or case.drop_last:
        raise NoCase("takes one batch")
    return batches[0]


def is_joint(case: Case) -> bool:
    """Whether samples meet in the model."""
    return any(isinstance(m, nn.BatchNorm1d) and m.training for m in case.model.modules())


def apart(case: Case) -> brute_force.Matrices:
    if is_joint(case):
        raise NoCase("samples of BatchNorm in training mode are not apart")
    return matrices(case)


def stacked(model: nn.Module, losses: Any) -> Named:
    """The gradients of each of the losses."""
    names, parameters = zip(*trained(model).items(), strict=True)
    rows = [torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True) for loss in losses]
    return {name: torch.stack(g) for name, g in zip(names, zip(*rows, strict=True), strict=True)}


# -- per-sample gradients


def rows(case: Case) -> Named:
    """Where samples meet in the model, those of the samples' own losses with all samples in it."""
    x, y = only_batch(case)
    if is_joint(case):
        return stacked(case.model, nn.functional.cross_entropy(case.model(x), y, reduction="none"))
    return stacked(case.model, (case.loss(case.model(x), y) for x, y in matrices(case).samples))


def shares_of_rows(case: Case) -> Named:
    """By BackPACK's documentation the samples' parts of the gradient of the batch."""
    found = rows(case)
    shares = torch.full((5,), 0.2) if is_joint(case) else matrices(case).sample_weights
    return {name: torch.einsum("n,n...->n...", shares, g) for name, g in found.items()}


def wrapped_by_opacus(case: Case, kind: str, **options: Any) -> nn.Module:
    """After a backward pass."""
    from opacus import grad_sample
    from opacus.validators import ModuleValidator

    (x, y), model = only_batch(case), copy.deepcopy(case.model)
    ModuleValidator.validate(model, strict=True)  # as PrivacyEngine does
    wrapped = getattr(grad_sample, kind)(model, loss_reduction=case.loss.reduction, **options)
    case.loss(wrapped(x), y).backward()
    return wrapped


def opacus_rows(case: Case, **options: Any) -> Named:
    model = wrapped_by_opacus(case, "GradSampleModule", **options)._module
    found = {name: p.grad_sample for name, p in trained(model).items()}
    if None in found.values():
        raise AttributeError("a parameter has no grad_sample")
    return found


def opacus_norms(case: Case) -> Named:
    return {"norms": wrapped_by_opacus(case, "GradSampleModuleFastGradientClipping").get_norm_sample()}


def vmap_rows(case: Case) -> Named:
    x, y = only_batch(case)
    model, y = copy.deepcopy(case.model), y.view(len(x), -1) if case.is_folded else y
    values = {name: p.detach() for name, p in trained(model).items()}

    def loss(values: Named, x: Tensor, y: Tensor) -> Tensor:
        return case.loss(functional_call(model, values, (x[None],)), y if case.is_folded else y[None])

    return vmap(grad(loss), (None, 0, 0))(values, x, y)


def backpack(case: Case, extension: str, attribute: str) -> Named:
    """What the extension of that name stores."""
    from backpack import backpack, extend, extensions

    (x, y), model, loss = only_batch(case), extend(copy.deepcopy(case.model)), extend(copy.deepcopy(case.loss))
    with backpack(getattr(extensions, extension)()):
        loss(model(x), y).backward()
    return {name: getattr(p, attribute) for name, p in trained(model).items()}


# -- matrices and their diagonals


def diagonal(case: Case, of: Callable[[Case], Tensor]) -> Named:
    only_batch(case)
    return brute_force.split(case.model, of(case).diagonal())


def our_diagonal_of_hessian(case: Case) -> Named:
    H = curvature.hessian(case.model, case.loss, case.loader)
    return H.to_dict(H.diagonal())


def true_hessian(case: Case) -> Tensor:
    """By differences of the gradient; where a row is frozen or a kink is near, which they do not see, by autograd."""
    of = apart(case)
    if len({p.dtype for p in case.model.parameters()}) > 1:
        raise NoCase("differences in single precision tell little")
    kinks = nn.ReLU, nn.MaxPool2d
    is_rough = [isinstance(m, kinks) or getattr(m, "padding_idx", None) is not None for m in case.model.modules()]
    return of.hessian if any(is_rough) else of.hessian_by_differences


def true_empirical(case: Case) -> Tensor:
    of = apart(case)
    if not torch.allclose(of.sample_weights, of.sample_weights[0]):
        raise NoCase("samples that weigh differently have more than one empirical Fisher matrix")
    return of.empirical_fisher


def textbook(case: Case, of: Callable[[Case], brute_force.Matrices] = matrices) -> list[kronecker.Layer]:
    if not case.is_affine:
        raise NoCase("no factors of the textbook")
    return kronecker.affine_layers(of(case))


def curvlinops(case: Case, kind: str, data: Any = None, **options: Any) -> Tensor:
    import curvlinops

    model, data = copy.deepcopy(case.model), case.batches if data is None else data
    operator = getattr(curvlinops, kind)(model, case.loss, list(trained(model).values()), data, **options)
    return operator @ identity(case)


def curvlinops_at_once(case: Case, kind: str, **options: Any) -> Tensor:
    data = [tuple(torch.cat(parts) for parts in zip(*case.batches, strict=True))]
    return curvlinops(case, kind, data, **options)


def hessian_by(case: Case, derive: Callable[..., Any]) -> Tensor:
    (x, y), model = only_batch(case), copy.deepcopy(case.model)
    flat = torch.cat([p.detach().flatten() for p in trained(model).values()])
    loss = lambda flat: case.loss(functional_call(model, brute_force.split(model, flat), (x,)), y)
    return derive(loss, flat)


hessian_by_func = partial(hessian_by, derive=lambda loss, flat: hessian(loss)(flat))
hessian_by_autograd = partial(hessian_by, derive=torch.autograd.functional.hessian)


def backpack_factors(case: Case) -> Named:
    found = backpack(case, "KFLR", "kflr").items()
    return {name: torch.kron(*factors) if len(factors) > 1 else factors[0] for name, factors in found}


def blocks(case: Case, matrix: Tensor) -> Named:
    where = {name: index.flatten() for name, index in brute_force.positions(case.model).items()}
    return {name: matrix[index[:, None], index] for name, index in where.items()}


def true_blocks(case: Case) -> Named:
    only_batch(case)
    if any(hasattr(m, "kernel_size") for m in case.model.modules()):
        raise NoCase("other factors for convolutions, which is documented")
    return blocks(case, true_factors(case))


def nngeometry(case: Case, form: str) -> Tensor:
    import nngeometry.object as forms
    from nngeometry.layercollection import LayerCollection
    from nngeometry.metrics import FIM

    loss = case.loss
    if not isinstance(loss, nn.CrossEntropyLoss) or loss.reduction != "mean" or loss.weight is not None:
        raise NoCase("takes no loss: it is the matrix of a mean of cross-entropies")
    if case.y.min() < 0:
        raise NoCase("takes no targets")
    model = copy.deepcopy(case.model)
    found = FIM(model, case.loader, getattr(forms, form), variant="classif_logits").to_torch()
    return placed(case, found, LayerCollection.from_model(model).get_layerid_module_maps(model)[0])


def placed(case: Case, found: Tensor, layers: dict[str, nn.Module]) -> Tensor:
    """Theirs at the places of the parameters that are trained, where it has these; what they leave out is zero."""
    where, start, theirs, ours = brute_force.positions(case.model), 0, [], []
    for layer, module in layers.items():
        for name, p in module.named_parameters(layer):
            if name in where:
                theirs.append(torch.arange(start, start + p.numel()))
                ours.append(where[name].flatten())
            start += p.numel()
    if start != len(found):
        return found
    rows, columns, matrix = torch.cat(theirs), torch.cat(ours), torch.zeros_like(identity(case))
    matrix[columns[:, None], columns] = found[rows[:, None], rows]
    return matrix


# -- posteriors


def fitted(case: Case, **options: Any) -> Any:
    from laplace import Laplace

    loss = case.loss
    if not isinstance(loss, nn.CrossEntropyLoss | nn.MSELoss):
        raise NoCase("has no such likelihood")
    if isinstance(loss, nn.CrossEntropyLoss) and (loss.weight is not None or loss.label_smoothing):
        raise NoCase("has no such likelihood")
    likelihood = "classification" if isinstance(loss, nn.CrossEntropyLoss) else "regression"
    found = Laplace(copy.deepcopy(case.model), likelihood, **options)
    found.fit(case.loader)
    return found


def summed(case: Case) -> tuple[brute_force.Matrices, float]:
    """References of the sum of the losses, and by what the curvature of one is that of a likelihood."""
    if case.loss is None:
        raise NoCase("no loss")
    loss, model = copy.copy(case.loss), copy.deepcopy(case.model).eval()
    loss.reduction = "sum"
    return brute_force.Matrices(model, loss, case.batches), 0.5 if isinstance(loss, nn.MSELoss) else 1.0


def posterior(case: Case, structure: str) -> Any:
    return curvature.laplace(copy.deepcopy(case.model).eval(), case.loss, case.loader, structure, prior=1.0)


def true_precision(case: Case) -> Tensor:
    of, factor = summed(case)
    return factor * of.gauss_newton + identity(case)


def laplace_precision(case: Case, structure: str) -> Tensor:
    found = fitted(case, subset_of_weights="all", hessian_structure=structure).posterior_precision
    return found if structure == "full" else found.to_matrix()


def precision_by_factors(case: Case) -> Tensor:
    factors = kronecker.kronecker(textbook(case, lambda case: summed(case)[0]))
    return summed(case)[1] * factors + identity(case)


def precision_apart(case: Case) -> Tensor:
    """Weights and biases apart."""
    found = precision_by_factors(case)
    return brute_force.blocks(case.model, found, [[name] for name in trained(case.model)])


def laplace_predictions(case: Case, **options: Any) -> Tensor:
    """Probabilities, or the variance of a regression; by default of the last layer."""
    found = fitted(case, hessian_structure="full", **options)(case.batches[0][0])
    return found[1] if isinstance(found, tuple) else found


def true_predictions(case: Case) -> Tensor:
    if not case.is_affine or case.y.ndim > 1 and not isinstance(case.loss, nn.MSELoss):
        raise NoCase("no predictions of one output per sample")
    of, factor = summed(case)
    index = torch.cat([index.flatten() for index in list(brute_force.positions(of.model).values())[-2:]])
    found = factor * of.gauss_newton[index[:, None], index] + torch.eye(len(index))
    return predicted(case, of, torch.linalg.inv(found), index)


def predicted(case: Case, of: brute_force.Matrices, covariance: Tensor, index: Tensor) -> Tensor:
    found = [brute_force.jacobian(of.model, x[None]) for x in case.batches[0][0]]
    outputs = torch.cat([output for output, _ in found])
    variances = torch.stack([jacobian[:, index] @ covariance @ jacobian[:, index].T for _, jacobian in found])
    if isinstance(case.loss, nn.MSELoss):
        return variances
    return (outputs / (1 + math.pi / 8 * variances.diagonal(dim1=1, dim2=2)).sqrt()).softmax(1)  # probit


def our_predictions(case: Case) -> Tensor:
    (x, _), found = case.batches[0], posterior(case, "last_layer")
    return found.outputs(x)[1] if isinstance(case.loss, nn.MSELoss) else found.predict(x).mean


def predictions_of_all(case: Case) -> Tensor:
    """Of another posterior, which is right if it is that of all parameters."""
    found, (of, factor) = laplace_predictions(case, subset_of_weights="all"), summed(case)
    covariance = torch.linalg.inv(factor * of.gauss_newton + identity(case))
    error = found - predicted(case, of, covariance, torch.arange(len(covariance)))
    return true_predictions(case) + error


# -- training


def singd() -> Any:
    from singd.optim.optimizer import SINGD

    return SINGD


def singd_inputs(case: Case) -> Named:
    """The covariance of each layer's inputs in the first step, where the preconditioner is the identity."""
    (x, y), model = only_batch(case), copy.deepcopy(case.model)
    opt = singd()(model)
    case.loss(model(x), y).backward()
    found = {name: side.to_dense().clone() for name, side in opt.H_Ks.items()}
    opt.step()
    return found


def true_inputs(case: Case) -> Named:
    only_batch(case)
    layers = textbook(case)
    if any(len(layer.index) > 1 for layer in layers):
        raise NoCase("one factor for all groups of channels, which is documented")
    known = [layer for layer in layers if isinstance(layer.module, nn.Linear | nn.Conv2d)]
    return {layer.name: layer.factors()[0][0] for layer in known}


def our_inputs(case: Case) -> Named:
    K = curvature.kfac(case.model, case.loss, case.loader)
    return {name: K[name].A[0] for name in true_inputs(case)}


def moved(case: Case, make: Callable[[nn.Module], Any]) -> Named:
    """Which parameters move in a step, of those that have a gradient."""
    (x, y), model = only_batch(case), copy.deepcopy(case.model)
    opt = make(model)
    case.loss(model(x), y).backward()
    have_gradients = {name: p for name, p in trained(model).items() if p.grad is not None and p.grad.norm() > 1e-9}
    before = {name: p.detach().clone() for name, p in have_gradients.items()}
    opt.step()
    return {name: (p != before[name]).any().double() for name, p in have_gradients.items()}


# -- derivatives by the inputs


def plain_laplacian(model: nn.Module, x: Tensor) -> Tensor:
    """(N,), by nested gradients."""
    x = x if x.requires_grad else x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    second = [torch.autograd.grad(slope[:, k].sum(), x, create_graph=True)[0][:, k] for k in range(x.shape[1])]
    return torch.stack(second).sum(0)


def only_inputs(case: Case) -> Tensor:
    if case.loss is not None:
        raise NoCase("no derivatives by inputs")
    return case.x


def vmapped_laplacian(case: Case) -> Tensor:
    second = vmap(hessian(lambda x: case.model(x[None])[0, 0]))(only_inputs(case))
    return second.diagonal(dim1=1, dim2=2).sum(1)


BACKPACK, OPACUS, CURVLINOPS, NNGEOMETRY, LAPLACE, SINGD, TORCH = (
    "backpack-for-pytorch", "opacus", "curvlinops-for-pytorch", "nngeometry", "laplace-torch", "singd", "torch",
)  # fmt: skip
FUNC, AUTOGRAD = "`torch.func.hessian`", "`torch.autograd.functional.hessian`"
MOVED = "`SINGD` (what it trains)"


def of_curvlinops(kind: str, truth: Callable[[Case], Tensor], build: Callable[..., Any], **options: Any) -> Call:
    theirs, other = (partial(way, kind=kind, **options) for way in (curvlinops, curvlinops_at_once))
    return Call(
        CURVLINOPS, f"`{kind}`", theirs, truth, partial(dense, build=build), "all data in one batch", other
    )  # fmt: skip


def of_nngeometry(form: str, truth: Callable[[Case], Tensor], build: Callable[..., Any]) -> Call:
    theirs = partial(nngeometry, form=form)
    return Call(NNGEOMETRY, f"`FIM(..., {form})`", theirs, truth, partial(dense, build=build))


def of_hessian(name: str, theirs: Of, other_name: str, other: Of) -> Call:
    return Call(TORCH, name, theirs, true_hessian, partial(dense, build=curvature.hessian), other_name, other)


gauss_newton = lambda case: apart(case).gauss_newton
norms_of_rows = lambda case: {"norms": brute_force.norms(rows(case))}
our_norms = lambda case: {"norms": curvature.per_sample_norms(case.model, case.loss, *only_batch(case))}
our_diagonal = lambda case: curvature.fisher_diagonal(case.model, case.loss, case.loader)
our_blocks = lambda case: blocks(case, dense(case, curvature.kfac))
by_sgd = lambda model: torch.optim.SGD(model.parameters(), 0.1)
CALLS = [
    Call(BACKPACK, "`BatchGrad`", lambda case: backpack(case, "BatchGrad", "grad_batch"), shares_of_rows, our_rows,
         truth_of_ours=rows),
    Call(BACKPACK, "`DiagGGNExact`", lambda case: backpack(case, "DiagGGNExact", "diag_ggn_exact"),
         partial(diagonal, of=gauss_newton), our_diagonal),
    Call(BACKPACK, "`DiagHessian`", lambda case: backpack(case, "DiagHessian", "diag_h"),
         partial(diagonal, of=true_hessian), our_diagonal_of_hessian),
    Call(BACKPACK, "`KFLR`", backpack_factors, true_blocks, our_blocks),
    Call(OPACUS, "`GradSampleModule`", opacus_rows, rows, our_rows, "`force_functorch=True`",
         partial(opacus_rows, force_functorch=True)),
    Call(OPACUS, "ghost clipping (norms)", opacus_norms, norms_of_rows, our_norms),
    of_curvlinops("GGNLinearOperator", gauss_newton, curvature.gauss_newton),
    of_curvlinops("HessianLinearOperator", true_hessian, curvature.hessian),
    of_curvlinops("EFLinearOperator", true_empirical, curvature.empirical_fisher),
    of_curvlinops("KFACLinearOperator", true_factors, curvature.kfac, fisher_type="type-2",
                  separate_weight_and_bias=False),
    of_nngeometry("PMatDense", gauss_newton, curvature.gauss_newton),
    of_nngeometry("PMatKFAC", true_factors, curvature.kfac),
    Call(LAPLACE, '`Laplace(..., "all", "full")`', partial(laplace_precision, structure="full"), true_precision,
         partial(precision, structure="dense")),
    Call(LAPLACE, '`Laplace(..., "all", "kron")`', partial(laplace_precision, structure="kron"), precision_apart,
         partial(precision, structure="kfac"), truth_of_ours=precision_by_factors),
    Call(LAPLACE, '`Laplace(..., hessian_structure="full")`', laplace_predictions,
         true_predictions, our_predictions, '`subset_of_weights="all"`', predictions_of_all),
    Call(SINGD, "`SINGD` (inputs' covariance)", singd_inputs, true_inputs, our_inputs),
    Call(SINGD, MOVED, lambda case: moved(case, singd()), partial(moved, make=by_sgd), partial(moved, make=KFAC)),
    Call(TORCH, "`vmap(grad(...))`", vmap_rows, rows, our_rows),
    of_hessian(FUNC, hessian_by_func, AUTOGRAD, hessian_by_autograd),
    of_hessian(AUTOGRAD, hessian_by_autograd, FUNC, hessian_by_func),
    Call(TORCH, "`vmap(torch.func.hessian(...))` by the inputs", vmapped_laplacian,
         partial(laplacian_by, function=laplacian.laplacian), partial(laplacian_by, function=curvature.laplacian),
         "nested `torch.autograd.grad`", lambda case: plain_laplacian(case.model, only_inputs(case))),
    Call(TORCH, "backward pass of the Laplacian (`torch.autograd`)",
         lambda case: stacked(case.model, plain_laplacian(case.model, only_inputs(case))),
         lambda case: derivatives.central_differences(case.model, plain_laplacian, only_inputs(case)),
         lambda case: curvature.residual_jacobian(case.model, plain_laplacian, only_inputs(case))),
]  # fmt: skip
