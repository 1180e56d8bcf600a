"""Brute-force reference for values, gradients and Laplacians; nothing of the packages under test is imported."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from support.oracles.derivatives import written_out

Model = Callable[[Tensor], Tensor]
Result = tuple[Tensor, Tensor, Tensor]


def laplacian(model: Model, x: Tensor, weights: Tensor | None = None) -> Result:
    """Sample after sample, entry after entry of the output, by whole Hessians; nothing can be differentiated again."""
    rows = [_alone(model, sample.detach(), weights) for sample in x]
    u, grad, second = (torch.stack(column) for column in zip(*rows, strict=True))
    return u, grad, second


def _alone(model: Model, x: Tensor, weights: Tensor | None) -> Result:
    d = x.numel()
    C = torch.eye(d).to(x) if weights is None else torch.diag(weights) if weights.ndim == 1 else weights
    with plain(), sdpa_kernel(SDPBackend.MATH):
        u = model(x[None])[0].detach()
        grads, sums = [], []
        for k in range(u.numel()):
            entry = lambda x, k=k: model(x[None])[0].reshape(-1)[k]
            grads.append(torch.autograd.functional.jacobian(entry, x))
            sums.append((C * torch.autograd.functional.hessian(entry, x).reshape(d, d)).sum())
    return u, torch.stack(grads).reshape(*u.shape, *x.shape), torch.stack(sums).reshape(u.shape)


def differentiable(model: Model, x: Tensor, weights: Tensor | None = None) -> Result:
    """The same by gradients of gradients of one sample, which can be differentiated by the parameters."""
    rows = []
    for sample in x:
        y = sample[None] if sample.requires_grad else sample[None].detach().requires_grad_()
        with plain(), sdpa_kernel(SDPBackend.MATH):
            u = model(y)[0]
        C = torch.eye(y.numel()).to(y) if weights is None else torch.diag(weights) if weights.ndim == 1 else weights
        grads, sums = [], []
        for entry in u.reshape(-1):
            grad = _gradient(entry, y)
            hessian = torch.stack([_gradient(g, y) for g in grad])
            grads.append(grad)
            sums.append((C * hessian).sum())
        rows.append((u, torch.stack(grads).reshape(*u.shape, *sample.shape), torch.stack(sums).reshape(u.shape)))
    u, grad, second = (torch.stack(column) for column in zip(*rows, strict=True))
    return u, grad, second


@contextmanager
def plain() -> Iterator[None]:
    """Norms by their definitions: torch 2.13 has wrong third derivatives of batch and instance norm, too."""

    def batch_norm(
        x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, training: bool, momentum: float, eps: float
    ) -> Tensor:
        assert not training
        return (x - mean) / (var + eps) ** 0.5 * weight + bias

    def instance_norm(
        x: Tensor, mean: None, var: None, weight: Tensor, bias: Tensor, stats: bool, momentum: float, eps: float
    ) -> Tensor:
        out = (x - x.mean(2, keepdim=True)) / (x.var(2, unbiased=False, keepdim=True) + eps) ** 0.5
        return out * weight[:, None] + bias[:, None]

    with written_out(), patch.object(F, "batch_norm", batch_norm), patch.object(F, "instance_norm", instance_norm):
        yield


def _gradient(value: Tensor, y: Tensor) -> Tensor:
    if not value.requires_grad:
        return torch.zeros_like(y).flatten()
    return torch.autograd.grad(value, y, create_graph=True, materialize_grads=True)[0].flatten()


def mixed(result: Result) -> Tensor:
    """A scalar of all three, in which every entry counts differently."""
    total = torch.zeros((), dtype=torch.float64)
    for k, part in enumerate(result):
        weights = torch.arange(part.numel(), dtype=part.dtype).reshape(part.shape).add(1 + k).sin()
        total = total + (weights * (part + part.square() / 3)).sum()
    return total


def difference(value: Callable[[], Tensor], parameter: Tensor, direction: Tensor, eps: float = 1e-5) -> Tensor:
    """How a scalar changes as a parameter moves along a direction, by central differences."""
    start, ends = parameter.detach().clone(), []
    for step in (eps, -eps):
        parameter.detach().copy_(start + step * direction)
        ends.append(value().detach())
    parameter.detach().copy_(start)
    return (ends[0] - ends[1]) / (2 * eps)
