"""What compares values, gradients and Laplacians with the oracle."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import curvature
from support.oracles import laplacian as oracle


def assert_equal(found: oracle.Result, expected: oracle.Result, rtol: float = 1e-10) -> None:
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=rtol, atol=rtol * max(1.0, b.abs().max().item()))


def slopes(model: nn.Module, x: Tensor, result: oracle.Result) -> list[Tensor]:
    leaves = [*model.parameters(), *([x] if x.requires_grad else [])]
    return list(torch.autograd.grad(oracle.mixed(result), leaves, materialize_grads=True))


def check(model: Callable[[Tensor], Tensor], x: Tensor, weights: Tensor | None = None, rtol: float = 1e-10) -> None:
    found = curvature.laplacian(model, x, weights)
    assert_equal(found, oracle.laplacian(model, x, weights), rtol)
