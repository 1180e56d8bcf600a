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
from curvature.kronecker import KroneckerSumInverse, Pair, at_least_float32, invert_kronecker_sum
from curvature.linalg import full_precision
from curvature.terms import DenseGradients, OuterProduct, Term, contractions, sum_of_squares

Named = Mapping[str, Tensor]


@dataclass(frozen=True)
class ResidualBlock:
    """A block of ``J^T J``: a weight (o, i), with its bias as the last input, or one parameter by its diagonal.

    Attributes:
        names: the weight, and its bias if that is one more input of it.
        pairs: a Kronecker product (B, A) for each piece that depends on the weight.
        diagonal: the exact diagonal, of the parameter's shape, if there are no products.
        reason: why there are none, or why a bias has a block of its own.
    """

    names: tuple[str, ...]
    pairs: Sequence[Pair] = ()
    diagonal: Tensor | None = None
    reason: str = ""

    def inverse(self, damping: float) -> KroneckerSumInverse | Tensor:
        """The inverse of ``block + damping I`` for `solve`, see `invert_kronecker_sum`."""
        if self.pairs:
            return invert_kronecker_sum(self.pairs, damping)
        assert self.diagonal is not None
        floor = torch.finfo(self.diagonal.dtype).eps * self.diagonal.amax()
        return 1 / (self.diagonal + damping).clamp(min=torch.finfo(floor.dtype).tiny ** 0.5).maximum(floor)

    def solve(self, inverse: KroneckerSumInverse | Tensor, right: Named) -> dict[str, Tensor]:
        """The solution for each parameter of the block, in its own shape."""
        weight, *bias = (right[name] for name in self.names)
        if isinstance(inverse, Tensor):
            return {self.names[0]: (weight.to(inverse.dtype) * inverse).to(weight.dtype)}
        x = weight.reshape(len(inverse.rows), -1)
        x = torch.cat([x, bias[0].reshape(-1, 1)], 1) if bias else x
        found = inverse.solve(x.to(inverse.rows.dtype)).to(weight.dtype)
        if not bias:
            return {self.names[0]: found.reshape(weight.shape)}
        return {self.names[0]: found[:, :-1].reshape(weight.shape), self.names[1]: found[:, -1].reshape(bias[0].shape)}

    def describe(self) -> str:
        """Shapes of the factors, for reports."""
        if not self.pairs:
            return "exact diagonal"
        (rows, columns), count = self.pairs[0], len(self.pairs)
        product = f"{count} Kronecker product{'s' * (count > 1)}" + ", all but one merged" * (count > 2)
        return f"{product}, B {len(rows)}x{len(rows)}, A {len(columns)}x{len(columns)}"


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
    found: dict[str, ResidualBlock] = {}
    for name, shape in jacobian.shapes.items():
        reads = [_read(part[name]) for part in parts]
        own = [read for read in reads if read is not None]
        if len(own) < len(reads) or len(shape) != 2:
            continue
        left = [other for other, size in jacobian.shapes.items() if other not in found and size == shape[:1]]
        bias = next((other for other in left if _is_joint_bias(own, [part[other] for part in parts])), None)
        if bias is not None:
            own = [_append_bias(read, part[bias]) for read, part in zip(own, parts, strict=True)]
        pairs = [kronecker_pair(read) for read in own]
        pairs = [pair for pair in pairs if bool(pair[0].trace() * pair[1].trace() > 0)]
        if pairs:
            names = (name,) if bias is None else (name, bias)
            found |= dict.fromkeys(names, ResidualBlock(names, pairs))
    for name, shape in jacobian.shapes.items():
        if name not in found:
            squares = contractions.sum_in_place(sum_of_squares(part[name]) for part in parts)
            reason = "no weight's bias" if len(shape) < 2 else "its rows are no outer products"
            found[name] = ResidualBlock((name,), diagonal=squares, reason=reason)
    return list({id(block): block for block in (found[name] for name in jacobian.shapes)}.values())


def kronecker_pair(read: OuterProduct) -> Pair:
    """B (o, o) and A (i, i) of one piece, as written above, in units of value^2 / parameter^2."""
    a, b = (x[:, :, 0].to(at_least_float32(x.dtype)) for x in (read.a, read.b))
    alpha, beta = a.square().sum((0, 2)) / len(a), b.square().sum((0, 2))
    size = (alpha * beta).sum().sqrt().clamp(min=torch.finfo(a.dtype).tiny)
    left = (a * (beta / (len(a) * size)).sqrt()[:, None]).flatten(0, 1)
    right = (b * (alpha / size).sqrt()[:, None]).flatten(0, 1)
    return right.mT @ right, left.mT @ left


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


def _is_joint_bias(reads: Sequence[OuterProduct], parts: Sequence[Sequence[Term]]) -> bool:
    """Whether a parameter is a bias that is read together with a weight, in every piece that depends on it."""
    places = [_places(read, terms) for read, terms in zip(reads, parts, strict=True)]
    return None not in places and any(places)


def _places(read: OuterProduct, terms: Sequence[Term]) -> tuple[int, ...] | None:
    """The place of a weight at which a bias is read: there both have the same backprop. () if it is not read."""
    rows = contractions.gradients(terms)
    if not rows.any():
        return ()
    return next(((t,) for t in range(read.places) if torch.equal(read.b[:, t, 0], rows)), None)


def _append_bias(read: OuterProduct, terms: Sequence[Term]) -> OuterProduct:
    """The bias as the last input."""
    last = read.a.new_zeros(*read.a.shape[:3], 1)
    for t in _places(read, terms) or ():
        last[:, t] = 1
    return replace(read, a=torch.cat([read.a, last], 3), shape=(read.outputs, read.a.shape[3] + 1))
