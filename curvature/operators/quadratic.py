"""Quadratic models of losses around known parameters: as penalties, and the parameters that minimise their sum."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

from curvature.operators.base import Operator, Sum
from curvature.operators.block_diagonal import BlockDiagonal, Curvature, as_operator
from curvature.operators.conjugate_gradient import conjugate_gradient
from curvature.operators.space import MAX_DIRECT_SIZE, Space

Parameters = nn.Module | Mapping[str, Tensor]


def quadratic_penalty(K: Curvature, at: Parameters) -> Callable[[Parameters], Tensor]:
    """A function of the parameters: ``1/2 (theta - at)^T K (theta - at)``, a term to add to a loss.

    With K the Fisher matrix of an earlier task and `at` its solution this is elastic weight consolidation (Kirkpatrick
    et al. 2017, arXiv:1612.00796, equation 3); with K from `kfac` it is the penalty of Ritter et al. 2018,
    arXiv:1805.07810.

    Args:
        K: any operator, or a diagonal by parameter name (`fisher_diagonal`), in units of loss / parameter^2. An
            operator that goes over the data at every product (`fisher`, `hessian`) refuses a model that has changed
            since: give ``K.materialise()``.
        at: a model, or tensors by name; copied.

    Returns:
        A function of a model, or of tensors by name, that returns a scalar tensor in units of the loss. It is
        differentiable any number of times; value and gradient take one product. Parameters that K does not have are
        left out.

    Raises:
        KeyError: a parameter of K is missing; also from the function.
        ValueError: a shape, dtype or device differs from that of K; likewise.
    """
    K = as_operator(K)
    centre = flat_parameters(K.space, at).detach()
    return lambda parameters: _HalfSquare.apply(K, flat_parameters(K.space, parameters) - centre)


def merge(models: Sequence[Parameters], curvatures: Sequence[Curvature], damping: float = 0.0) -> dict[str, Tensor]:
    """The parameters that minimise the sum of the models' quadratic losses: ``(sum K_i)^-1 sum K_i theta_i``.

    Fisher merging (Matena and Raffel 2022, arXiv:2111.09832), for any structure of K; the weight of a model
    is a factor of its K. Models should have been fine-tuned from the same start.

    Args:
        models: models, or tensors by name.
        curvatures: K_i, operators or diagonals by parameter name, one for each model, over the same parameters.
        damping: added to each K_i, in units of loss / parameter^2. As it grows, the result becomes the plain average,
            which directions without curvature take at any damping.

    Returns:
        ``{name: tensor}`` for the parameters of the K_i, as for ``model.load_state_dict(..., strict=False)``.

    Raises:
        ValueError: not one K for each model, their spaces differ, or the sum is singular or indefinite.
        KeyError: a parameter of K is missing.
        RuntimeError: the conjugate gradients of a large block do not converge; more damping helps.

    Diagonals, dense matrices and blocks are added as such; other sums are solved with as dense matrices of up to 2000
    rows, and above that by conjugate gradients.
    """
    if not models or len(models) != len(curvatures):
        raise ValueError(f"expected one curvature for each model, found {len(models)} and {len(curvatures)}")
    matrices = list(map(as_operator, curvatures))
    total, space = reduce(add, matrices), matrices[0].space
    pull = torch.zeros(space.size, dtype=space.dtype, device=space.device)
    for K, model in zip(matrices, models, strict=True):
        theta = flat_parameters(space, model).detach()
        pull = pull + K @ theta + damping * theta
    return space.split(_solve(total, pull, damping * len(models)))


def flat_parameters(space: Space, parameters: Parameters) -> Tensor:
    """The parameters of a space, as a flat vector; a compiled model has those of the model within."""
    pairs = parameters.named_parameters() if isinstance(parameters, nn.Module) else parameters.items()
    named = {name.removeprefix("_orig_mod."): p for name, p in pairs}
    if missing := [name for name in space.names if name not in named]:
        some = ", ".join(list(named)[:5]) or "none"
        raise KeyError(
            f"the curvature is of {', '.join(missing)}, which the model does not have (but {some}); give the curvature "
            "of this model, by the names of its named_parameters()"
        )
    return space.flatten({name: named[name] for name in space.names if name in named})


class _HalfSquare(torch.autograd.Function):
    """``1/2 x^T K x``, whose gradient is the product that its value takes."""

    @staticmethod
    def forward(ctx: Any, K: Operator, x: Tensor) -> Tensor:
        image = K @ x
        ctx.K = K
        ctx.save_for_backward(x, image)
        return x @ image / 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        x, image = ctx.saved_tensors
        return None, gradients[0] * (_Product.apply(ctx.K, x) if torch.is_grad_enabled() else image)


class _Product(torch.autograd.Function):
    """``K x``, K being its own transpose."""

    @staticmethod
    def forward(ctx: Any, K: Operator, x: Tensor) -> Tensor:
        ctx.K = K
        return K @ x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, _Product.apply(ctx.K, gradients[0])


def _solve(K: Operator, v: Tensor, damping: float) -> Tensor:
    if isinstance(K, BlockDiagonal):
        return K.by_blocks(lambda block, rows: _solve(block, rows, damping), v)
    if isinstance(K, Sum) and K.space.size > MAX_DIRECT_SIZE:
        return conjugate_gradient(K, v, damping)
    return K.solve(v, damping)
