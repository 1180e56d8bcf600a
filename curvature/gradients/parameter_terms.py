"""From backprops to terms: what every recorded use contributes to the per-sample gradient of each parameter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from curvature.gradients.derived_weights import Terms, pulled_back
from curvature.layers import Layout, Unsupported
from curvature.recording import ParameterNode, Tape, Use, warn_once
from curvature.terms import DenseGradients, Term, promote

Backprops = Sequence[Tensor | None]  # of each use; None where nothing arrives
Layouts = Sequence[Iterable[Layout]]  # of each use the candidates: the first that its rule accepts counts
UseTerms = dict[str, Term] | None  # by argument; None where a use has no per-sample view


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
