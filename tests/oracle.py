"""Brute-force references: a loop of batch size one, torch only. Nothing of the packages under test is imported here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """`tree` (a tensor, or tuples, lists and dicts of them) with every tensor replaced; anything else stays."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_tensors(function, item) for item in tree)
    if isinstance(tree, dict):
        return {key: map_tensors(function, item) for key, item in tree.items()}
    return tree


def forward(model: nn.Module, x: Any) -> Any:
    """The output of `model`, or its `.logits`, for a tensor, a tuple of positional or a dict of keyword arguments."""
    if isinstance(x, dict):
        output = model(**x)
    elif isinstance(x, tuple):
        output = model(*x)
    else:
        output = model(x)
    return output.logits if hasattr(output, "logits") else output


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def per_sample_gradients(model, loss, x, y, sample_dim: int | tuple[int, int, int] = 0) -> dict[str, Tensor]:
    """{name: (N, *shape)}: the gradient of the loss on each sample alone."""
    input_dim, _, target_dim = (sample_dim,) * 3 if isinstance(sample_dim, int) else sample_dim
    count = _count(y, target_dim)
    parameters = trainable(model)
    rows = []
    with _undisturbed(model), torch.enable_grad():
        for n in range(count):
            output = forward(model, _take(x, n, count, input_dim))
            value = loss(output, _take(y, n, count, target_dim))
            rows.append(_gradient(value, list(parameters.values())))
    columns = zip(*rows, strict=True)
    return {name: torch.stack(column) for name, column in zip(parameters, columns, strict=True)}


def per_sample_norms(model, loss, x, y, sample_dim: int | tuple[int, int, int] = 0) -> Tensor:
    """(N,): the norm of each sample's gradient over all parameters together."""
    return norms(per_sample_gradients(model, loss, x, y, sample_dim))


def per_sample_gram(model, loss, x, y, sample_dim: int | tuple[int, int, int] = 0) -> Tensor:
    """(N, N): inner products of the samples' gradients over all parameters together."""
    return gram(per_sample_gradients(model, loss, x, y, sample_dim))


def norms(gradients: dict[str, Tensor]) -> Tensor:
    return _flat(gradients).norm(dim=1)


def gram(gradients: dict[str, Tensor]) -> Tensor:
    rows = _flat(gradients)
    return rows @ rows.T


def _flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([g.reshape(len(g), -1) for g in gradients.values()], dim=1)


def _gradient(value: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    gradients = torch.autograd.grad(value, parameters, allow_unused=True)
    dense = (None if g is None else g.to_dense() if g.is_sparse else g for g in gradients)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, dense, strict=True)]


def _count(y: Any, dim: int) -> int:
    sizes: list[int] = []
    map_tensors(lambda tensor: sizes.append(tensor.shape[dim]), y)
    return sizes[0]


def _take(tree: Any, n: int, count: int, dim: int) -> Any:
    def one(tensor: Tensor) -> Tensor:
        has_samples = tensor.dim() > dim and tensor.shape[dim] == count
        return tensor.narrow(dim, n, 1) if has_samples else tensor

    return map_tensors(one, tree)


@contextlib.contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Forward passes inside leave the random state and the buffers (running statistics) as they were."""
    before = [buffer.clone() for buffer in model.buffers()]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(model.buffers(), before, strict=True):
                buffer.copy_(value)
