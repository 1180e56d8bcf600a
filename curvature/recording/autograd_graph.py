"""Reads of parameters found in the graph of a result, also of one that was differentiated on the way to it.

A gradient taken with ``create_graph=True`` reads every weight again, in functions that no forward pass calls: a linear
layer inside a Laplacian over d inputs is read 2 + 2d times. All of them are nodes of autograd's graph, with the tensor
that the weight met saved in the node; each becomes a `Use` like those of a forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.autograd.graph import Node as GraphNode

from curvature.layers import RULES, RecordedCall
from curvature.recording.tape import ParameterNode, Tape, Use

Step = tuple[GraphNode, int]


def _addmm(node: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    saved = {"x": node._saved_mat1, "y": node._saved_mat2, "alpha": node._saved_alpha, "beta": node._saved_beta}
    return saved, ("input", "x", "y")


def _product(node: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    other = node._saved_vec if hasattr(node, "_saved_vec") else node._saved_mat2
    return {"input": node._saved_self, "other": other}, ("input", "other")


def _entrywise(node: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    return {"arg0": node._saved_self, "arg1": node._saved_other}, ("arg0", "arg1")


def _sum(node: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    # what a parameter is added to does not matter, and is not saved
    return {"alpha": node._saved_alpha}, ("arg0", "arg1")


# The function that a node stands for; its arguments as saved, and the names of those that are differentiated.
READS: dict[str, tuple[Callable[..., Any], Callable[[Any], tuple[dict[str, Any], tuple[str, ...]]]]] = {
    "AddmmBackward0": (torch.addmm, _addmm),
    "MmBackward0": (torch.mm, _product),
    "BmmBackward0": (torch.bmm, _product),
    "MvBackward0": (torch.mv, _product),
    "MulBackward0": (torch.mul, _entrywise),
    "DivBackward0": (torch.div, _entrywise),
    "AddBackward0": (torch.add, _sum),
    "SubBackward0": (torch.sub, _sum),
}

# Nodes that may take samples elsewhere, as a tensor among their arguments says.
MOVED_BY_DATA = {
    "IndexBackward0", "IndexPutBackward0", "IndexSelectBackward0", "IndexAddBackward0", "IndexCopyBackward0",
    "GatherBackward0", "ScatterBackward0", "ScatterAddBackward0", "TakeBackward0", "TakeAlongDimBackward0",
    "SortBackward0", "TopkBackward0", "MaskedSelectBackward0", "MaskedScatterBackward0", "EmbeddingBackward0",
    "RepeatInterleaveBackward0",
}  # fmt: skip
TENSOR = "a tensor"
SETTINGS: dict[type, list[str]] = {}  # the names of what is saved in a node beside tensors: axes, shifts, sizes
WRONG = "LayerNormBackwardBackward0", "BatchNormBackwardBackward0"  # what kernels are called that were differentiated

# Nodes that may exchange the axes of a matrix, and whether they do.
TRANSPOSES: dict[str, Callable[[Any], bool]] = {
    "TBackward0": lambda node: True,
    "TransposeBackward0": lambda node: node._saved_dim0 % 2 != node._saved_dim1 % 2,
    "PermuteBackward0": lambda node: node._saved_dims[0] % 2 == 1,
}


def tape_from_graph(result: GradientEdge, parameters: Mapping[str, nn.Parameter]) -> Tape:
    """All reads of the parameters on the way to a result.

    The graph must be kept for the tape's backprops.
    """
    tape = Tape(nn.Module(), parameters)
    leaves = {id(node.tensor): node for node in tape.parameters.values()}
    alone: dict[Step, ParameterNode] = {}  # what depends on parameters alone
    data: set[GraphNode] = set()
    for node in _nodes(result.node):
        variable = getattr(node, "variable", None)
        if id(variable) in leaves:
            alone[node, 0] = leaves[id(variable)]
            continue
        steps = [step for step in node.next_functions if step[0] is not None]
        if not steps or any(step[0] in data for step in steps):
            data.add(node)
        inputs = {k: alone[step] for k, step in enumerate(node.next_functions) if step in alone}
        if inputs and _is_identity(node):
            alone[node, 0] = inputs[0]
        elif inputs:
            use = _read(tape, node, inputs)
            if node not in data:
                zero = next(iter(inputs.values())).tensor.new_zeros(())
                for k, x in enumerate(node._input_metadata):
                    found = ParameterNode(zero.expand(x.shape), use.names, use, edge=GradientEdge(node, k))
                    use.results.append(found)
                    alone[node, k] = found
    own = alone.get((result.node, result.output_nr))
    if own is not None and own.origin is None:  # a parameter as it is, which no node reads
        _entered(tape, "the result", {"argument0": own}, None, None)
    return tape


def graph_signature(result: GradientEdge, parameters: Mapping[str, nn.Parameter]) -> tuple[Any, ...] | None:
    """What the graph of a result is: equal for two only if samples go the same ways in both.

    None where data may move samples: an index, a mask, a function of the user's.

    Raises:
        ValueError: a kernel in it has wrong derivatives (pytorch issues 175754, 186256).
    """
    found: list[Any] = []
    leaves = {id(p) for p in parameters.values()}
    for node in _nodes(result.node):
        kind = type(node)
        if kind.__name__.endswith(WRONG):
            raise ValueError(
                f"values: they differentiate a norm whose kernel has wrong third derivatives ({kind.__name__}); "
                "compute them in the context curvature.functional.ExactNorms(), which runs it as its formula"
            )
        from_data = any(id(getattr(step, "variable", None)) not in leaves for step, _ in node.next_functions if step)
        if isinstance(node, BackwardCFunction) or (kind.__name__ in MOVED_BY_DATA and from_data):
            return None
        if kind not in SETTINGS:
            names = [name for name in dir(kind) if name.startswith("_saved_")]
            SETTINGS[kind] = [name for name in names if _setting(node, name) != TENSOR]
        found.append((kind, *(_setting(node, name) for name in SETTINGS[kind])))
    return tuple(found)


def _setting(node: GraphNode, name: str) -> str:
    try:
        value = getattr(node, name)
    except RuntimeError:  # a tensor that was overwritten
        return TENSOR
    held = value if isinstance(value, tuple) else (value,)  # several: the indices of a table
    return TENSOR if any(isinstance(x, Tensor) for x in held) else str(value)


def _nodes(last: GraphNode) -> list[GraphNode]:
    """All nodes, those that others come from first, in an order that the graph alone decides."""
    order: list[GraphNode] = []
    seen: set[GraphNode] = set()
    todo: list[tuple[GraphNode, bool]] = [(last, False)]
    while todo:
        node, is_done = todo.pop()
        if is_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            todo.append((node, True))
            todo += [(step, False) for step, _ in node.next_functions if step is not None]
    return order


def graph_leaves(result: Tensor) -> list[Tensor]:
    """The tensors that a result can be differentiated by."""
    nodes = [] if result.grad_fn is None else _nodes(result.grad_fn)
    found = [getattr(node, "variable", None) for node in nodes]
    return [x for x in found if x is not None]


def _is_identity(node: Any) -> bool:
    """A tensor as it is, or times one."""
    return node.name() == "AliasBackward0" or (node.name() == "MulBackward1" and node._saved_other == 1)


def _is_transpose(node: Any) -> bool:
    """Of a matrix, by `t`, `T`, `mT`, `transpose` or `permute`. Negative axes are saved as 2^64 minus them."""
    found = TRANSPOSES.get(node.name())
    return found is not None and len(node._input_metadata[0].shape) == 2 and found(node)


def _read(tape: Tape, node: GraphNode, inputs: Mapping[int, ParameterNode]) -> Use:
    function, arguments = READS.get(node.name(), (None, None))
    try:
        if function is None or arguments is None:
            raise RuntimeError("no rule")
        saved, names = arguments(node)
    except RuntimeError:  # or what was saved is overwritten: the general path will say so
        kind = Tensor.t if _is_transpose(node) else node.name()
        return _entered(tape, kind, {f"argument{k}": found for k, found in inputs.items()}, None, None)
    slots = {names[k]: found for k, found in inputs.items()}
    args: dict[str, Any] = {name: found.tensor.detach() for name, found in slots.items()}
    args |= {k: x.detach() if isinstance(x, Tensor) else x for k, x in saved.items() if x is not None}
    if function in (torch.mul, torch.div, torch.add, torch.sub):
        args = {name: next(iter(args.values())).new_zeros(()) for name in names} | args | {"function": function}
    call = RecordedCall(args, tuple(node._input_metadata[0].shape))
    return _entered(tape, function, slots, call, GradientEdge(node, 0))


def _entered(
    tape: Tape, function: Any, slots: Mapping[str, ParameterNode], call: RecordedCall | None, edge: GradientEdge | None
) -> Use:
    use = Use(len(tape.uses), function, RULES.get(function) if call else None, call, dict(slots), edge, [])
    tape.uses.append(use)
    for node in {id(node): node for node in slots.values()}.values():
        node.uses.append(use)
    return use
