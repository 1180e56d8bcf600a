"""Kronecker factors of ``J^T J`` by layer, for values concatenated from pieces: KFAC for residual losses.

A layer that is read at t places of a sample has the gradient ``g[n] = sum_t b[n,t] a[n,t]^T``. In a Laplacian these
places are the value, its derivatives and the Laplacian itself, or the reads of a nested ``torch.autograd.grad``. Each
piece of the values (interior, boundary) has one Kronecker product (arXiv:2405.15603). That paper weights all places
alike ("expand"); here activations and backprops of a place are weighted by the size of the other:

    A = sum_nt beta_t a a^T / (N c),  B = sum_nt alpha_t b b^T / c,  c^2 = sum_t alpha_t beta_t,
    alpha_t = mean_n |a[n,t]|^2,  beta_t = sum_n |b[n,t]|^2,

so that the units of a and b at a place do not matter, and the trace equals that of ``sum_t B_t (x) A_t``, the sum of
the products of each place. A bias is one more input, 1 at the places where it is read and 0 elsewhere.

Indices: n sample, t place, i input, o output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from curvature.gradients import CentredJacobian, Jacobian
from curvature.kronecker import EigenInverse, Pair, invert_kronecker_sums
from curvature.linalg import full_precision, to_host
from curvature.operators import Named
from curvature.terms import DenseGradients, OuterProduct, Term, contractions, sum_of_squares


@dataclass(frozen=True)
class ResidualBlock:
    """A block of ``J^T J``: a weight (o, i), with its bias as the last input, or one parameter by its diagonal."""

    names: tuple[str, ...]  # the weight, and its bias if that is one more input of it
    pairs: Sequence[Pair] = ()  # a Kronecker product (B, A) for each piece that depends on the weight
    diagonal: Tensor | None = None  # the exact one, of the parameter's shape, if there are no products
    reason: str = ""  # why there are none, or why a bias has a block of its own

    def inverse(self, damping: float) -> EigenInverse | Tensor:
        """The inverse of ``block + damping I`` for `solve`, see `invert_kronecker_sums`."""
        return residual_inverses([self], damping)[0]

    def solve(self, inverse: EigenInverse | Tensor, right: Named) -> dict[str, Tensor]:
        """The solution for each parameter of the block, in its own shape."""
        parts = [right[name] for name in self.names]
        if isinstance(inverse, Tensor):
            return {self.names[0]: (parts[0].to(inverse.dtype) * inverse).to(parts[0].dtype)}
        matrices = [part.reshape(1, len(parts[0]), -1) for part in parts]
        x = torch.cat(matrices, 2) if len(matrices) > 1 else matrices[0]
        solution = inverse(x.to(inverse.values.dtype)).to(parts[0].dtype)
        each = zip(self.names, solution.split([matrix.shape[2] for matrix in matrices], 2), parts, strict=True)
        return {name: u.reshape(part.shape) for name, u, part in each}

    @property
    def structure(self) -> str:
        """Of the curvature, in a word."""
        return "kronecker" if self.pairs else "exact diagonal"

    def describe(self) -> str:
        """Shapes of the factors, for reports."""
        if self.diagonal is not None:
            return "x".join(map(str, self.diagonal.shape)) or "1"
        (rows, columns), count = self.pairs[0], len(self.pairs)
        product = f"{count} products{f' ({count - 1} merged)' if count > 2 else ''}, " if count > 1 else ""
        return f"{product}B {len(rows)}x{len(rows)}, A {len(columns)}x{len(columns)}"


def residual_inverses(blocks: Sequence[ResidualBlock], damping: float) -> list[EigenInverse | Tensor]:
    """`ResidualBlock.inverse` of each, with as few waits of the host as for one."""
    sums = iter(invert_kronecker_sums([block.pairs for block in blocks if block.pairs], damping))
    return [next(sums) if block.diagonal is None else _invert(block.diagonal, damping) for block in blocks]


def _invert(diagonal: Tensor, damping: float) -> Tensor:
    if not diagonal.numel():
        return diagonal
    floor = torch.finfo(diagonal.dtype).eps * diagonal.amax()
    return 1 / (diagonal + damping).clamp(min=torch.finfo(floor.dtype).tiny ** 0.5).maximum(floor)


@full_precision()
def residual_blocks(jacobian: Jacobian) -> list[ResidualBlock]:
    """The blocks of ``J^T J`` in the order of the parameters, each parameter in one of them.

    The reads of a weight must be merged, see `Jacobian.merged`.

    Raises:
        ValueError: the Jacobian is centred.
    """
    if isinstance(jacobian, CentredJacobian):
        raise ValueError(
            "jacobian: its rows less their mean are no sums of outer products, so they have no Kronecker factors; pass "
            "it as it was before centred()"
        )
    parts = [terms for _, terms in jacobian.parts]
    known = {name: [_read(part[name]) for part in parts] for name, shape in jacobian.shapes.items() if len(shape) == 2}
    reads = {name: [read for read in every if read is not None] for name, every in known.items()}
    reads = {name: every for name, every in reads.items() if len(every) == len(parts)}
    places, sizes = _places_and_sizes(reads, parts, jacobian.shapes)
    block_of: dict[str, ResidualBlock] = {}
    taken: set[str] = set()
    for name, read_by_piece in reads.items():
        bias = next((other for weight, other in places if weight == name and other not in taken), None)
        names, at = ((name,), [None] * len(read_by_piece)) if bias is None else ((name, bias), places[name, bias])
        taken |= set(names)
        whole = read_by_piece if bias is None else [_append_bias(*pair) for pair in zip(read_by_piece, at, strict=True)]
        each = zip(whole, sizes[name], at, strict=True)
        if pairs := [_kronecker_pair(read) for read, size, place in each if _is_positive(size, place)]:
            block_of |= dict.fromkeys(names, ResidualBlock(names, pairs))
    for name, shape in jacobian.shapes.items():
        if name not in block_of:
            squares = contractions.sum_in_place(sum_of_squares(part[name]) for part in parts)
            what = "which belongs to no weight's bias" if len(shape) < 2 else "whose Jacobian is no outer product"
            reason = f"no Kronecker factors exist for a parameter {what}"
            block_of[name] = ResidualBlock((name,), diagonal=squares, reason=reason)
    return list({id(block): block for block in (block_of[name] for name in jacobian.shapes)}.values())


def _kronecker_pair(read: OuterProduct) -> Pair:
    """B (o, o) and A (i, i) of one piece, as written above, in units of value^2 / parameter^2."""
    a, b, alpha, beta = _with_squares(read)
    size = (alpha * beta).sum().sqrt().clamp(min=torch.finfo(a.dtype).tiny)
    left = (a * (beta / (len(a) * size)).sqrt()[:, None]).flatten(0, 1)
    right = (b * (alpha / size).sqrt()[:, None]).flatten(0, 1)
    return right.mT @ right, left.mT @ left


def _with_squares(read: OuterProduct) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Activations (n, t, i) and backprops (n, t, o), and alpha (t,) and beta (t,) as written above."""
    a, b = (x[:, :, 0].to(torch.promote_types(x.dtype, torch.float32)) for x in (read.a, read.b))
    return a, b, a.square().sum((0, 2)) / len(a), b.square().sum((0, 2))


def _read(terms: Sequence[Term]) -> OuterProduct | None:
    """The places at which a matrix is read, empty if nothing depends on it; None if it is read in other ways."""
    term = terms[0]
    if len(terms) > 1 or len(term.shape) != 2:
        return None
    if isinstance(term, DenseGradients) and not term.values.any():
        outputs, inputs = (term.values.new_zeros(len(term), 0, 1, size) for size in term.shape)
        return OuterProduct(inputs, outputs, term.shape)
    if not isinstance(term, OuterProduct) or term.groups > 1 or term.order is not None:
        return None
    # rows and columns may be exchanged: the outer product is the same
    return term if term.outputs == term.shape[0] else replace(term, a=term.b, b=term.a)


Places = dict[tuple[str, str], list[int | None]]


def _places_and_sizes(
    reads: Mapping[str, Sequence[OuterProduct]],
    parts: Sequence[Mapping[str, Sequence[Term]]],
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[Places, dict[str, list[Tensor]]]:
    """At which places biases are read with a weight (None: not in this piece); alpha beta, beta (2, t) on the host."""
    flags: dict[tuple[str, str], list[Tensor]] = {}  # by weight and bias, for each piece
    for other, shape in shapes.items():
        device = parts[0][other][0].device
        weights = [
            k
            for k, of_weight in reads.items()
            if of_weight and shape == shapes[k][:1] and of_weight[0].device == device
        ]
        rows = [contractions.gradients(part[other]) for part in parts] if weights else []
        for name in weights:
            flags[name, other] = [
                torch.cat([row.any()[None], (read.b[:, :, 0] == row[:, None]).all(2).all(0)])
                for read, row in zip(reads[name], rows, strict=True)
            ]
    squares = {name: [_with_squares(read)[2:] for read in every] for name, every in reads.items()}
    sizes = {name: [torch.stack([alpha * beta, beta]) for alpha, beta in every] for name, every in squares.items()}
    flags, sizes = to_host((flags, sizes))
    places: Places = {}
    for pair, marks in flags.items():
        at = [mark.bool().tolist() for mark in marks]
        is_read = [is_any for is_any, *_ in at]
        if any(is_read) and all(any(same) for is_any, *same in at if is_any):
            places[pair] = [same.index(True) if is_any else None for is_any, *same in at]
    return places, sizes


def _is_positive(sizes: Tensor, at: int | None) -> bool:
    """Whether the product of a piece has a trace above zero, given its sizes and the place of a bias."""
    product, beta = sizes
    total = product.sum() if at is None else product.sum() + beta[at]
    return float(total) > torch.finfo(torch.float32).tiny


def _append_bias(read: OuterProduct, place: int | None) -> OuterProduct:
    """The bias as the last input, 1 at its place."""
    last = read.a.new_zeros(*read.a.shape[:3], 1)
    if place is not None:
        last[:, place] = 1
    return replace(read, a=torch.cat([read.a, last], 3), shape=(read.outputs, read.a.shape[3] + 1))
