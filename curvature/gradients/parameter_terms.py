"""Where the samples are in the output of every use, found by experiment and remembered.

Two backward passes, one with unit weights on the samples' losses and one with random weights w: a backprop entry of
sample n differs between them by the factor w[n] and by nothing else, so a guess of the axis either reproduces the
second from the first or is wrong. A backprop in which samples are mixed fits no guess, and the exact general path takes
over. This is what makes flattened tokens, windows, and sequence-first models right without being told.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cache

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from curvature.layers import Layout, Unsupported
from curvature.recording import ParameterNode, Tape, Use
from curvature.terms import DenseGradients, OuterProduct, RowSlice, Term, gradients

log = logging.getLogger("curvature")

# functions whose results may be rows of a tensor; where they are is seen from the memory
SLICES = {
    torch.split, Tensor.split, torch.split_with_sizes, Tensor.split_with_sizes, torch.tensor_split, Tensor.tensor_split,
    torch.chunk, Tensor.chunk, torch.narrow, Tensor.narrow, Tensor.__getitem__,
}  # fmt: skip


def terms_by_parameter(
    tape: Tape, backprops: list[Tensor | None], layouts: Sequence[Iterable[Layout]], skip: set[str]
) -> tuple[dict[str, list[Term]], set[str]]:
    """Terms of every parameter, and the names of those that the recorded uses do not explain.

    `layouts` are the candidates of each use, the first that its rule can view being taken; none: not per sample.
    """
    cuts = [_cut(use, b, layout) for use, b, layout in zip(tape.uses, backprops, layouts, strict=True)]
    found: dict[str, list[Term]] = {name: [] for name in tape.parameters}
    failed: set[str] = set(skip)
    todo, seen = list(tape.parameters.values()), set[int]()
    while todo:
        node = todo.pop()
        if id(node) in seen or node.names <= failed:
            continue
        seen.add(id(node))
        own: list[Term] = []
        for use in node.uses:
            cut = cuts[use.index]
            if cut is not None:
                slots = [slot for slot, other in use.slots.items() if other is node]
                own += [cut[slot] for slot in slots if slot in cut]
                failed |= frozenset[str]() if cut.keys() >= set(slots) else node.names
            elif use.results:
                todo += use.results
            elif use.edge is None or backprops[use.index] is not None:
                failed |= node.names
        if own and node.origin is not None and not _clean(node, cuts):
            failed |= node.names
        elif own:
            for name, terms in _pulled_back(node, own, tape).items():
                found[name] += terms
    return {name: terms for name, terms in found.items() if name not in failed}, failed


Cut = dict[str, Term] | None


def _cut(use: Use, b: Tensor | None, layouts: Iterable[Layout]) -> Cut:
    """The terms of a use's parameters; None where it has no per-sample view."""
    if b is None:
        return None
    for layout in layouts:
        try:
            return _terms(use, b, layout)
        except Unsupported:
            continue
        except Exception as error:  # an argument that the rule does not foresee must not stop the exact general path
            _note_failure(", ".join(sorted(use.names)), f"{type(error).__name__}: {error}")
            return None
    return None


def _terms(use: Use, b: Tensor, layout: Layout) -> dict[str, Term]:
    """A tensor computed from parameters may be explained where it was computed (a weight times ones): it may lack."""
    found: dict[str, Term] = {}
    for slot, node in use.slots.items():
        try:
            found[slot] = use.term(slot, b, layout)
        except Unsupported:
            if node.origin is None or len(use.slots) == 1:
                raise
    return found


@cache
def _note_failure(names: str, error: str) -> None:
    """Once each."""
    log.warning("%s: the layer's rule failed (%s); please report it", names, error)


def _clean(node: ParameterNode, cuts: list[Cut]) -> bool:
    """Whether nothing on the way from the parameters to this tensor was already counted."""
    use = node.origin
    return use is None or (cuts[use.index] is None and all(_clean(x, cuts) for x in use.slots.values()))


def _pulled_back(node: ParameterNode, terms: list[Term], tape: Tape) -> dict[str, list[Term]]:
    """Terms with respect to a tensor computed from parameters to terms with respect to these."""
    if node.origin is None:
        return {next(iter(node.names)): terms}
    parent = next(iter(node.origin.slots.values()))
    if node.origin.is_transpose and all(isinstance(t, OuterProduct) for t in terms):
        return _pulled_back(parent, [t.transpose() for t in terms if isinstance(t, OuterProduct)], tape)
    start = _first_row(node)
    if start is not None:
        return _pulled_back(parent, [_part(t, start, tuple(parent.tensor.shape)) for t in terms], tape)
    names = sorted(node.names)
    roots = [tape.parameters[name].tensor for name in names]
    back = sent_back(node.tensor if node.edge is None else node.edge, gradients(terms), roots)
    return {name: [DenseGradients(g)] for name, g in zip(names, back, strict=True)}


def sent_back(result: Tensor | GradientEdge, vectors: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """``J^T v`` for each of `vectors` (k, *result.shape), J by `leaves`: (k, *shape) for each; the graph is kept."""
    try:
        found = torch.autograd.grad(
            result, leaves, vectors, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
        return [x.new_zeros(len(vectors), *x.shape) if g is None else g for g, x in zip(found, leaves, strict=True)]
    except RuntimeError:  # a backward without a batched form
        each = [torch.autograd.grad(result, leaves, v, retain_graph=True, materialize_grads=True) for v in vectors]
        return [torch.stack(rows) for rows in zip(*each, strict=True)]


def _first_row(node: ParameterNode) -> int | None:
    """The first of the rows of another tensor that this one is, next to each other; None where it is something else."""
    if node.origin is None or node.origin.function not in SLICES:
        return None
    x, whole = node.tensor, next(iter(node.origin.slots.values())).tensor
    same = x.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() and x.dtype == whole.dtype
    if not same or x.ndim != whole.ndim or x.shape[1:] != whole.shape[1:] or x.stride() != whole.stride():
        return None
    return int(x.storage_offset() - whole.storage_offset()) // max(1, whole.stride(0))


def _part(term: Term, start: int, shape: tuple[int, ...]) -> RowSlice:
    if isinstance(term, RowSlice):
        return RowSlice(term.term, start + term.start, shape)
    return RowSlice(term, start, shape)


def joint_bias(tape: Tape, weight: str) -> str | None:
    """The bias that is read wherever the weight is, the same rows of both, and nowhere else."""
    reads = _reads(tape.parameters[weight])
    found: set[str] = set()
    for use, node, start in reads:
        slot = next((slot for slot, other in use.slots.items() if other is node), "")
        bias = use.slots.get(use.rule.bias_of.get(slot, "")) if use.rule is not None else None
        if bias is None or len(bias.names) != 1 or bias.names == node.names:
            return None
        if node.origin is not None and bias.tensor.shape[:1] != node.tensor.shape[:1]:
            return None  # the rows are inputs
        if (use, bias, start) not in _reads(tape.parameters[next(iter(bias.names))]):
            return None
        found |= bias.names
    if len(found) != 1:
        return None
    name = found.pop()
    return name if len(_reads(tape.parameters[name])) == len(reads) else None


def _reads(node: ParameterNode) -> list[tuple[Use, ParameterNode, int]]:
    """Where a parameter is read: the use, the parameter itself or rows of it, and the first of these."""
    found: list[tuple[Use, ParameterNode, int]] = []
    for use in node.uses:
        rows = [(x, _first_row(x)) for x in use.results]
        if rows and all(start is not None for _, start in rows):
            found += [(reader, x, start) for x, start in rows if start is not None for reader in x.uses]
        else:
            found.append((use, node, 0))
    return found
