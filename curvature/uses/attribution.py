"""Attribution: which training samples a model's answers come from.

In: a trained model, a loss, training data, queries, and a matrix of curvature (`curvature.operators`). Out: the score
of every training sample for every query.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from curvature.arguments import check_range, check_whole
from curvature.gradients import Batch, number_of_batches, pairs, require_order, require_pairs, sample_terms
from curvature.kronecker import Basis, Scheme, two_sided
from curvature.linalg import full_precision, matmul, psd_eigh, qr, stack
from curvature.losses import Loss
from curvature.matrices import ekfac
from curvature.operators import (
    BlockDiagonal,
    Curvature,
    EigenKronecker,
    Kronecker,
    Operator,
    Space,
    as_operator,
    blocks_of,
)  # fmt: skip
from curvature.recording import trained_parameters
from curvature.terms import AffineLayout, DenseGradients, OuterProduct, Term, chunks, contractions, gradients

DAMPING = 0.1  # of the mean eigenvalue of each block (Grosse et al. 2023, arXiv:2308.03296, section 2.2)
ENTRIES = 1 << 24  # of the training samples' gradients, or of queries of low rank, that are built at a time
EXTRA = 8  # directions beyond the rank, for singular values that fall slowly
Terms = Mapping[str, Sequence[Term]]


@dataclass(frozen=True)
class LowRank:
    """Tensors (Q, *shape), each as a product of two matrices (shape[0], r) and (r, all other axes)."""

    left: Tensor
    right: Tensor
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.left)

    def __getitem__(self, some: int | slice) -> Tensor:
        built = matmul(self.left[some], self.right[some])
        return built.reshape(*built.shape[:-2], *self.shape)


Queries = Tensor | LowRank
Score = Callable[[Sequence[Term], Queries], Tensor]  # of the samples of a batch, by one parameter


@full_precision()
def influence(
    model: nn.Module,
    loss: Loss,
    train: Any,
    query: Any,
    curvature: Curvature | None = None,
    *,
    damping: float | None = None,
    query_rank: int | None = None,
    sample_dim: int | tuple[int, int, int] = 0,
    progress: bool = False,
) -> Tensor:
    """Scores ``g_q^T (K + damping I)^-1 g_n`` (Q, N) of training samples n for queries q.

    g is the gradient of a sample's own loss (`per_sample_gradients`), K the curvature of the loss over the training
    data. To first order, training without sample n raises the loss of query q by score / N for a loss that is a mean
    over N samples, and by the score for a sum (Koh and Liang 2017, arXiv:1703.04730, equation 2): samples with large
    positive scores have helped, those with large negative ones have harmed.

    Args:
        model: trained, in the mode in which it is used: ``model.eval()`` if it has dropout or BatchNorm.
        loss: as for `per_sample_gradients`.
        train: the training data: one pair ``(x, y)``, or an iterable of pairs that can be gone over twice (a
            DataLoader that does not shuffle: columns are in its order).
        query: the queries, likewise (rows are in their order); their targets say which answer's loss it is about.
        curvature: K, any operator over the parameters or some of them, of the same loss and data: `kfac`,
            `gauss_newton` (exact; above 2000 parameters by conjugate gradients), a block of one (only these
            parameters count then). By default `ekfac` of the training data (arXiv:2308.03296).
        damping: in the units of K. By default 0.1 times the mean eigenvalue of K, block by block where it has blocks.
        query_rank: keep what K makes of a query's gradient as matrices of this rank, one for each weight: of a layer
            (o, i) it takes ``query_rank * (o + i)`` numbers a query, not ``o * i``. Scores are then approximate; 32 is
            the choice of arXiv:2308.03296, section 3.2.2.
        sample_dim: as for `per_sample_gradients`.
        progress: whether to show a bar over the training batches.

    Raises:
        ValueError: a DataLoader shuffles, there are no data, the rank is no positive number, the matrix is singular
            with this damping, or as for `per_sample_gradients`: BatchNorm in training mode is refused by name.
        TypeError: an argument of the wrong kind.

    The queries' gradients and their solutions are held, Q times the parameters (with ``query_rank`` those of one batch
    of queries); of the training samples' gradients a bounded number of entries at a time. Time is that of Q products
    with each of these gradients.
    """
    options = curvature, damping, query_rank, sample_dim, progress
    return stack(_by_parameter(_scores, True, model, loss, train, query, *options).values()).sum(0)


@full_precision()
def influence_by_parameter(
    model: nn.Module,
    loss: Loss,
    train: Any,
    query: Any,
    curvature: Curvature | None = None,
    *,
    damping: float | None = None,
    query_rank: int | None = None,
    sample_dim: int | tuple[int, int, int] = 0,
    progress: bool = False,
) -> dict[str, Tensor]:
    """What each parameter adds to the scores of `influence`, ``{name: (Q, N)}``. Arguments and errors as there."""
    options = curvature, damping, query_rank, sample_dim, progress
    return _by_parameter(_scores, False, model, loss, train, query, *options)


@full_precision()
def influence_by_place(
    model: nn.Module,
    loss: Loss,
    train: Any,
    query: Any,
    curvature: Curvature | None = None,
    *,
    damping: float | None = None,
    query_rank: int | None = None,
    sample_dim: int | tuple[int, int, int] = 0,
    progress: bool = False,
) -> dict[str, Tensor]:
    """What each place of a training sample adds to the scores, ``{name: (Q, N, places)}``: over the places they add up
    to those of `influence_by_parameter`.

    A place is where a layer reads its weight: a token of a sequence, a pixel of a convolution's output, a step of a
    recurrent layer; places of several reads follow one another in their order (a tied embedding has those of the
    embedding, then those of the decoder). A bias, which is added at all of them, and a parameter that no layer rule
    explains have a single place for each sample.

    Arguments and errors as for `influence`.

    Raises:
        ValueError: the training samples of different batches have not the same number of places: pad them alike; or a
            batch has a single sample, of which only the gradient is known.
    """
    options = curvature, damping, query_rank, sample_dim, progress
    return _by_parameter(_place_scores, False, model, loss, train, query, *options)


def _by_parameter(
    score: Score, in_eigenbases: bool, model: nn.Module, loss: Loss, train: Any, query: Any,
    curvature: Curvature | None, damping: float | None, rank: int | None, sample_dim: Any, progress: bool,
) -> dict[str, Tensor]:  # fmt: skip
    """All training samples' scores. In an eigenbasis, that of a bias is not apart from that of its weight."""
    for what, data in (("train", train), ("query", query)):
        require_pairs(data, what)
        require_order(data, what)
    if curvature is None:
        curvature = ekfac(model, loss, train, sample_dim=sample_dim, progress=progress)
    K = as_operator(curvature)
    if damping is not None:
        check_range("damping", damping, 0.0, math.inf)
    if rank is not None:
        check_whole("query_rank", rank, 1)
    names = K.space.names
    queries = _terms(model, loss, query, sample_dim, names, False)
    first = next(queries, None)
    if first is None:
        raise ValueError("query: no batch has a sample")
    bases = Eigenbases(K, first if in_eigenbases else {})
    turned = map(bases.turn, itertools.chain([first], queries))
    asked = ({name: gradients(parts) for name, parts in terms.items()} for terms in turned)
    solved = _solve_queries(bases.K, asked, damping, rank)
    samples = map(bases.turn, _terms(model, loss, train, sample_dim, names, progress))
    scores = [{name: score(parts, solved[name]) for name, parts in terms.items()} for terms in samples]
    if not scores:
        raise ValueError("train: no batch has a sample; an iterator gives batches once: pass a list or a DataLoader")
    for name in solved:
        places = sorted({batch[name].shape[2:].numel() for batch in scores})
        if len(places) > 1:
            raise ValueError(f"train: {name} is read at {places} places in different batches: pad all samples alike")
    return {name: torch.cat([batch[name] for batch in scores], 1) for name in solved}


def _terms(
    model: nn.Module, loss: Loss, data: Any, sample_dim: Any, names: Sequence[str], progress: bool
) -> Iterator[dict[str, list[Term]]]:
    """The gradients of each batch's samples, if it has any, with respect to the parameters of these names."""
    total = number_of_batches(data)
    trained = trained_parameters(model)
    if missing := [name for name in names if name not in trained]:
        raise ValueError(f"curvature: it is of {', '.join(missing)}, which the model does not train")
    for x, y in tqdm(pairs(data), total=total, unit="batch", leave=False, disable=not progress):
        batch = Batch.of(model, loss, x, y, sample_dim, names)
        if batch.count:
            terms = sample_terms(batch)
            yield {name: list(terms[name]) for name in names}


def _solve_queries(
    K: Operator, asked: Iterable[dict[str, Tensor]], damping: float | None, rank: int | None
) -> dict[str, Queries]:
    """``(K + damping)^-1 g`` of all queries: of all batches together, or one by one if they are compressed."""
    if rank is None:
        batches = list(asked)
        asked = [{name: torch.cat([batch[name] for batch in batches]) for name in K.space.names}]
    parts = [{name: compress(v, rank) for name, v in _solve(K, batch, damping).items()} for batch in asked]
    return {name: joined([batch[name] for batch in parts]) for name in K.space.names}


def _solve(K: Operator, queries: Mapping[str, Tensor], damping: float | None) -> dict[str, Tensor]:
    """``(K + damping)^-1 g`` for gradients (Q, *shape) by name; each block with its own damping if none is given."""
    solved: dict[str, Tensor] = {}
    for block in blocks_of(K) if damping is None else [K]:
        space = block.space
        flat = space.flatten({name: queries[name].to(space.dtype) for name in space.names})
        own_damping = damping
        if own_damping is None:
            mean = float(block.trace()) / max(1, space.size)
            own_damping = DAMPING * mean if mean > 0 else 1.0  # without curvature: inner products
        solved |= space.split(block.solve(flat.mT, float(own_damping)).mT)
    return solved


def _scores(parts: Sequence[Term], queries: Queries) -> Tensor:
    """(Q, N)."""
    return torch.cat([_products(parts, some) for some in pieces(queries)])


def _products(parts: Sequence[Term], queries: Tensor) -> Tensor:
    """Inner products (Q, N) of queries (Q, *shape) with the gradients of one parameter."""
    if all(isinstance(term, OuterProduct) and term.places == 1 for term in parts):  # larger than its two sides
        return stack([stack([term.inner_products(v) for term in parts]).sum(0) for v in queries])
    flat = queries[:, None].flatten(1)  # a scalar has no axis of its own
    rows = (row[:, None].flatten(1) for _, row in contractions.gradient_chunks(parts, ENTRIES))
    return torch.cat([flat @ row.to(flat).mT for row in rows], 1)


def _place_scores(parts: Sequence[Term], queries: Queries) -> Tensor:
    """(Q, N, places)."""
    if len(parts[0]) == 1:
        raise ValueError("train: a batch with a single sample does not tell its places; take batches of at least two")
    at_places = lambda v: torch.cat([term.place_products(v).to(v) for term in parts], 1)
    return torch.stack([at_places(v) for some in pieces(queries) for v in some])


def compress(queries: Tensor, rank: int | None) -> Queries:
    """The nearest matrices of this rank (Q, *shape), nearly; the queries themselves where that takes no less memory.

    By subspace iteration (Halko, Martinsson and Tropp 2011, arXiv:0909.4061, algorithm 4.4).
    """
    shape = tuple(queries.shape[1:])
    rows, columns = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, 1)
    if rank is None or rank * (rows + columns) >= rows * columns:
        return queries
    matrices = queries.reshape(len(queries), rows, columns)
    generator = torch.Generator().manual_seed(0)
    width = min(rank + EXTRA, rows, columns)
    start = torch.randn(columns, width, generator=generator, dtype=torch.float64, device="cpu").to(queries)
    basis = qr(matmul(matrices, start))[0]
    basis = qr(matmul(matrices, matmul(matrices.mT, basis)))[0]
    within = matmul(basis.mT, matrices)
    largest = psd_eigh(matmul(within, within.mT))[1][:, :, -rank:]
    return LowRank(matmul(basis, largest), matmul(largest.mT, within), shape)


def joined(parts: Sequence[Queries]) -> Queries:
    """The queries of several batches, all kept alike."""
    low = [part for part in parts if isinstance(part, LowRank)]
    if not low:
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    return LowRank(torch.cat([part.left for part in low]), torch.cat([part.right for part in low]), low[0].shape)


def pieces(queries: Queries) -> Iterator[Tensor]:
    """The queries (Q, *shape), a bounded number of entries at a time if they are built here."""
    if isinstance(queries, Tensor):
        yield queries
        return
    for part in chunks(len(queries), ENTRIES, math.prod(queries.shape)):
        yield queries[part]


# -- scores in the eigenbases of Kronecker factors, where a matrix is diagonal
#
# There a query is divided by eigenvalues, and the two sides of a training sample's gradient are turned, o^2 + i^2
# operations in place of the o^2 i + o i^2 of a solution.


class Eigenbases:
    """K and gradients, in the eigenbases of blocks whose weights some samples' terms read at few places.

    There `K` has the eigenvalues alone, over one parameter with the weight's name.
    """

    def __init__(self, K: Operator, terms: Terms) -> None:
        self.bases: dict[str, tuple[Basis, EigenKronecker]] = {}
        turned = [self._rotate(block, terms.get(block.space.names[0], ())) for block in blocks_of(K)]
        names = tuple(name for block in turned for name in block.space.names)
        shapes = tuple(shape for block in turned for shape in block.space.shapes)
        places = tuple(K.space.devices[name] for name in names)
        self.K = BlockDiagonal(Space(names, shapes, K.space.dtype, places[0], places), turned) if self.bases else K

    def _rotate(self, block: Operator, parts: Sequence[Term]) -> Operator:
        if not isinstance(block, Kronecker | EigenKronecker) or len(parts) != 1:
            return block
        space, (groups, outputs, inputs), term = block.space, block.sides, parts[0]
        if not isinstance(term, OuterProduct) or term.places > min(outputs, inputs):
            return block
        scheme = Scheme.of([term], space.shapes, space.dtype, "expand")
        if scheme is None or scheme.arrangement != block.arrangement:
            return block
        eigen = block.eigen if isinstance(block, Kronecker) else block
        self.bases[space.names[0]] = Basis(scheme, eigen.row_vectors, eigen.column_vectors), eigen
        shapes = ((groups * outputs, inputs),)
        weight = Space(space.names[:1], shapes, space.dtype, space.device)
        return EigenKronecker(weight, AffineLayout(shapes, groups, outputs), None, None, eigen.values, eigen.rounding)

    def turn(self, terms: Terms) -> dict[str, list[Term]]:
        """The terms of the parameters of `K`."""
        joined = {name for _, block in self.bases.values() for name in block.space.names[1:]}
        return {
            name: [self._term(terms, *self.bases[name])] if name in self.bases else list(parts)
            for name, parts in terms.items()
            if name not in joined
        }

    def _term(self, terms: Terms, basis: Basis, block: EigenKronecker) -> Term:
        groups, outputs, inputs = block.sides
        first, *others = terms[block.space.names[0]]
        if isinstance(first, OuterProduct) and not others:
            return replace(basis.turned(first), shape=(groups * outputs, inputs))
        arranged = block.arrangement.to_matrices([gradients(terms[name]) for name in block.space.names])
        rows = None if basis.rows is None else basis.rows.mT
        return DenseGradients(two_sided(rows, arranged.to(block.values), basis.columns).flatten(1, 2))
