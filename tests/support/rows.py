"""Gradients of samples, and all that is made of them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import curvature
from support.comparisons import matches
from support.oracles.brute_force import trainable


def rows_of(model: nn.Module, values: Iterable[Tensor]) -> dict[str, Tensor]:
    """The gradients of values, one of each sample, by a backward pass each."""
    named = trainable(model)
    options: Any = {"materialize_grads": True, "retain_graph": True}
    rows = zip(*(torch.autograd.grad(value, list(named.values()), **options) for value in values), strict=True)
    return {name: torch.stack(own) for name, own in zip(named, rows, strict=True)}


def real(rows: dict[str, Tensor]) -> Tensor:
    """(N, P), two columns for each complex entry."""
    return torch.cat([(torch.view_as_real(g) if g.is_complex() else g).reshape(len(g), -1) for g in rows.values()], 1)


def clipped(rows: dict[str, Tensor], bound: float) -> dict[str, Tensor]:
    factors = (bound / real(rows).norm(dim=1)).clamp(max=1)
    return {name: torch.tensordot(factors.to(g.dtype), g, 1) for name, g in rows.items()}


def all_of_rows(model: nn.Module, loss: Any, x: Any, y: Any, rows: dict[str, Tensor], **options: Any) -> None:
    """Per-sample gradients are these rows, now and when the structure is known, and all that is made of them is."""
    data, flat = (model, loss, x, y), real(rows)
    bound = float(flat.norm(dim=1).median())
    for _ in range(2):
        same(curvature.per_sample_gradients(*data, **options), rows)
    matches(curvature.per_sample_norms(*data, **options).square(), flat.square().sum(1))
    matches(curvature.per_sample_gram(*data, **options), flat @ flat.T)
    norms = curvature.per_sample_norms_by_parameter(*data, **options)
    squares = {k: real({k: g}).square().sum(1) for k, g in rows.items()}
    same({name: own.square() for name, own in norms.items()}, squares)
    same(curvature.clipped_gradient(*data, bound, **options), clipped(rows, bound))


def same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-10) -> None:
    """Of tensors by name."""
    assert list(found) == list(expected) and not any(g.requires_grad for g in found.values())
    for name, g in expected.items():
        matches(found[name], g, tolerance)
