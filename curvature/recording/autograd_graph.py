"""Find the reads of parameters in autograd's graph, also where the model was differentiated on the way to the result.

A Laplacian over d inputs reads a linear layer 2 + 2d times, most of them in functions that no forward pass calls. Each
read is a node of the graph in which the other operand is saved, and becomes a `Use` like those of a forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.autograd.graph import Node as GraphNode

from curvature.functional import graph_nodes
from curvature.layers import RULES, RecordedCall
from curvature.recording.tape import ParameterNode, Tape, Use, add_result, add_use

Output = tuple[GraphNode, int]  # one of a node's outputs


# By the name of a node: the function it comes from, what each argument is saved as, and the names of the differentiable
# arguments in order. Autograd does not save what a parameter is added to, and no rule needs it.
READERS: dict[str, tuple[Callable[..., Any], dict[str, str], tuple[str, ...]]] = {
    "AddmmBackward0": (torch.addmm, {"x": "mat1", "y": "mat2", "alpha": "alpha", "beta": "beta"}, ("input", "x", "y")),
    "MmBackward0": (torch.mm, {"input": "self", "other": "mat2"}, ("input", "other")),
    "BmmBackward0": (torch.bmm, {"input": "self", "other": "mat2"}, ("input", "other")),
    "MvBackward0": (torch.mv, {"input": "self", "other": "vec"}, ("input", "other")),
    "MulBackward0": (torch.mul, {"arg0": "self", "arg1": "other"}, ("arg0", "arg1")),
    "DivBackward0": (torch.div, {"arg0": "self", "arg1": "other"}, ("arg0", "arg1")),
    "AddBackward0": (torch.add, {"alpha": "alpha"}, ("arg0", "arg1")),
    "SubBackward0": (torch.sub, {"alpha": "alpha"}, ("arg0", "arg1")),
}

# Second derivatives of kernels whose third derivatives are wrong.
INEXACT = "LayerNormBackwardBackward0", "BatchNormBackwardBackward0"

# Nodes that may exchange the axes of a matrix, with a function that says whether they do.
TRANSPOSES: dict[str, Callable[[Any], bool]] = {
    "TBackward0": lambda node: True,
    "TransposeBackward0": lambda node: node._saved_dim0 % 2 != node._saved_dim1 % 2,
    "PermuteBackward0": lambda node: node._saved_dims[0] % 2 == 1,
}


def tape_from_graph(result: GradientEdge, parameters: Mapping[str, nn.Parameter]) -> Tape:
    """A tape of all reads of the parameters in the graph of a result, which the tape's backprops need."""
    tape = Tape(nn.Module(), parameters)
    leaves = {id(node.tensor): node for node in tape.parameters.values()}
    constant: dict[Output, ParameterNode] = {}  # what depends on parameters alone
    data: set[GraphNode] = set()
    for node in graph_nodes(result.node):
        variable = getattr(node, "variable", None)
        if id(variable) in leaves:
            constant[node, 0] = leaves[id(variable)]
            continue
        steps = [step for step in node.next_functions if step[0] is not None]
        if not steps or any(step[0] in data for step in steps):
            data.add(node)
        inputs = {k: constant[step] for k, step in enumerate(node.next_functions) if step in constant}
        if inputs and _is_identity(node):
            constant[node, 0] = inputs[0]
        elif inputs:
            use = _read(tape, node, inputs)
            if node not in data:
                zero = next(iter(inputs.values())).tensor.new_zeros(())
                for k, x in enumerate(node._input_metadata):
                    constant[node, k] = add_result(use, zero.expand(x.shape), GradientEdge(node, k))
    whole = constant.get((result.node, result.output_nr))
    if whole is not None and whole.origin is None:  # a parameter itself, which no node reads
        add_use(tape, "the result", {"argument0": whole})
    return tape


def require_exact_derivatives(result: GradientEdge) -> None:
    """Raise ValueError where a kernel in the graph has wrong derivatives (pytorch issues 175754, 186256)."""
    for kind in {type(node).__name__ for node in graph_nodes(result.node)}:
        if kind.endswith(INEXACT):
            raise ValueError(
                f"values: they differentiate a norm whose kernel has wrong third derivatives ({kind}); "
                "compute them in the context curvature.functional.ExactNorms(), which runs it as its formula"
            )


def graph_dtypes(results: Iterable[Tensor]) -> set[torch.dtype]:
    """The precisions of what the functions in the graphs of results have computed."""
    return {x.dtype for x in _metadata_of(results) if x.dtype.is_floating_point}


def graph_bytes(results: Iterable[Tensor]) -> int:
    """What all functions in the graphs of results have computed: more than what the graphs hold."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in _metadata_of(results))


def _metadata_of(results: Iterable[Tensor]) -> list[Any]:
    nodes = graph_nodes(*(result.grad_fn for result in results))
    return [x for node in nodes if not hasattr(node, "variable") for x in node._input_metadata]


def graph_leaves(result: Tensor, beyond: Tensor | None = None) -> list[Tensor]:
    """The leaf tensors of the graph of a result; those that are not reached through another alone."""
    until = None if beyond is None else beyond.grad_fn
    variables = [getattr(node, "variable", None) for node in graph_nodes(result.grad_fn, until=until)]
    return [x for x in variables if x is not None]


def _is_identity(node: Any) -> bool:
    """Whether a node returns its input unchanged, or times one."""
    return node.name() == "AliasBackward0" or (node.name() == "MulBackward1" and node._saved_other == 1)


def _is_transpose(node: Any) -> bool:
    """Whether a node transposes a matrix: `t`, `T`, `mT`, `transpose` or `permute`. Axis -k is saved as 2^64 - k."""
    exchanges = TRANSPOSES.get(node.name())
    return exchanges is not None and len(node._input_metadata[0].shape) == 2 and exchanges(node)


def _read(tape: Tape, node: GraphNode, inputs: Mapping[int, ParameterNode]) -> Use:
    try:
        if node.name() not in READERS:
            raise RuntimeError("no rule")
        function, fields, names = READERS[node.name()]
        saved = {k: getattr(node, f"_saved_{field}") for k, field in fields.items()}
    except RuntimeError:  # no rule, or a saved tensor was overwritten, which the general path reports
        kind = Tensor.t if _is_transpose(node) else node.name()
        return add_use(tape, kind, {f"argument{k}": parameter for k, parameter in inputs.items()})
    slots = {names[k]: parameter for k, parameter in inputs.items()}
    args: dict[str, Any] = {name: parameter.tensor.detach() for name, parameter in slots.items()}
    args |= {k: x.detach() if isinstance(x, Tensor) else x for k, x in saved.items() if x is not None}
    if function in (torch.mul, torch.div, torch.add, torch.sub):
        args = {name: next(iter(args.values())).new_zeros(()) for name in names} | args | {"function": function}
    call = RecordedCall(args, tuple(node._input_metadata[0].shape))
    return add_use(tape, function, slots, RULES.get(function), call, edge=GradientEdge(node, 0))
