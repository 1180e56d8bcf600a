"""Calls of the peers for `silently_wrong.py`, of gradients and matrices: each with the truth, and with ours."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from _silently_wrong_cases import Case
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, vmap

import curvature
from support.oracles import brute_force, kronecker

Named = dict[str, Tensor]


class NoCase(Exception):
    """The call does not take such a case (a loss, several batches), or the quantity has more than one definition."""


class Call:
    """A quantity by a peer, by ours and by the definition: tensors by name.

    What a result lacks counts as zero. `other` is another option of the peer's, described by `other_name`.
    """

    peer: str
    name: str
    other_name = ""

    def theirs(self, case: Case) -> Named:
        raise NotImplementedError

    def truth(self, case: Case) -> Named:
        raise NotImplementedError

    def ours(self, case: Case) -> Named:
        raise NotImplementedError

    def truth_of_ours(self, case: Case) -> Named:
        """Where ours is defined in another way (scales, blocks)."""
        return self.truth(case)

    def other(self, case: Case) -> Named:
        raise NotImplementedError


def trained(model: nn.Module) -> Named:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def identity(case: Case) -> Tensor:
    return torch.eye(sum(p.numel() for p in trained(case.model).values()))


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


def refuse_joint_samples(case: Case) -> None:
    if is_joint(case):
        raise NoCase("samples of BatchNorm in training mode are not apart")


# Per-sample gradients.


class Rows(Call):
    def truth(self, case: Case) -> Named:
        x, y = only_batch(case)
        if is_joint(case):
            return self._among_others(case, x, y)
        rows = [
            torch.autograd.grad(case.loss(case.model(x), y), list(trained(case.model).values()))
            for x, y in matrices(case).samples
        ]
        return {name: torch.stack(g) for name, g in zip(trained(case.model), zip(*rows, strict=True), strict=True)}

    @staticmethod
    def _among_others(case: Case, x: Tensor, y: Tensor) -> Named:
        """Gradients of the samples' own losses, with all samples in the model."""
        losses = nn.functional.cross_entropy(case.model(x), y, reduction="none")
        names, parameters = zip(*trained(case.model).items(), strict=True)
        rows = [torch.autograd.grad(loss, parameters, retain_graph=True) for loss in losses]
        return {name: torch.stack(g) for name, g in zip(names, zip(*rows, strict=True), strict=True)}

    def ours(self, case: Case) -> Named:
        return curvature.per_sample_gradients(case.model, case.loss, *only_batch(case))


class OpacusRows(Rows):
    peer, name = "opacus", "`GradSampleModule`"
    other_name = "`force_functorch=True`"

    def theirs(self, case: Case, **options: Any) -> Named:
        from opacus import GradSampleModule
        from opacus.validators import ModuleValidator

        (x, y), model = only_batch(case), copy.deepcopy(case.model)
        ModuleValidator.validate(model, strict=True)  # as PrivacyEngine does
        wrapped = GradSampleModule(model, loss_reduction=case.loss.reduction, **options)
        case.loss(wrapped(x), y).backward()
        rows = {name: p.grad_sample for name, p in trained(model).items()}
        if None in rows.values():
            raise AttributeError("a parameter has no grad_sample")
        return rows

    def other(self, case: Case) -> Named:
        return self.theirs(case, force_functorch=True)


class OpacusNorms(Rows):
    peer, name = "opacus", "ghost clipping (norms)"

    def theirs(self, case: Case) -> Named:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping
        from opacus.validators import ModuleValidator

        (x, y), model = only_batch(case), copy.deepcopy(case.model)
        ModuleValidator.validate(model, strict=True)
        wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction=case.loss.reduction)
        case.loss(wrapped(x), y).backward()
        return {"norms": wrapped.get_norm_sample()}

    def truth(self, case: Case) -> Named:
        return {"norms": brute_force.norms(super().truth(case))}

    def ours(self, case: Case) -> Named:
        return {"norms": curvature.per_sample_norms(case.model, case.loss, *only_batch(case))}


class VmapRows(Rows):
    peer, name = "torch", "`vmap(grad(...))`"

    def theirs(self, case: Case) -> Named:
        x, y = only_batch(case)
        model, y = copy.deepcopy(case.model), y.view(len(x), -1) if case.is_folded else y
        values = {name: p.detach() for name, p in trained(model).items()}

        def loss(values: Named, x: Tensor, y: Tensor) -> Tensor:
            return case.loss(functional_call(model, values, (x[None],)), y if case.is_folded else y[None])

        return vmap(grad(loss), (None, 0, 0))(values, x, y)


class OfBackPACK(Call):
    """What the extension of that name stores."""

    peer = "backpack-for-pytorch"
    attribute: str

    def theirs(self, case: Case) -> Named:
        from backpack import backpack, extend, extensions

        (x, y), model, loss = only_batch(case), extend(copy.deepcopy(case.model)), extend(copy.deepcopy(case.loss))
        with backpack(getattr(extensions, self.name.strip("`"))()):
            loss(model(x), y).backward()
        return {name: getattr(p, self.attribute) for name, p in trained(model).items()}


class BackPACKRows(OfBackPACK, Rows):
    name, attribute = "`BatchGrad`", "grad_batch"

    def truth(self, case: Case) -> Named:
        """By its documentation the samples' parts of the gradient of the batch."""
        rows = super().truth(case)
        shares = torch.full((5,), 0.2) if is_joint(case) else matrices(case).sample_weights
        return {name: torch.einsum("n,n...->n...", shares, g) for name, g in rows.items()}

    def truth_of_ours(self, case: Case) -> Named:
        return super().truth(case)


# Diagonals.


class BackPACKDiagonal(OfBackPACK):
    name, attribute = "`DiagGGNExact`", "diag_ggn_exact"

    def truth(self, case: Case) -> Named:
        only_batch(case)
        refuse_joint_samples(case)
        return brute_force.split(case.model, matrices(case).gauss_newton.diagonal())

    def ours(self, case: Case) -> Named:
        return curvature.fisher_diagonal(case.model, case.loss, case.loader)


class BackPACKHessian(OfBackPACK):
    name, attribute = "`DiagHessian`", "diag_h"

    def truth(self, case: Case) -> Named:
        only_batch(case)
        return brute_force.split(case.model, true_hessian(case).diagonal())

    def ours(self, case: Case) -> Named:
        H = curvature.hessian(case.model, case.loss, case.loader)
        return H.to_dict(H.diagonal())


def true_hessian(case: Case) -> Tensor:
    """By differences of the gradient; where a row is frozen or a kink is near, which they do not see, by autograd."""
    refuse_joint_samples(case)
    if len({p.dtype for p in case.model.parameters()}) > 1:
        raise NoCase("differences in single precision tell little")
    kinks = nn.ReLU, nn.MaxPool2d
    is_rough = [isinstance(m, kinks) or getattr(m, "padding_idx", None) is not None for m in case.model.modules()]
    return matrices(case).hessian if any(is_rough) else matrices(case).hessian_by_differences


# Matrices (P, P).


class Gauss(Call):
    def truth(self, case: Case) -> Named:
        refuse_joint_samples(case)
        return {"": matrices(case).gauss_newton}

    def ours(self, case: Case) -> Named:
        return {"": curvature.gauss_newton(case.model, case.loss, case.loader).to_dense()}


class Hessian(Call):
    def truth(self, case: Case) -> Named:
        return {"": true_hessian(case)}

    def ours(self, case: Case) -> Named:
        return {"": curvature.hessian(case.model, case.loss, case.loader).to_dense()}


class Empirical(Call):
    def truth(self, case: Case) -> Named:
        refuse_joint_samples(case)
        of = matrices(case)
        if not torch.allclose(of.sample_weights, of.sample_weights[0]):
            raise NoCase("samples that weigh differently have more than one empirical Fisher matrix")
        return {"": of.empirical_fisher}

    def ours(self, case: Case) -> Named:
        return {"": curvature.empirical_fisher(case.model, case.loss, case.loader).to_dense()}


class Factors(Call):
    def truth(self, case: Case) -> Named:
        if not case.is_affine:
            raise NoCase("no factors of the textbook")
        return {"": kronecker.kronecker(kronecker.affine_layers(matrices(case)))}

    def ours(self, case: Case) -> Named:
        return {"": curvature.kfac(case.model, case.loss, case.loader).to_dense()}


class Curvlinops(Call):
    peer = "curvlinops-for-pytorch"
    other_name = "all data in one batch"
    options: dict[str, Any] = {}

    def theirs(self, case: Case) -> Named:
        return self._of(case, case.batches)

    def _of(self, case: Case, data: Any) -> Named:
        import curvlinops

        model = copy.deepcopy(case.model)
        kind = getattr(curvlinops, self.name.strip("`"))
        return {"": kind(model, case.loss, list(trained(model).values()), data, **self.options) @ identity(case)}

    def other(self, case: Case) -> Named:
        x, y = (torch.cat(parts) for parts in zip(*case.batches, strict=True))
        return self._of(case, [(x, y)])


class CurvlinopsGGN(Curvlinops, Gauss):
    name = "`GGNLinearOperator`"


class CurvlinopsHessian(Curvlinops, Hessian):
    name = "`HessianLinearOperator`"


class CurvlinopsEF(Curvlinops, Empirical):
    name = "`EFLinearOperator`"


class CurvlinopsKFAC(Curvlinops, Factors):
    name = "`KFACLinearOperator`"
    options = {"fisher_type": "type-2", "separate_weight_and_bias": False}


class FuncHessian(Hessian):
    peer, name = "torch", "`torch.func.hessian`"
    other_name = "`torch.autograd.functional.hessian`"

    def theirs(self, case: Case, derive: Callable[..., Any] | None = None) -> Named:
        (x, y), model = only_batch(case), copy.deepcopy(case.model)
        flat = torch.cat([p.detach().flatten() for p in trained(model).values()])
        loss = lambda flat: case.loss(functional_call(model, brute_force.split(model, flat), (x,)), y)
        return {"": hessian(loss)(flat) if derive is None else derive(loss, flat)}

    def other(self, case: Case) -> Named:
        return self.theirs(case, torch.autograd.functional.hessian)


class AutogradHessian(FuncHessian):
    name = "`torch.autograd.functional.hessian`"
    other_name = "`torch.func.hessian`"

    def theirs(self, case: Case, derive: Callable[..., Any] | None = None) -> Named:
        return super().theirs(case, torch.autograd.functional.hessian)

    def other(self, case: Case) -> Named:
        return FuncHessian.theirs(self, case)


class BackPACKFactors(OfBackPACK, Factors):
    name, attribute = "`KFLR`", "kflr"

    def theirs(self, case: Case) -> Named:
        found = super().theirs(case).items()
        return {name: torch.kron(*factors) if len(factors) > 1 else factors[0] for name, factors in found}

    def truth(self, case: Case) -> Named:
        only_batch(case)
        if any(hasattr(m, "kernel_size") for m in case.model.modules()):
            raise NoCase("other factors for convolutions, which is documented")
        return self._blocks(case, super().truth(case)[""])

    def ours(self, case: Case) -> Named:
        return self._blocks(case, super().ours(case)[""])

    @staticmethod
    def _blocks(case: Case, matrix: Tensor) -> Named:
        where = {name: index.flatten() for name, index in brute_force.positions(case.model).items()}
        return {name: matrix[index[:, None], index] for name, index in where.items()}


class NNGeometry(Call):
    peer = "nngeometry"
    form: str

    def theirs(self, case: Case) -> Named:
        import nngeometry.object as forms
        from nngeometry.layercollection import LayerCollection
        from nngeometry.metrics import FIM

        loss = case.loss
        if not isinstance(loss, nn.CrossEntropyLoss) or loss.reduction != "mean" or loss.weight is not None:
            raise NoCase("takes no loss: it is the matrix of a mean of cross-entropies")
        if case.y.min() < 0:
            raise NoCase("takes no targets")
        model = copy.deepcopy(case.model)
        found = FIM(model, case.loader, getattr(forms, self.form), variant="classif_logits").to_torch()
        layers = LayerCollection.from_model(model).get_layerid_module_maps(model)[0]
        return {"": self._placed(case, found, layers)}

    @staticmethod
    def _placed(case: Case, found: Tensor, layers: dict[str, nn.Module]) -> Tensor:
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


class NNGeometryDense(NNGeometry, Gauss):
    name, form = "`FIM(..., PMatDense)`", "PMatDense"


class NNGeometryFactors(NNGeometry, Factors):
    name, form = "`FIM(..., PMatKFAC)`", "PMatKFAC"
