"""Compression: networks with fewer weights, or coarser ones, at the least loss.

In: a matrix of curvature (`curvature.operators`) and the parameters where it was taken. Out: what each weight is worth
(`saliencies`), and new parameters by name with zeros (`prune`) or few levels (`quantize`), for which others make up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from curvature.arguments import check_whole
from curvature.kronecker import DenseSide, DiagonalSide, Side
from curvature.linalg import cat, cholesky, full_precision, widest
from curvature.operators import (
    BlockDiagonal,
    Curvature,
    Dense,
    Diagonal,
    Kronecker,
    MatrixFree,
    Operator,
    Parameters,
    Space,
    as_operator,
    blocks_of,
    conjugate_gradient,
    flat_parameters,
)

DAMPING = 0.01  # of the mean eigenvalue, as Frantar et al. 2022, arXiv:2210.17323, section 3.3
ROUGHLY = 1e-2  # tolerance of systems that a later round solves again
TOLERANCE = 1e-4  # of the last, for parameters in single precision
Sparsity = float | Mapping[str, float]


# -- optimal brain damage and optimal brain surgeon: weights that can be spared, and the others without them


def saliencies(K: Curvature, model: Parameters, damping: float | None = None) -> dict[str, Tensor]:
    """What each weight is worth: by how much the loss rises, to second order, if it is set to zero.

    With a `Diagonal` this is ``1/2 (K_qq + damping) w_q^2``, optimal brain damage (LeCun, Denker and Solla 1989). With
    any other matrix, after the best adjustment of all other weights of its block:
    ``1/2 w_q^2 / [(K + damping I)^-1]_qq``, optimal brain surgeon (Hassibi and Stork 1992). Kronecker factors give
    that diagonal from their eigenvectors, without the matrix.

    Args:
        K: any operator, at the model's parameters, in units of loss / parameter^2: `kfac`, `ekfac`, `fisher_blocks`,
            ``fisher(...).compact()``; or a diagonal by parameter name, as `fisher_diagonal` gives it.
        model: a model, or tensors by name; it stays as it is. Parameters that K does not have are left out.
        damping: in the units of K. By default none for a diagonal, and 0.01 times the mean eigenvalue of any other K.

    Returns:
        ``{name: tensor like the parameter}``, in units of the loss.

    Raises:
        ValueError: a block is singular or indefinite with this damping, parameters have another shape or device, or
            are not finite.
        KeyError: a parameter of K is missing.
    """
    K = as_operator(K)
    w = checked_parameters(K.space, model)
    damping = usual_damping(K) if damping is None else float(damping)
    parts = [QuadraticBlock(block, damping, flat_parameters(block.space, w)) for block in blocks_of(K)]
    scores = {name: s for part in parts for name, s in part.scores().items()}
    return {name: scores[name] for name in w}


def prune(
    K: Curvature, model: Parameters, sparsity: Sparsity, damping: float | None = None, *, rounds: int = 10
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Set the weights with the least `saliencies` to zero, and adjust all others to compensate.

    The others are where the quadratic model ``1/2 (w - theta)^T (K + damping I) (w - theta)`` of the loss has its
    minimum: what optimal brain surgeon reaches, one weight after the other, by steps
    ``-w_q / [H^-1]_qq H^-1 e_q`` (Hassibi and Stork 1992), is here one system for all. It is solved block by block:
    dense ones by Cholesky decomposition, all others by conjugate gradients, for which products are enough. Every round
    measures the saliencies again, at the weights as they are then: those of a `Dense` block by the inverse for the
    weights that are left (with many rounds this is the original algorithm), others by that of the whole block.

    Args:
        K: as for `saliencies`. With a `Diagonal` the others stay, and one of ones is magnitude pruning.
        model: as for `saliencies`.
        damping: likewise.
        sparsity: the share of zeros, 0 to 1, of all weights of K together: parameters with at least two dimensions.
            Or ``{name: share}``, which prunes these parameters alone, each for itself.
        rounds: in each, the same share of the weights that are left is removed.

    Returns:
        New parameters ``{name: tensor}`` for all of K, biases among them, as for ``model.load_state_dict(...,
        strict=False)``; and masks ``{name: tensor}`` for what was pruned, True where a weight is left, as for
        ``torch.nn.utils.prune.custom_from_mask``.

    Raises:
        ValueError, KeyError: as for `saliencies`; a sparsity is not between 0 and 1, or K has no such parameter.
        RuntimeError: conjugate gradients do not converge; more damping helps.

    The quadratic model holds near the parameters. To prune much, do it in steps: load the result, train on if you like,
    measure K again and prune further (weights that are zero go first). The gradient is taken to be zero.
    """
    K = as_operator(K)
    space, theta = K.space, checked_parameters(K.space, model)
    groups = _groups(space, sparsity)
    check_whole("rounds", rounds, 1)
    damping = usual_damping(K) if damping is None else float(damping)
    kind = lambda block: DenseBlock if isinstance(block, Dense) else QuadraticBlock
    parts = [kind(block)(block, damping, flat_parameters(block.space, theta)) for block in blocks_of(K)]
    free = {name: torch.ones_like(p, dtype=torch.bool) for name, p in theta.items()}
    for done in range(1, rounds + 1):
        scores = {name: s for part in parts for name, s in part.scores().items()}
        for names, share in groups:
            removed = 1 - (1 - share) ** (done / rounds)
            free |= _without_least({name: scores[name] for name in names}, removed)
        for part in parts:
            part.remove(flat_parameters(part.block.space, free).bool(), None if done == rounds else ROUGHLY)
    pruned = {name: p for part in parts for name, p in part.block.space.split(part.w).items()}
    return {name: pruned[name] for name in space.names}, {name: free[name] for names, _ in groups for name in names}


def checked_parameters(space: Space, model: Parameters) -> dict[str, Tensor]:
    return space.split(space.kept(flat_parameters(space, model), (space.size,), "the vector"))


def usual_damping(K: Operator) -> float:
    """None for diagonals, which need no inverse."""
    if all(isinstance(block, Diagonal) for block in blocks_of(K)):
        return 0.0
    mean = float(K.trace()) / K.space.size
    return DAMPING * mean if mean > 0 else 1.0


class QuadraticBlock:
    """``1/2 (w - start)^T (block + damping I) (w - start)``, and its minimum w (P,) over the weights that are left."""

    def __init__(self, block: Operator, damping: float, start: Tensor) -> None:
        self.block, self.damping, self.start, self.w = block, damping, start, start
        self.prepare(torch.ones_like(start, dtype=torch.bool))

    def prepare(self, free: Tensor) -> None:
        block, damping = self.block, self.damping
        if not isinstance(block, Diagonal):
            self.alone = 1 / block.inverse(damping).diagonal()  # along each weight while all others follow
            return
        self.alone = block.values + damping
        if (self.alone < 0).any():
            least = self.alone.min()
            raise ValueError(f"{block!r} is indefinite with damping {damping:.3g}: its least entry is {least:.3g}")

    def scores(self) -> dict[str, Tensor]:
        """How much the model rises if a weight goes and all others follow: here also those that were removed."""
        return self.block.space.split(self.w.square() * self.alone / 2)

    def remove(self, free: Tensor, rtol: float | None = None) -> None:
        """Leave these weights alone, and let them make up for the others, to a tolerance of `conjugate_gradient`."""
        self.w = self.w * free
        try:
            change = self._change(self.block, free, rtol)
        except RuntimeError:  # the rounding of products in single precision may be above the tolerance
            wide = widest(self.block.space.device.type)
            if self.block.space.dtype == wide or not self.block.fields:
                raise
            change = self._change(self.block.to(wide), free, TOLERANCE if rtol is None else rtol).to(self.w)
        self.w = self.w + change

    def _change(self, block: Operator, free: Tensor, rtol: float | None) -> Tensor:
        """That of the weights that are left, to the minimum."""
        product = lambda V: block @ V + self.damping * V
        lost = free * product((self.start - self.w).to(block.space.dtype)[:, None])[:, 0]
        scale = (block.diagonal() + self.damping)[:, None]
        within = MatrixFree(block.space, lambda V: torch.where(free[:, None], product(free[:, None] * V), V))
        return conjugate_gradient(within, lost, preconditioner=lambda V: V / scale, rtol=rtol)


class DenseBlock(QuadraticBlock):
    """The same with the inverse of the part of the matrix for the weights that are left, which makes scores exact."""

    @full_precision()
    def prepare(self, free: Tensor) -> None:
        root = cholesky(self.block.to_dense()[free][:, free], self.damping, repr(self.block))
        self.free, self.inverse = free, torch.cholesky_inverse(root)

    def scores(self) -> dict[str, Tensor]:
        scores = torch.zeros_like(self.w)
        scores[self.free] = self.w[self.free].square() / self.inverse.diagonal() / 2
        return self.block.space.split(scores)

    @full_precision()
    def remove(self, free: Tensor, rtol: float | None = None) -> None:
        self.w = self.w * free
        self.prepare(free)
        moved = (self.w - self.start)[:, None]
        self.w[free] -= self.inverse @ (self.block @ moved + self.damping * moved)[free, 0]


def _groups(space: Space, sparsity: Sparsity) -> list[tuple[Sequence[str], float]]:
    """Names of parameters whose weights compete, each with its share of zeros."""
    groups: list[tuple[Sequence[str], float]]
    if isinstance(sparsity, Mapping):
        groups = [([name], share) for name, share in sparsity.items()]
    else:
        groups = [([n for n, shape in zip(space.names, space.shapes, strict=True) if len(shape) > 1], sparsity)]
    for names, share in groups:
        if not 0 <= share <= 1:
            raise ValueError(f"sparsity: expected a share of zeros between 0 and 1, found {share}")
        if not names:
            raise ValueError(
                f"sparsity: none of {', '.join(space.names)} has two dimensions, as weights have; name those to prune, "
                f"as in {{{space.names[0]!r}: 0.5}}"
            )
        if unknown := sorted(set(names) - set(space.names)):
            raise ValueError(f"sparsity: {', '.join(unknown)} is none of {', '.join(space.names)}")
    return groups


def _without_least(scores: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
    """Which entries are left without this share of them, those with the least scores."""
    flat = cat(s.flatten() for s in scores.values())
    left = torch.ones_like(flat, dtype=torch.bool)
    left[flat.argsort(stable=True)[: round(share * len(flat))]] = False
    parts = left.split([s.numel() for s in scores.values()])
    return {name: part.reshape(s.shape).to(s.device) for (name, s), part in zip(scores.items(), parts, strict=True)}


# -- rounding to a few levels, where weights that are not rounded yet make up for those that are
#
# Weights of one block are taken one after the other, each to the level that is nearest once the errors made so far are
# made up for (GPTQ; Babai's nearest plane). With ``H = R^T R``, R upper triangular, errors e add up to ``|R e|^2 / 2``.
# For Kronecker factors R is a Kronecker product, too, and weights (o, i) with one o + i do not depend on each other.
# A grid (4, *shape) holds step, zero, top and whether it is free of each weight: levels are ``step * (0 - zero, ...,
# top - zero)``, any value where it is free. Indices: g group, o output, i input, k weights that are rounded together.


@full_precision()
def quantize(
    K: Curvature, model: Parameters, bits: int | Mapping[str, int], damping: float | None = None
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
    K = as_operator(K)
    space = K.space
    bits_of = _bits(K, bits)
    weights = checked_parameters(space, model)
    parts = {name: torch.cat([w[None], _grid(w, bits_of.get(name))]) for name, w in weights.items()}
    damping = usual_damping(K) if damping is None else float(damping)
    rounded: dict[str, Tensor] = {}
    for block in blocks_of(K):
        rounded |= block.space.split(_round(block, flat_parameters(block.space, parts), damping))
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


def _round(block: Operator, parts: Tensor, damping: float) -> Tensor:
    """The flat weights (P,) of a block, rounded: parts (5, P) are the weights and their grid."""
    if isinstance(block, Diagonal):
        return _nearest(parts[0], parts[1:])
    if isinstance(block, BlockDiagonal):  # rows that are read apart
        return block.by_blocks(lambda part, rows: _round(part, rows.mT.contiguous(), damping), parts.mT)
    if isinstance(block, Kronecker):
        damped = block.factored_damping(damping)
        arranged = block.arrangement.to_matrices(list(block.space.split(parts).values()))
        rounded = _in_order(arranged, *damped.factors, repr(block))
        return torch.cat([part.flatten() for part in block.arrangement.from_matrices(rounded)])
    dense = block.damped(damping).to_dense()
    return _in_order(parts[:, None, None], DiagonalSide(parts.new_ones(1, 1)), DenseSide(dense[None]), repr(block))[
        0, 0
    ]


def _in_order(parts: Tensor, rows: Side, columns: Side, what: str) -> Tensor:
    """Round weights (g, o, i) under ``kron(rows, columns)``."""
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


def _by_curvature(side: Side, is_free: Tensor) -> Tensor:
    """The order (d,) in which a side has its largest curvature last, and first of all what is not rounded (g, d)."""
    return torch.where(is_free.amin(0) > 0, -1, side.diagonal().mean(0)).argsort(stable=True)


def _coupling(side: Side, order: Tensor, what: str) -> Tensor | None:
    """R with rows divided by its diagonal, less I, for ``side = R^T R`` in this order; None for a diagonal side."""
    if side.is_diagonal:
        return None
    root = torch.stack([cholesky(matrix, 0.0, what) for matrix in side.entries[:, order[:, None], order]])
    upper = root.mT
    return (upper / upper.diagonal(dim1=1, dim2=2)[:, :, None]).triu(1)
