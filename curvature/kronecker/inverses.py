"""Inverses of Kronecker products and of their sums, and eigenbases of sides: sides of one form together.

Two products ``kron(B1, A1) + kron(B2, A2)`` are diagonalised jointly (arXiv:2405.15603): with ``W^T (A1 + A2) W = I``
and ``W^T A1 W = diag(s)`` it follows that ``W^T A2 W = diag(1 - s)``, likewise V and t for the B.

Indices: g group, i input, o output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from curvature import linalg
from curvature.kronecker import applied
from curvature.kronecker.sides import DenseSide, Product, Side, merge_products, nonzero_or_one

# rows up to which matrices are inverted together: memory for several of a larger one counts
JOINED_MAX_SIDE = linalg.ByDevice(512, 2048)

Pair = tuple[Tensor, Tensor]  # B (o, o) and A (i, i), symmetric and positive semi-definite


def factored_inverses(
    products: Sequence[Product],
    shares: Sequence[tuple[float, float]],
    before: Sequence[applied.KroneckerInverse | None],
    anew: Sequence[bool],
    due: Sequence[Sequence[bool]],
) -> list[applied.KroneckerInverse]:
    """``(B + s mean(B) I)^-1`` and ``(A + t mean(A) I)^-1`` for pairs (B, A), mean() being the mean eigenvalue.

    With equal shares s and t this is factored damping (arXiv:1503.05671, section 6.3) of ``s t`` times the mean
    eigenvalue of the block.
    Sides with `LOW_RANK_MIN_SIZE` rows or more use their largest eigenvalues if few stand out. The rest that take a
    decomposition, see `Side.inverse`, are inverted by Cholesky's, sides of one form together.

    Args:
        shares: s and t of each product.
        before: the previous inverses of the products.
        anew: whether to try again for sides of a product that were not of low rank before.
        due: which sides of each product to invert; without a previous inverse both.
    """
    sides = [side for product in products for side in product]
    added = [share for pair in shares for share in pair]
    inverses: dict[int, applied.Matrix] = {}
    large: dict[int, Tensor | None] = {}  # sides that may be of low rank, with the directions found last
    for k, side in enumerate(sides):
        known, other = before[k // 2], products[k // 2][1 - k % 2]
        is_large = side.size >= linalg.LOW_RANK_MIN_SIZE.at(side.entries.device)
        last = None if known is None else (known.rows, known.columns)[k % 2]
        if last is not None and not due[k // 2][k % 2]:
            inverses[k] = last
        elif (inverse := side.inverse(added[k])) is not None:
            inverses[k] = inverse
        elif is_large and len(side) == len(side.sizes) == len(other.sizes) == 1:
            start = last.entries.to(side.entries.dtype) if isinstance(last, applied.LowRankMatrix) else None
            if start is not None or anew[k // 2]:
                large[k] = start
    if large:
        inverses |= _by_largest({k: sides[k] for k in large}, added, list(large.values()))
    inverses |= _by_cholesky({k: side for k, side in enumerate(sides) if k not in inverses}, added)
    return [applied.KroneckerInverse(inverses[k], inverses[k + 1]) for k in range(0, len(sides), 2)]


def eigen_inverses(products: Sequence[Product], damping: float) -> list[applied.KroneckerInverse]:
    """``(kron(B, A) + damping I)^-1`` for pairs (B, A) by eigenvalues; without damping, the pseudo-inverse."""
    bases = eigenbases([side for product in products for side in product])
    inverses: list[applied.KroneckerInverse] = []
    for (b, rows), (a, columns) in zip(bases[::2], bases[1::2], strict=True):
        kind = applied.EigenInverse
        if applied.PartialBasis in (type(rows), type(columns)):
            (b, rows), (a, columns), kind = rows.outlined(b), columns.outlined(a), applied.PartialEigenInverse
        inverses.append(kind(rows, columns, _inverse_values(b, a, damping)))
    return inverses


def eigenbases(sides: Sequence[Side]) -> list[tuple[Tensor, applied.Matrix]]:
    """Eigenvalues (g, d) of each side, and its eigenvectors as columns; ascending in each diagonal block.

    Those of a diagonal are its entries, in their order. A sketch has as many as directions, and one for all others.
    """
    bases: dict[int, tuple[Tensor, applied.Matrix]] = {}
    dense = {}
    for k, side in enumerate(sides):
        if (basis := side.eigenbasis()) is None:
            dense[k] = side
        else:
            bases[k] = basis
    stacks = list(_stacks(dense))
    blocks = [_blocks(stack.dense(), stack.sizes) for stack, _ in stacks]
    made = iter(linalg.psd_eighs([x for parts in blocks for x in parts]))
    for (stack, alike), parts in zip(stacks, blocks, strict=True):
        pairs = [next(made) for _ in parts]
        values, vectors = (_join(parts, stack.sizes) for parts in zip(*pairs, strict=True))
        groups = [len(sides[k]) for k in alike]
        matrices = (applied.DenseMatrix.of(part, stack.sizes) for part in vectors.split(groups))
        bases |= zip(alike, zip(values.split(groups), matrices, strict=True), strict=True)
    return [bases[k] for k in range(len(sides))]


def _stacks(sides: Mapping[int, Side], largest: linalg.ByDevice | None = None) -> Iterator[tuple[Side, list[int]]]:
    """Sides of one form together, with their keys; those with larger diagonal blocks alone."""
    groups: dict[Any, list[int]] = {}
    for k, side in sides.items():
        is_larger = largest is not None and max(side.sizes) > largest.at(side.entries.device)
        form = (side.form, k) if is_larger else side.form
        groups.setdefault(form, []).append(k)
    for first, *others in groups.values():
        yield sides[first].stacked([sides[k] for k in others]), [first, *others]


def _blocks(matrix: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The diagonal blocks of matrices (g, d, d), those of one size together."""
    pieces: dict[int, list[Tensor]] = {}
    for size, rows in zip(sizes, applied.ranges(sizes), strict=True):
        pieces.setdefault(size, []).append(matrix[:, rows, rows])
    return [torch.cat(alike) if len(alike) > 1 else alike[0] for alike in pieces.values()]


def _join(stacks: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """What was made of `_blocks`: vectors one after the other (g, d), matrices as diagonal blocks (g, d, d)."""
    if len(sizes) == 1:
        return stacks[0]
    kinds = zip(dict.fromkeys(sizes), stacks, strict=True)
    pieces = {size: iter(stack.chunk(list(sizes).count(size))) for size, stack in kinds}
    parts = [next(pieces[size]) for size in sizes]
    if parts[0].ndim == 2:
        return torch.cat(parts, 1)
    matrix = parts[0].new_zeros(len(parts[0]), sum(sizes), sum(sizes))
    for part, rows in zip(parts, applied.ranges(sizes), strict=True):
        matrix[:, rows, rows] = part
    return matrix


def _by_cholesky(sides: Mapping[int, Side], shares: Sequence[float]) -> dict[int, applied.Matrix]:
    """The damped inverses of sides, those of one form together; with more care where that fails."""
    inverses: dict[int, applied.Matrix] = {}
    tried = []
    for stack, alike in _stacks(sides, JOINED_MAX_SIDE):
        blocks, scale = _damp(stack.lower(), stack.sizes, _by_group(sides, shares, alike))
        inverted, flags = zip(*map(linalg.try_spd_inverse, blocks), strict=True)
        ok = flags[0] if len(flags) == 1 else torch.stack(flags).all()
        tried.append((stack, alike, _join(inverted, stack.sizes).div_(scale), ok))
    fine = linalg.look([ok for *_, ok in tried])
    for (stack, alike, matrices, _), is_fine in zip(tried, fine, strict=True):
        if not is_fine:
            blocks, scale = _damp(stack.dense(), stack.sizes, _by_group(sides, shares, alike))
            matrices = _join(list(map(linalg.careful_spd_inverse, blocks)), stack.sizes).div_(scale)
        parts = [matrices]
        if len(alike) > 1:  # in memory of their own: none keeps the others
            parts = torch.ops.aten.split_with_sizes_copy.default(matrices, [len(sides[k]) for k in alike])
        inverses |= {k: applied.DenseMatrix.of(part, stack.sizes) for k, part in zip(alike, parts, strict=True)}
    return inverses


def _by_group(sides: Mapping[int, Side], shares: Sequence[float], alike: Sequence[int]) -> list[float]:
    """The shares of sides that were stacked, one for each group."""
    return [shares[k] for k in alike for _ in range(len(sides[k]))]


def _damp(matrix: Tensor, sizes: Sequence[int], shares: Sequence[float]) -> tuple[list[Tensor], Tensor]:
    """The damped `_blocks`, in units of the mean eigenvalue, so that no product of small numbers underflows."""
    scale = nonzero_or_one(matrix.diagonal(dim1=1, dim2=2).mean(1)).view(-1, 1, 1)
    matrix = matrix / scale
    torch._foreach_add_(matrix.diagonal(dim1=1, dim2=2).unbind(), list(shares))  # a tensor of them would be a wait
    return _blocks(matrix, sizes), scale


def _by_largest(
    sides: Mapping[int, Side], shares: Sequence[float], starts: Sequence[Tensor | None]
) -> dict[int, applied.Matrix]:
    """The damped inverses of sides of one group, for those of which few eigenvalues stand out."""
    means = [side.mean_eigenvalue() for side in sides.values()]
    try:
        scaled = [partial(lambda x, m: x.dense()[0] / m, *pair) for pair in zip(sides.values(), means, strict=True)]
        ends = [None if start is None else start[0] for start in starts]
        pairs = linalg.low_rank_inverses(scaled, [shares[k] for k in sides], ends)
    except torch.linalg.LinAlgError:  # fall back to Cholesky
        linalg.count_recovery("retried")
        return {}
    each = zip(sides, pairs, means, strict=True)
    return {k: applied.LowRankMatrix(low_rank[0][None], low_rank[1] / mean) for k, low_rank, mean in each if low_rank}


def _inverse_values(b: Tensor, a: Tensor, damping: float) -> Tensor:
    """Of products of eigenvalues (g, o, i), where they are not zero; damped, if that is more than nothing."""
    values = b[:, :, None] * a[:, None, :]
    if damping > 0:
        return 1 / (values + damping)
    least = torch.finfo(values.dtype).eps * max(values.shape) * values.amax((1, 2), keepdim=True)
    return torch.where(values > least, 1 / values, 0.0)


def invert_kronecker_sums(sums: Sequence[Sequence[Pair]], damping: float) -> list[applied.EigenInverse]:
    """``sum_k kron(B_k + e_k / c_k I, A_k + e_k c_k I)`` for each sum of K products, with ``e_k^2 = damping / K``.

    c_k^2 is the ratio of the mean eigenvalues of A_k and B_k (factored damping, arXiv:1503.05671, section 6.3). No
    eigenvalue of the sum is below `damping`. e_k c_k and e_k / c_k are no less than the rounding of A_k and B_k.

    The inverses are in bases that are not orthogonal. One or two products are solved exactly. Of three or more, all but
    the one with the largest trace are merged into one of the same trace (`merge_products`). Small sides of all sums are
    decomposed together.

    Args:
        sums: of pairs B (o, o) and A (i, i), at least one, with traces above zero.
        damping: in units of the products, not negative.
    """
    scaled = []
    for pairs in sums:
        damped = [_damp_pair(*pair, damping / len(pairs)) for pair in _two(pairs)]
        scaled.append([((b / _mean(b), a / _mean(a)), _mean(b) * _mean(a)) for b, a in damped])
    bases = iter(_diagonalise([[pair[side] for pair, _ in scaled_pairs] for scaled_pairs in scaled for side in (0, 1)]))
    inverses = []
    for (_, first), *second in scaled:
        (rows, t), (columns, s) = next(bases), next(bases)
        values = first * t[:, None] * s
        for _, mean in second:
            values = values + mean * (1 - t)[:, None] * (1 - s)
        bases_of_sum = applied.DenseMatrix(rows[None]), applied.DenseMatrix(columns[None])
        inverses.append(applied.EigenInverse(*bases_of_sum, 1 / values[None]))
    return inverses


def _damp_pair(rows: Tensor, columns: Tensor, damping: float) -> Pair:
    """One damped product of the sum in `invert_kronecker_sums`."""
    ratio = (_mean(columns) / _mean(rows)).sqrt()
    return _shift(rows, damping**0.5 / ratio), _shift(columns, damping**0.5 * ratio)


def _shift(side: Tensor, shift: Tensor) -> Tensor:
    shift = torch.maximum(shift, linalg.eigenvalue_rounding(side.diagonal().sum()))
    return side + shift * torch.eye(len(side), dtype=side.dtype, device=side.device)


def _mean(side: Tensor) -> Tensor:
    return side.diagonal().mean()


def _two(pairs: Sequence[Pair]) -> list[Pair]:
    if len(pairs) <= 2:
        return list(pairs)
    order = torch.stack([_mean(b) * _mean(a) for b, a in pairs]).argsort(descending=True, stable=True)
    rows, columns = (torch.stack(list(sides)).index_select(0, order) for sides in zip(*pairs, strict=True))
    others = zip(rows[1:], columns[1:], strict=True)
    merged = merge_products([(DenseSide(b[None]), DenseSide(a[None])) for b, a in others])
    return [(rows[0], columns[0]), (merged[0].entries[0], merged[1].entries[0])]


@linalg.full_precision()
def _diagonalise(sums: Sequence[Sequence[Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """For one or two sides each, W with ``W^T sum(sides) W = I`` and the diagonal of ``W^T sides[0] W``, 0 to 1."""
    totals = [sides[0] if len(sides) == 1 else sides[0] + sides[1] for sides in sums]
    tried = [linalg.try_cholesky(total) for total in totals]
    fine = linalg.look([ok for _, ok in tried])
    roots = [
        root if is_fine else linalg.cholesky_with_jitter(total, "a factor")
        for (root, _), is_fine, total in zip(tried, fine, totals, strict=True)
    ]
    within = partial(torch.linalg.solve_triangular, upper=False)
    wholes = [within(root, within(root, sides[0]).mT) for root, sides in zip(roots, sums, strict=True)]
    return [
        (torch.linalg.solve_triangular(root.mT, vectors, upper=True), values.clamp(0, 1))
        for root, (values, vectors) in zip(roots, linalg.symmetric_eighs(wholes), strict=True)
    ]
