"""Weights that are computed from weights: transposes, rows, masks, norms; and which parameters make up a layer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from curvature.gradients.jacobian_products import gradient_rows
from curvature.layers import Unsupported
from curvature.recording import ParameterNode, Tape, Use, map_tensors
from curvature.terms import DenseGradients, OuterProduct, RowSlice, Term, gradients

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


def layers_of(tape: Tape | None, names: Iterable[str]) -> list[tuple[str, ...]]:
    """The parameters of these names by layer: a weight with its `joint_bias`, or `bias_by_name`; all others alone."""
    layer_of: dict[str, tuple[str, ...]] = {}
    names = list(names)
    for name in names:
        if name in layer_of:
            continue
        bias = bias_by_name(name) if tape is None else joint_bias(tape, name)
        if bias in names and bias not in layer_of:
            layer_of |= dict.fromkeys([name, bias], (name, bias))
    return list(dict.fromkeys(layer_of.get(name, (name,)) for name in names))


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
