"""Brute-force references for losses that differentiate the model; nothing of the packages under test is imported."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.oracles.brute_force import trainable

Residual = Callable[..., Tensor]


def residual_jacobian(model: nn.Module, residual: Residual, *batch: Tensor) -> dict[str, Tensor]:
    """{name: (N, *shape)}: every sample alone goes through the residual, which is differentiated plainly."""
    parameters = trainable(model)
    rows = []
    for n in range(len(batch[0])):
        with written_out():
            (value,) = residual(model, *(x[n : n + 1].detach().clone().requires_grad_() for x in batch))
        found = torch.autograd.grad(value, list(parameters.values()), materialize_grads=True)
        rows.append(found)
    return {name: torch.stack(column) for name, column in zip(parameters, zip(*rows, strict=True), strict=True)}


@contextmanager
def written_out() -> Iterator[None]:
    """Layer norm by its definition: torch 2.13 has wrong third derivatives of its own kernel."""

    def layer_norm(x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
        dims = tuple(range(-len(shape), 0))
        out = (x - x.mean(dims, keepdim=True)) / (x.var(dims, unbiased=False, keepdim=True) + eps) ** 0.5
        return out * (1 if weight is None else weight) + (0 if bias is None else bias)

    with patch.object(F, "layer_norm", layer_norm):
        yield


def central_differences(model: nn.Module, residual: Residual, *batch: Tensor, eps: float = 1e-5) -> dict[str, Tensor]:
    """{name: (N, *shape)}: the values themselves with each entry of the parameters moved; no derivative is trusted."""

    def values() -> Tensor:
        return residual(model, *(x.detach().clone().requires_grad_() for x in batch)).detach()

    found = {}
    for name, p in trainable(model).items():
        columns = []
        for k in range(p.numel()):
            ends = []
            for step in (eps, -2 * eps):
                with torch.no_grad():
                    p.view(-1)[k] += step
                ends.append(values())
            with torch.no_grad():
                p.view(-1)[k] += eps
            columns.append((ends[0] - ends[1]) / (2 * eps))
        found[name] = torch.stack(columns, 1).reshape(-1, *p.shape)
    return found


def rows(values: Tensor, model: nn.Module) -> Tensor:
    """(M, P): one backward pass for each value, in the order of ``named_parameters()``."""
    leaves = list(trainable(model).values())
    found = [torch.autograd.grad(value, leaves, retain_graph=True, materialize_grads=True) for value in values]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in found])
