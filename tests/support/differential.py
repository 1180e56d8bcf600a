"""Derivatives of outputs with respect to inputs, by autograd."""

import torch
from torch import Tensor


def gradient(u: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(u.sum(), x, create_graph=True)[0]


def laplacian(u: Tensor, x: Tensor) -> Tensor:
    g = gradient(u, x)
    return torch.stack([gradient(g[:, k], x)[:, k] for k in range(x.shape[1])]).sum(0)
