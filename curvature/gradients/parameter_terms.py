"""From backprops to terms: what every recorded use contributes to the per-sample gradient of each parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache

import torch
from torch import Tensor

from curvature.gradients.jacobian_products import gradient_rows
from curvature.layers import Layout, Unsupported
from curvature.recording import ParameterNode, Tape, Use, map_tensors, warn_once
from curvature.terms import DenseGradients, OuterProduct, RowSlice, StackedTerms, Term, gradients

Terms = dict[str, list[Term]]  # by parameter

# Functions whose results may be consecutive rows of a tensor; the storage offset shows which.
SLICES = {
    torch.split, Tensor.split, torch.split_with_sizes, Tensor.split_with_sizes, torch.tensor_split, Tensor.tensor_split,
    torch.chunk, Tensor.chunk, torch.narrow, Tensor.narrow, Tensor.__getitem__,
}  # fmt: skip


def terms_by_parameter(
    tape: Tape, backprops: Sequence[Tensor | None], layouts: Sequence[Iterable[Layout]], skip: set[str]
) -> tuple[Terms, set[str]]:
    """Terms of every parameter, and the names of those that the recorded uses do not explain.

    Args:
        backprops: of each use; None where nothing arrives.
        layouts: the candidates of each use; the first that its rule accepts counts. None of them: not per sample.
        skip: parameters to leave out; they count as not explained.
    """

    @cache
    def terms_of(use: Use) -> UseTerms:
        """Asked for when needed: a portion of the backprops has few of the uses of a deep network."""
        return None if use.names <= skip else _terms_of_use(use, backprops[use.index], layouts[use.index])

    wanted = {name: node for name, node in tape.parameters.items() if name not in skip}
    found: Terms = {name: [] for name in wanted}
    failed: set[str] = set(skip)
    todo, seen = list(wanted.values()), set[int]()
    while todo:
        node = todo.pop()
        if id(node) in seen or node.names <= failed:
            continue
        seen.add(id(node))
        own: list[Term] = []
        for use in node.uses:
            terms = terms_of(use)
            if terms is not None:
                slots = [slot for slot, other in use.slots.items() if other is node]
                own += [terms[slot] for slot in slots if slot in terms]
                failed |= frozenset[str]() if terms.keys() >= set(slots) else node.names
            elif use.results:
                todo += use.results
            elif use.edge is None or backprops[use.index] is not None:
                failed |= node.names
        if own and node.origin is not None and not _is_uncounted(node, terms_of):
            failed |= node.names
        elif own:
            try:
                pulled_back = _pull_back(node, own, tape, skip)
            except Unsupported:
                failed |= node.names
                continue
            for name, some in pulled_back.items():
                found[name] += some
    return {name: terms for name, terms in found.items() if name not in failed}, failed


def stacked_terms(
    tape: Tape, backprops: Sequence[Tensor | None], layouts: Sequence[Iterable[Layout]], skip: set[str]
) -> dict[str, StackedTerms]:
    """The terms for several vectors at once, of parameters that one use alone reads.

    Args:
        backprops: of each use, (k, *shape); None where there are none to be stacked.
        layouts, skip: as for `terms_by_parameter`, which has the terms of all other parameters.
    """
    found: dict[str, StackedTerms] = {}
    for name, node in tape.parameters.items():
        use = node.uses[0] if len(node.readers) == 1 and name not in skip else None
        b = None if use is None or use.results else backprops[use.index]
        layout = None if use is None or b is None else next(iter(layouts[use.index]), None)
        if use is None or b is None or layout is None:
            continue
        slots = [slot for slot, other in use.slots.items() if other is node]
        try:
            own = use.stacked_terms(slots[0], b, layout) if len(slots) == 1 else None
        except Unsupported:
            own = None
        except Exception as error:  # `terms_by_parameter` follows, one vector at a time
            _warn_of_rule(use, error)
            own = None
        if own is not None:
            found[name] = own
    return found


UseTerms = dict[str, Term] | None  # by argument


def _terms_of_use(use: Use, b: Tensor | None, layouts: Iterable[Layout]) -> UseTerms:
    """The terms of the parameters that a use reads; None where it has no per-sample view."""
    if b is None or b.is_complex() or any(node.tensor.is_complex() for node in use.slots.values()):
        return None  # the rules do not conjugate
    for layout in layouts:
        try:
            return _terms_by_argument(use, b, layout)
        except Unsupported:
            continue
        except Exception as error:  # a call that the rule does not foresee must not stop the exact general path
            _warn_of_rule(use, error)
            return None
    return None


def _warn_of_rule(use: Use, error: Exception) -> None:
    names, what = ", ".join(sorted(use.names)), f"{type(error).__name__}: {error}"
    warn_once("%s: the layer's rule failed (%s); please report it", names, what)


def _terms_by_argument(use: Use, b: Tensor, layout: Layout) -> dict[str, Term]:
    """A tensor computed from parameters may be missing: where it was computed may explain it (a weight times ones)."""
    found: dict[str, Term] = {}
    for slot, node in use.slots.items():
        try:
            found[slot] = use.term(slot, b, layout)
        except Unsupported:
            if node.origin is None or len(use.slots) == 1:
                raise
    return found


def _is_uncounted(node: ParameterNode, terms_of: Callable[[Use], UseTerms]) -> bool:
    """Whether no use on the way from the parameters to this tensor has terms already."""
    use = node.origin
    return use is None or (terms_of(use) is None and all(_is_uncounted(x, terms_of) for x in use.slots.values()))


def _pull_back(node: ParameterNode, terms: list[Term], tape: Tape, skip: set[str]) -> Terms:
    """Terms with respect to the parameters from terms with respect to a tensor computed from them (chain rule)."""
    if node.origin is None:
        return {next(iter(node.names)): terms}
    parent = next(iter(node.origin.slots.values()))
    if node.origin.is_transpose:
        return _pull_back(parent, [_transposed(t) for t in terms], tape, skip)
    if node.origin.is_move:
        device = parent.tensor.device
        return _pull_back(parent, [map_tensors(lambda x: x.to(device), t) for t in terms], tape, skip)
    start = _first_row(node)
    if start is not None:
        return _pull_back(parent, [_row_slice(t, start, tuple(parent.tensor.shape)) for t in terms], tape, skip)
    if len({len(term) for term in terms}) > 1:
        raise Unsupported("some reads tell the samples apart, others know only their sum")
    names = sorted(node.names - skip)
    roots = [tape.parameters[name].tensor for name in names]
    rows = gradient_rows(node.tensor if node.edge is None else node.edge, roots, gradients(terms))
    return {name: [DenseGradients(g)] for name, g in zip(names, rows, strict=True)}


def _transposed(term: Term) -> Term:
    return term.transpose() if isinstance(term, OuterProduct) else DenseGradients(term.gradients().mT)


def computed_weights(tape: Tape) -> list[ParameterNode]:
    """The tensors that were computed from parameters by more than views, and that data met."""
    readers = [use for use in tape.uses if use.edge is not None and not use.results]
    nodes = dict.fromkeys(node for use in readers for node in use.slots.values())
    return [node for node in nodes if _viewed(node).origin is not None]


def _viewed(node: ParameterNode) -> ParameterNode:
    """What a tensor is a transpose, a range of the rows, or a copy on another device of."""
    while (origin := node.origin) is not None and (
        origin.is_transpose or origin.is_move or _first_row(node) is not None
    ):
        node = next(iter(origin.slots.values()))
    return node


def weighted_gradients(
    tape: Tape,
    node: ParameterNode,
    backprops: Sequence[Tensor | None],
    layouts: Sequence[Iterable[Layout]],
    weights: Tensor,
) -> dict[str, Tensor]:
    """Weighted sums over samples of the gradients of the parameters that a tensor was computed from, by its readers.

    Args:
        backprops, layouts: as for `terms_by_parameter`; those of the tensor's readers are needed.
        weights: (N,). Readers that are not per sample count with a weight of one.
    """
    total = torch.zeros_like(node.tensor)
    for use in node.uses:
        found = None if use.results else _terms_of_use(use, backprops[use.index], layouts[use.index])
        for slot, term in (found or {}).items():
            if use.slots[slot] is node:
                own = weights if len(term) == len(weights) else weights.new_ones(len(term))
                total += term.weighted_sum(own.to(term.device))
    names = sorted(node.names)
    roots = [tape.parameters[name].tensor for name in names]
    pulled = torch.autograd.grad(node.tensor, roots, total, retain_graph=True, allow_unused=True)
    return {name: g for name, g in zip(names, pulled, strict=True) if g is not None}


def _first_row(node: ParameterNode) -> int | None:
    """The first row, if this tensor is a range of another one's rows; else None."""
    if node.origin is None or node.origin.function not in SLICES:
        return None
    x, whole = node.tensor, next(iter(node.origin.slots.values())).tensor
    same = x.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() and x.dtype == whole.dtype
    if not same or x.ndim != whole.ndim or x.shape[1:] != whole.shape[1:] or x.stride() != whole.stride():
        return None
    return int(x.storage_offset() - whole.storage_offset()) // max(1, whole.stride(0))


def _row_slice(term: Term, start: int, shape: tuple[int, ...]) -> RowSlice:
    if isinstance(term, RowSlice):
        return RowSlice(term.term, start + term.start, shape)
    return RowSlice(term, start, shape)


def joint_bias(tape: Tape, weight: str) -> str | None:
    """The bias that is read only where the weight is, with the same rows; None without one.

    A layer of the same kind may read the weight without a bias.
    """
    reads = _reads(tape.parameters[weight])
    found: set[str] = set()
    joint = 0
    for use, node, start in reads:
        slot = next((slot for slot, other in use.slots.items() if other is node), "")
        if use.rule is None or use.rule is not reads[0][0].rule or slot not in use.rule.bias_of:
            return None
        bias = use.slots.get(use.rule.bias_of[slot])
        if bias is None:
            continue
        if len(bias.names) != 1 or bias.names == node.names:
            return None
        if node.origin is not None and bias.tensor.shape[:1] != node.tensor.shape[:1]:
            return None  # the rows of the weight are its inputs
        if (use, bias, start) not in _reads(tape.parameters[next(iter(bias.names))]):
            return None
        found |= bias.names
        joint += 1
    if len(found) != 1:
        return None
    name = found.pop()
    return name if len(_reads(tape.parameters[name])) == joint else None


def layers_of(tape: Tape, names: Iterable[str]) -> list[tuple[str, ...]]:
    """The parameters of these names by layer: a weight with its `joint_bias`, all others alone."""
    found: dict[str, tuple[str, ...]] = {}
    names = list(names)
    for name in names:
        bias = joint_bias(tape, name)
        if bias in names and bias not in found and name not in found:
            found |= dict.fromkeys([name, bias], (name, bias))
    return list(dict.fromkeys(found.get(name, (name,)) for name in names))


def _reads(node: ParameterNode) -> list[tuple[Use, ParameterNode, int]]:
    """Where a parameter is read: the use, the parameter or the rows of it that are read, and the first of these."""
    found: list[tuple[Use, ParameterNode, int]] = []
    for use in node.uses:
        rows = [(x, _first_row(x)) for x in use.results]
        if rows and all(start is not None for _, start in rows):
            found += [(reader, x, start) for x, start in rows if start is not None for reader in x.uses]
        else:
            found.append((use, node, 0))
    return found
