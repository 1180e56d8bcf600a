"""From backprops to terms: what every recorded use contributes to the per-sample gradient of each parameter.

Weights that are computed from weights (transposes, rows, masks, norms) come by the chain rule.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from curvature.gradients.jacobian_products import gradient_rows
from curvature.layers import Layout, Unsupported
from curvature.recording import ParameterNode, Tape, Use, map_tensors, warn_once
from curvature.terms import DenseGradients, OuterProduct, RowSlice, Term, gradients, promote

Backprops = Sequence[Tensor | None]  # of each use; None where nothing arrives
Layouts = Sequence[Iterable[Layout]]  # of each use the candidates: the first that its rule accepts counts
UseTerms = dict[str, Term] | None  # by argument; None where a use has no per-sample view


def candidate_axes(shape: tuple[int, ...], count: int) -> Iterator[Layout]:
    """Every axis that could hold the samples, the simplest first."""
    for dim, size in enumerate(shape):
        if size == count:
            yield Layout(dim, 1, count, 1)
    for dim, size in enumerate(shape):
        rest = size // count
        if size % count == 0 and rest > 1:
            yield Layout(dim, 1, count, rest)
            yield Layout(dim, rest, count, 1)
            for outer in range(2, rest):
                if rest % outer == 0:
                    yield Layout(dim, outer, count, rest // outer)


def terms_by_parameter(
    tape: Tape, backprops: Backprops, layouts: Layouts, skip: set[str], is_precise: bool = False
) -> tuple[Terms, set[str]]:
    """Terms of every parameter, and the names of those that the recorded uses do not explain, or that are skipped.

    If `is_precise`, they are in the precision of the parameters at least.
    """
    backprops = [b if b is None or b.numel() else None for b in backprops]
    of_uses: list[UseTerms] = [
        None if b is None or use.names <= skip else _terms_of_use(use, b, layouts_of_use)
        for use, b, layouts_of_use in zip(tape.uses, backprops, layouts, strict=True)
    ]
    terms: Terms = {}
    failed = set(skip)
    nodes: list[ParameterNode] = []  # computed from parameters alone, by functions that have no terms
    for name, node in tape.parameters.items():
        if name not in skip:
            terms[name], results, is_explained = _terms_of_reads(node, of_uses, backprops)
            nodes += results
            failed |= set() if is_explained else {name}
    seen: set[int] = set()
    while nodes:  # what parameters do through tensors computed from them
        node = nodes.pop()
        if id(node) in seen or node.names <= failed:
            continue
        seen.add(id(node))
        of_node, results, is_explained = _terms_of_reads(node, of_uses, backprops)
        nodes += results
        if not is_explained or (of_node and not _is_uncounted(node, of_uses)):
            failed |= node.names
        elif of_node:
            try:
                for name, of_parameter in pulled_back(node, of_node, tape, skip).items():
                    terms[name] += of_parameter
            except Unsupported:
                failed |= node.names
    terms = {name: of_parameter for name, of_parameter in terms.items() if name not in failed}
    if is_precise:
        dtypes = {name: tape.parameters[name].tensor.dtype for name in terms}
        terms = {name: [promote(t, dtypes[name]) for t in of_parameter] for name, of_parameter in terms.items()}
    return terms, failed


def zeros(tape: Tape, name: str, count: int) -> DenseGradients:
    """The gradients of `count` values that do not depend on this parameter."""
    tensor = tape.parameters[name].tensor
    return DenseGradients(tensor.detach().new_zeros(count, *tensor.shape))


def _terms_of_use(use: Use, b: Tensor, layouts: Iterable[Layout]) -> UseTerms:
    if b.is_complex() or any(node.tensor.is_complex() for node in use.slots.values()):
        return None  # the rules do not conjugate
    for layout in layouts:
        terms: dict[str, Term] = {}
        try:
            for slot, node in use.slots.items():
                try:
                    terms[slot] = use.term(slot, b, layout)
                except Unsupported:  # where the argument was computed may explain it (a weight times ones)
                    if node.origin is None or len(use.slots) == 1:
                        raise
            return terms
        except Unsupported:
            continue
        except Exception as error:  # a call that the rule does not foresee must not stop the exact general path
            _warn_of_rule(use, error)
            return None
    return None


def _warn_of_rule(use: Use, error: Exception) -> None:
    names, what = ", ".join(sorted(use.names)), f"{type(error).__name__}: {error}"
    warn_once("%s: the layer's rule failed (%s); please report it", names, what)


def _terms_of_reads(
    node: ParameterNode, of_uses: Sequence[UseTerms], backprops: Backprops
) -> tuple[list[Term], list[ParameterNode], bool]:
    """The terms of a tensor, what other reads have computed from it, and whether these two are all that it does."""
    terms: list[Term] = []
    computed: list[ParameterNode] = []
    is_explained = True
    for use in node.uses:
        by_argument = of_uses[use.index]
        if by_argument is not None:
            slots = [slot for slot, read in use.slots.items() if read is node]
            terms += [by_argument[slot] for slot in slots if slot in by_argument]
            is_explained &= by_argument.keys() >= set(slots)
        elif use.results:
            computed += use.results
        else:
            is_explained &= use.edge is not None and backprops[use.index] is None
    return terms, computed, is_explained


def _is_uncounted(node: ParameterNode, of_uses: Sequence[UseTerms]) -> bool:
    """Whether no use on the way from the parameters to this tensor has terms already."""
    use = node.origin
    return use is None or (of_uses[use.index] is None and all(_is_uncounted(x, of_uses) for x in use.slots.values()))


def weighted_gradients(
    tape: Tape, node: ParameterNode, backprops: Backprops, layouts: Layouts, weights: Tensor
) -> dict[str, Tensor]:
    """Weighted sums over samples of the gradients of the parameters that a tensor was computed from, by its readers.

    Readers that are not per sample count with a weight of one.
    """
    total = torch.zeros_like(node.tensor)
    for use in node.uses:
        b = backprops[use.index]
        by_argument = None if use.results or b is None else _terms_of_use(use, b, layouts[use.index])
        for slot, term in (by_argument or {}).items():
            if use.slots[slot] is node:
                of_samples = weights if len(term) == len(weights) else weights.new_ones(len(term))
                total += term.weighted_sum(of_samples.to(term.device))
    names = sorted(node.names)
    roots = [tape.parameters[name].tensor for name in names]
    pulled = torch.autograd.grad(node.tensor, roots, total, retain_graph=True, allow_unused=True)
    return {name: g for name, g in zip(names, pulled, strict=True) if g is not None}


Terms = dict[str, list[Term]]  # by parameter

# Functions whose results may be consecutive rows of a tensor; the storage offset shows which.
SLICES = {
    torch.split, Tensor.split, torch.split_with_sizes, Tensor.split_with_sizes, torch.tensor_split, Tensor.tensor_split,
    torch.chunk, Tensor.chunk, torch.narrow, Tensor.narrow, Tensor.__getitem__,
}  # fmt: skip


def pulled_back(node: ParameterNode, terms: list[Term], tape: Tape, skip: set[str]) -> Terms:
    """Terms with respect to the parameters from terms with respect to a tensor computed from them (chain rule)."""
    if node.origin is None:
        return {next(iter(node.names)): terms}
    parent = next(iter(node.origin.slots.values()))
    if node.origin.is_transpose:
        transposed = lambda t: t.transpose() if isinstance(t, OuterProduct) else DenseGradients(t.gradients().mT)
        return pulled_back(parent, [transposed(t) for t in terms], tape, skip)
    if node.origin.is_move:
        device = parent.tensor.device
        return pulled_back(parent, [map_tensors(lambda x: x.to(device), t) for t in terms], tape, skip)
    start, shape = _first_row(node), tuple(parent.tensor.shape)
    if start is not None:
        rows = [(t.term, start + t.start) if isinstance(t, RowSlice) else (t, start) for t in terms]
        return pulled_back(parent, [RowSlice(t, first, shape) for t, first in rows], tape, skip)
    if len({len(term) for term in terms}) > 1:
        raise Unsupported("some reads tell the samples apart, others know only their sum")
    names = sorted(node.names - skip)
    roots = [tape.parameters[name].tensor for name in names]
    rows_of_roots = gradient_rows(node.tensor if node.edge is None else node.edge, roots, gradients(terms))
    return {name: [DenseGradients(g)] for name, g in zip(names, rows_of_roots, strict=True)}


def _first_row(node: ParameterNode) -> int | None:
    """The first row, if this tensor is a range of another one's rows; else None."""
    if node.origin is None or node.origin.function not in SLICES:
        return None
    x, whole = node.tensor, next(iter(node.origin.slots.values())).tensor
    same = x.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() and x.dtype == whole.dtype
    if not same or x.ndim != whole.ndim or x.shape[1:] != whole.shape[1:] or x.stride() != whole.stride():
        return None
    return int(x.storage_offset() - whole.storage_offset()) // max(1, whole.stride(0))


def computed_weights(tape: Tape) -> list[ParameterNode]:
    """The tensors that were computed from parameters by more than views, and that data met."""
    readers = [use for use in tape.uses if use.edge is not None and not use.results]
    nodes = dict.fromkeys(node for use in readers for node in use.slots.values())
    return [node for node in nodes if not _is_view(node)]


def _is_view(node: ParameterNode) -> bool:
    """Whether it is a parameter, or consists of transposes, ranges of rows and copies on other devices of one."""
    origin = node.origin
    if origin is None:
        return True
    is_plain = origin.is_transpose or origin.is_move or _first_row(node) is not None
    return is_plain and _is_view(next(iter(origin.slots.values())))


def joint_bias(tape: Tape, weight: str) -> str | None:
    """The bias that is read only where the weight is, with the same rows; None without one."""
    reads = _reads(tape.parameters[weight])
    joint: list[str] = []
    for use, node, start in reads:
        slot = next((slot for slot, other in use.slots.items() if other is node), "")
        rule, call = use.rule, use.call
        if rule is None or call is None or rule is not reads[0][0].rule or slot not in rule.bias_of:
            return None
        bias = use.slots.get(rule.bias_slot(call, slot) or "")
        if bias is None:  # as in another layer of the same kind
            continue
        if len(bias.names) != 1 or bias.names == node.names:
            return None
        if node.origin is not None and bias.tensor.shape[:1] != node.tensor.shape[:1]:
            return None  # the rows of the weight are its inputs
        if (use, bias, start) not in _reads(tape.parameters[next(iter(bias.names))]):
            return None
        joint += bias.names
    if len(set(joint)) != 1:
        return None
    return joint[0] if len(_reads(tape.parameters[joint[0]])) == len(joint) else None


def bias_by_name(weight: str) -> str | None:
    """The bias of a weight that no data have met, as the modules of torch name the two; None without one."""
    path, dot, attribute = weight.rpartition(".")
    return f"{path}{dot}{attribute.replace('weight', 'bias')}" if "weight" in attribute else None


def layers_of(tape: Tape | None, names: Iterable[str], alone: Collection[str] = frozenset()) -> list[tuple[str, ...]]:
    """The parameters of these names by layer: a weight with its `joint_bias`, or `bias_by_name`; all others alone.

    Args:
        tape: None of parameters that no data have met.
        names: of the parameters.
        alone: those that have a block of their own; they come last.
    """
    layer_of: dict[str, tuple[str, ...]] = {}
    names = list(names)
    together = [name for name in names if name not in alone]
    for name in together:
        if name in layer_of:
            continue
        bias = bias_by_name(name) if tape is None else joint_bias(tape, name)
        if bias in together and bias not in layer_of:
            layer_of |= dict.fromkeys([name, bias], (name, bias))
    apart = [name for name in names if name in alone]
    return list(dict.fromkeys(layer_of.get(name, (name,)) for name in [*together, *apart]))


def _reads(node: ParameterNode) -> list[tuple[Use, ParameterNode, int]]:
    """Where a parameter is read: the use, the parameter or the rows of it that are read, and the first of these."""
    reads: list[tuple[Use, ParameterNode, int]] = []
    for use in node.uses:
        rows = [(x, _first_row(x)) for x in use.results]
        if rows and all(start is not None for _, start in rows):
            reads += [(reader, x, start) for x, start in rows if start is not None for reader in x.uses]
        else:
            reads.append((use, node, 0))
    return reads
