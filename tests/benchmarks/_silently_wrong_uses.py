"""Calls of the peers for `silently_wrong.py`, of posteriors, training and derivatives by the inputs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from _silently_wrong_calls import Call, Named, NoCase, identity, matrices, only_batch, trained
from _silently_wrong_cases import Case
from torch import Tensor, nn
from torch.func import hessian, vmap

import curvature
from optimizers import KFAC
from support.oracles import brute_force, derivatives, kronecker, laplacian

# Posteriors.


class Laplace(Call):
    peer = "laplace-torch"

    @staticmethod
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

    @staticmethod
    def summed(case: Case) -> tuple[brute_force.Matrices, float]:
        """References of the sum of the losses, and by what the curvature of one is that of a likelihood."""
        if case.loss is None:
            raise NoCase("no loss")
        loss, model = copy.copy(case.loss), copy.deepcopy(case.model).eval()
        loss.reduction = "sum"
        return brute_force.Matrices(model, loss, case.batches), 0.5 if isinstance(loss, nn.MSELoss) else 1.0

    @staticmethod
    def posterior(case: Case, structure: str) -> Any:
        return curvature.laplace(copy.deepcopy(case.model).eval(), case.loss, case.loader, structure)


class LaplaceFull(Laplace):
    """Precision of all parameters."""

    name = '`Laplace(..., "all", "full")`'

    def theirs(self, case: Case) -> Named:
        return {"": self.fitted(case, subset_of_weights="all", hessian_structure="full").posterior_precision}

    def truth(self, case: Case) -> Named:
        of, factor = self.summed(case)
        return {"": factor * of.gauss_newton + identity(case)}

    def ours(self, case: Case) -> Named:
        return {"": self.posterior(case, "dense").precision.to_dense()}


class LaplaceFactors(Laplace):
    """Precision of all parameters, weights and biases apart."""

    name = '`Laplace(..., "all", "kron")`'

    def theirs(self, case: Case) -> Named:
        fitted = self.fitted(case, subset_of_weights="all", hessian_structure="kron")
        return {"": fitted.posterior_precision.to_matrix()}

    def truth_of_ours(self, case: Case) -> Named:
        if not case.is_affine:
            raise NoCase("no factors of the textbook")
        of, factor = self.summed(case)
        return {"": factor * kronecker.kronecker(kronecker.affine_layers(of)) + identity(case)}

    def truth(self, case: Case) -> Named:
        blocks = [[name] for name in trained(case.model)]
        return {"": brute_force.blocks(case.model, self.truth_of_ours(case)[""], blocks)}

    def ours(self, case: Case) -> Named:
        return {"": self.posterior(case, "kfac").precision.to_dense()}


class LaplaceLast(Laplace):
    """What the default, the last layer, predicts: probabilities, or the variance of a regression."""

    name = '`Laplace(..., hessian_structure="full")`'
    other_name = '`subset_of_weights="all"`'

    def theirs(self, case: Case) -> Named:
        fitted = self.fitted(case, hessian_structure="full")
        found = fitted(case.batches[0][0])
        return {"": found[1] if isinstance(found, tuple) else found}

    def truth(self, case: Case) -> Named:
        if not case.is_affine or case.y.ndim > 1 and not isinstance(case.loss, nn.MSELoss):
            raise NoCase("no predictions of one output per sample")
        of, factor = self.summed(case)
        index = torch.cat([index.flatten() for index in list(brute_force.positions(of.model).values())[-2:]])
        precision = factor * of.gauss_newton[index[:, None], index] + torch.eye(len(index))
        return {"": self._predicted(case, of, torch.linalg.inv(precision), index)}

    @staticmethod
    def _predicted(case: Case, of: brute_force.Matrices, covariance: Tensor, index: Tensor) -> Tensor:
        rows = [brute_force.jacobian(of.model, x[None]) for x in case.batches[0][0]]
        outputs = torch.cat([output for output, _ in rows])
        variances = torch.stack([jacobian[:, index] @ covariance @ jacobian[:, index].T for _, jacobian in rows])
        if isinstance(case.loss, nn.MSELoss):
            return variances
        return (outputs / (1 + math.pi / 8 * variances.diagonal(dim1=1, dim2=2)).sqrt()).softmax(1)  # probit

    def ours(self, case: Case) -> Named:
        (x, _), posterior = case.batches[0], self.posterior(case, "last_layer")
        return {"": posterior.outputs(x)[1] if isinstance(case.loss, nn.MSELoss) else posterior.predict(x).mean}

    def other(self, case: Case) -> Named:
        """Of another posterior, which is right if it is that of all parameters."""
        fitted = self.fitted(case, subset_of_weights="all", hessian_structure="full")
        found, (of, factor) = fitted(case.batches[0][0]), self.summed(case)
        covariance, index = (
            torch.linalg.inv(factor * of.gauss_newton + identity(case)),
            torch.arange(len(identity(case))),
        )
        error = (found[1] if isinstance(found, tuple) else found) - self._predicted(case, of, covariance, index)
        return {"": self.truth(case)[""] + error}


# Training.


class SINGDInputs(Call):
    """The covariance of each layer's inputs in the first step, where the preconditioner is the identity."""

    peer, name = "singd", "`SINGD` (inputs' covariance)"

    def theirs(self, case: Case) -> Named:
        from singd.optim.optimizer import SINGD

        (x, y), model = only_batch(case), copy.deepcopy(case.model)
        opt = SINGD(model)
        case.loss(model(x), y).backward()
        found = {name: side.to_dense().clone() for name, side in opt.H_Ks.items()}
        opt.step()
        return found

    def truth(self, case: Case) -> Named:
        only_batch(case)
        if not case.is_affine:
            raise NoCase("no factors of the textbook")
        layers = kronecker.affine_layers(matrices(case))
        if any(len(layer.index) > 1 for layer in layers):
            raise NoCase("one factor for all groups of channels, which is documented")
        known = [layer for layer in layers if isinstance(layer.module, nn.Linear | nn.Conv2d)]
        return {layer.name: layer.factors()[0][0] for layer in known}

    def ours(self, case: Case) -> Named:
        K = curvature.kfac(case.model, case.loss, case.loader)
        return {name: K[name].A[0] for name in self.truth(case)}


class SINGDTrained(Call):
    """Which parameters move in a step, of those that have a gradient."""

    peer, name = "singd", "`SINGD` (what it trains)"

    @staticmethod
    def _moved(case: Case, make: Callable[[nn.Module], Any]) -> Named:
        (x, y), model = only_batch(case), copy.deepcopy(case.model)
        opt = make(model)
        case.loss(model(x), y).backward()
        have_gradients = {name: p for name, p in trained(model).items() if p.grad is not None and p.grad.norm() > 1e-9}
        before = {name: p.detach().clone() for name, p in have_gradients.items()}
        opt.step()
        return {name: (p != before[name]).any().double() for name, p in have_gradients.items()}

    def theirs(self, case: Case) -> Named:
        from singd.optim.optimizer import SINGD

        return self._moved(case, SINGD)

    def truth(self, case: Case) -> Named:
        return self._moved(case, lambda model: torch.optim.SGD(model.parameters(), 0.1))

    def ours(self, case: Case) -> Named:
        return self._moved(case, KFAC)


# Derivatives by the inputs.


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


class FuncLaplacian(Call):
    peer, name = "torch", "`vmap(torch.func.hessian(...))` by the inputs"
    other_name = "nested `torch.autograd.grad`"

    def theirs(self, case: Case) -> Named:
        second = vmap(hessian(lambda x: case.model(x[None])[0, 0]))(only_inputs(case))
        return {"": second.diagonal(dim1=1, dim2=2).sum(1)}

    def truth(self, case: Case) -> Named:
        return {"": laplacian.laplacian(case.model, only_inputs(case))[2][:, 0]}

    def ours(self, case: Case) -> Named:
        return {"": curvature.laplacian(case.model, only_inputs(case))[2][:, 0]}

    def other(self, case: Case) -> Named:
        return {"": plain_laplacian(case.model, only_inputs(case)).detach()}


class LaplacianGradient(Call):
    peer, name = "torch", "backward pass of the Laplacian (`torch.autograd`)"

    def theirs(self, case: Case) -> Named:
        values = plain_laplacian(case.model, only_inputs(case))
        names, parameters = zip(*trained(case.model).items(), strict=True)
        rows = [torch.autograd.grad(v, parameters, retain_graph=True, materialize_grads=True) for v in values]
        return {name: torch.stack(g) for name, g in zip(names, zip(*rows, strict=True), strict=True)}

    def truth(self, case: Case) -> Named:
        return derivatives.central_differences(case.model, plain_laplacian, only_inputs(case))

    def ours(self, case: Case) -> Named:
        return curvature.residual_jacobian(case.model, plain_laplacian, only_inputs(case))
