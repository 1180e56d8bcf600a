"""Rounding to a few levels, where weights that are not rounded yet make up for those that are.

Weights of one block are taken one after the other, each to the level that is nearest once the errors made so far are
made up for (GPTQ; Babai's nearest plane). With ``H = R^T R``, R upper triangular, errors e add up to ``|R e|^2 / 2``.
For Kronecker factors R is a Kronecker product, too, and weights (o, i) with one o + i do not depend on each other.

A grid (4, *shape) holds step, zero, top and whether it is free of each weight: levels are ``step * (0 - zero, ...,
top - zero)``, any value where it is free.

Indices: g group, o output, i input, k weights that are rounded together.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from curvature.linalg import cholesky, full_precision
from curvature.operators import Diagonal, Kronecker, Operator, Parameters, RowBlocks, blocks_of, flat_parameters
from curvature.uses.compression.pruning import checked_parameters, usual_damping


@full_precision()
def quantize(
    K: Operator, model: Parameters, bits: int | Mapping[str, int], damping: float | None = None
) -> dict[str, Tensor]:
    """Round weights to 2^bits levels per row, so that the loss rises as little as can be.

    The levels of a row (an entry of a parameter's first dimension) go in equal steps from its least to its largest
    weight, zero among them. Weights are rounded one after the other, and those to come are adjusted for the error: with
    the factor A alone this is GPTQ (Frantar et al. 2022, arXiv:2210.17323); with both factors of ``kron(B, A)`` in
    other rows, too. Inputs and outputs with the most curvature come first, biases last. Weights that are zero stay
    zero, so that `prune` may come before.

    Args:
        K: any operator, as for `saliencies`. Blocks of Kronecker factors are rounded by those, `Diagonal` ones to
            the nearest level. All others are built as dense matrices, and take as many steps as they have rows.
        model: a model, or tensors by name; it stays as it is.
        bits: of all parameters with at least two dimensions, or ``{name: bits}`` for these alone.
        damping: in the units of K, by default 0.01 times its mean eigenvalue. Kronecker factors are damped each
            (`Kronecker.factored_damping`).

    Returns:
        New parameters ``{name: tensor}`` for all of K, as for ``model.load_state_dict(..., strict=False)``.

    Raises:
        ValueError, KeyError: as for `saliencies`; bits are not a whole number from 1 to 16, K has no such parameter, or
            a block is too large to be built (a block of `ekfac`: take `kfac`).
    """
    space = K.space
    bits_of = _bits(K, bits)
    weights = checked_parameters(space, model)
    parts = {name: torch.cat([w[None], _grid(w, bits_of.get(name))]) for name, w in weights.items()}
    damping = usual_damping(K) if damping is None else float(damping)
    rounded: dict[str, Tensor] = {}
    for block in blocks_of(K):
        rounded |= block.space.split(_rounded(block, flat_parameters(block.space, parts), damping))
    return {name: rounded[name] for name in space.names}


def _bits(K: Operator, bits: int | Mapping[str, int]) -> Mapping[str, int]:
    shapes = dict(zip(K.space.names, K.space.shapes, strict=True))
    bits_of = bits if isinstance(bits, Mapping) else {n: bits for n, shape in shapes.items() if len(shape) > 1}
    for name, number in bits_of.items():
        if len(shapes.get(name, ())) < 2:
            raise ValueError(f"bits: no weight {name} with two dimensions among {', '.join(shapes)}")
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= 16:
            raise ValueError(f"bits: expected a whole number from 1 to 16, found {number!r}")
    return bits_of


def _grid(weight: Tensor, bits: int | None) -> Tensor:
    """From the least to the largest entry of each row of a parameter, zero being one of the levels."""
    if bits is None or not weight.numel():
        zeros = torch.zeros_like(weight)
        return torch.stack([zeros, zeros, zeros, torch.ones_like(weight)])
    rows = weight.flatten(1)
    low, high = rows.amin(1, keepdim=True).clamp(max=0), rows.amax(1, keepdim=True).clamp(min=0)
    top = 2.0**bits - 1
    step = (high - low) / top
    zero = torch.where(step > 0, -low / step, step).round()
    parts = step.expand_as(rows), zero.expand_as(rows), torch.full_like(rows, top), torch.zeros_like(rows)
    return torch.stack(parts).reshape(4, *weight.shape)


def _nearest(x: Tensor, grid: Tensor) -> Tensor:
    step, zero, top, is_free = grid
    scaled = torch.where(step > 0, x / step, torch.zeros_like(x))
    level = torch.minimum((scaled.round() + zero).clamp(min=0), top)
    return torch.where(is_free > 0, x, (level - zero) * step)


def _rounded(block: Operator, parts: Tensor, damping: float) -> Tensor:
    """The flat weights (P,) of a block, rounded: parts (5, P) are the weights and their grid."""
    if isinstance(block, Diagonal):
        return _nearest(parts[0], parts[1:])
    if isinstance(block, RowBlocks):
        of = lambda part, rows: _rounded(part, rows.mT.contiguous(), damping)
        permuted = block.inner.by_blocks(of, parts.mT[block.order])
        return torch.empty_like(permuted).index_copy_(0, block.order, permuted)
    if isinstance(block, Kronecker):
        damped = block.factored_damping(damping)
        arranged = block.arrangement.to_matrices(list(block.space.split(parts).values()))
        rounded = _in_order(arranged, damped.rows, damped.columns, repr(block))
        return torch.cat([part.flatten() for part in block.arrangement.from_matrices(rounded)])
    dense = block.damped(damping).to_dense()
    return _in_order(parts[:, None, None], parts.new_ones(1, 1), dense[None], repr(block))[0, 0]


def _in_order(parts: Tensor, rows: Tensor, columns: Tensor, what: str) -> Tensor:
    """Round weights (g, o, i) under ``kron(rows, columns)``, whose sides are (g, d, d), or (g, d) if diagonal."""
    is_free = parts[4]
    outputs, inputs = _by_curvature(rows, is_free.amin(2)), _by_curvature(columns, is_free.amin(1))
    parts = parts[:, :, outputs[:, None], inputs]
    w, grid = parts[0], parts[1:]
    of_rows, of_columns = _coupling(rows, outputs, what), _coupling(columns, inputs, what)
    error, carried = torch.zeros_like(w), torch.zeros_like(w)  # carried: the errors, and what inputs make of them
    is_zero = (w == 0) & (grid[3] == 0)
    # places along a side, or zeros if none depends on another: later ones come first
    turns = lambda order, coupling: torch.arange(len(order), device=w.device) * (coupling is not None)
    turn = turns(outputs, of_rows)[:, None] + turns(inputs, of_columns)
    for step in range(int(turn.max()), -1, -1):
        o, i = (turn == step).nonzero(as_tuple=True)
        at = slice(None), o, i
        through = torch.zeros_like(w[at]) if of_columns is None else (error[:, o] * of_columns[:, i]).sum(2)
        across = torch.zeros_like(through) if of_rows is None else (carried.mT[:, i] * of_rows[:, o]).sum(2)
        rounded = torch.where(is_zero[at], 0, _nearest(w[at] - through - across, grid[:, :, o, i]))
        error[at] = rounded - w[at]
        carried[at] = error[at] + through
    result = torch.empty_like(w)
    result[:, outputs[:, None], inputs] = w + error
    return result


def _by_curvature(side: Tensor, is_free: Tensor) -> Tensor:
    """The order (d,) in which a side has its largest curvature last, and first of all what is not rounded (g, d)."""
    diagonal = side if side.ndim == 2 else side.diagonal(dim1=1, dim2=2)
    return torch.where(is_free.amin(0) > 0, -1, diagonal.mean(0)).argsort(stable=True)


def _coupling(side: Tensor, order: Tensor, what: str) -> Tensor | None:
    """R with rows divided by its diagonal, less I, for ``side = R^T R`` in this order; None for a diagonal side."""
    if side.ndim == 2:
        return None
    root = torch.stack([cholesky(matrix, 0.0, what) for matrix in side[:, order[:, None], order]])
    upper = root.mT
    return (upper / upper.diagonal(dim1=1, dim2=2)[:, :, None]).triu(1)
