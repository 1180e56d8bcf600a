"""What the training loop made of an output of the model, read from the graph of its loss during the backward pass.

In: an output, at which the backward pass is now. Out: a `Reading` of the loss. Nodes that have run have dropped the
tensors they had saved; what is left is which function comes after which, shapes, axes and reductions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from curvature.functional import graph_nodes

Shape = tuple[int, ...]
Edge = tuple[Any, int]  # a node of autograd's graph, and which of its outputs

# Names of nodes, without "Backward0". Functions of entries, as long as nothing is broadcast:
ENTRYWISE = {
    "Abs", "Add", "Addcdiv", "Addcmul", "Atan", "Clamp", "ClampMax", "ClampMin", "Cos", "Div", "Elu", "Erf",
    "Exp", "Expm1", "Gelu", "Hardtanh", "LeakyRelu", "Lerp", "Log", "Log1P", "LogSigmoid", "Logaddexp", "MaskedFill",
    "Maximum", "Minimum", "Mul", "Neg", "Pow", "Reciprocal", "Relu", "Rsqrt", "Rsub", "Sigmoid", "Silu", "Sin",
    "Softplus", "Sqrt", "Sub", "Tanh", "Where", "Xlogy",
}  # fmt: skip
# Other shapes of the same entries; none moves the first axis.
SHAPES = {
    "Alias", "Clone", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Squeeze", "ToCopy", "Transpose",
    "UnsafeView", "Unsqueeze", "View",
}  # fmt: skip
# Functions along axes that the node names.
ALONG = {
    "Amax", "Amin", "Cumsum", "Gather", "LinalgVectorNorm", "LogSoftmax", "Logsumexp", "Max", "Mean", "Min", "Prod",
    "Softmax", "Std", "Sum", "Var",
}  # fmt: skip
LOSSES = {
    "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "HuberLoss", "MseLoss", "MultiMarginLoss",
    "MultilabelMarginLoss", "NllLoss", "NllLoss2D", "SmoothL1Loss", "SoftMarginLoss",
}  # fmt: skip
TERMS, MEAN, SUM = 0, 1, 2  # what `_saved_reduction` says
LINEAR = {"Add", "Sub", "Rsub", "Neg", "Clone", "ToCopy", "View", "UnsafeView", "Squeeze", "Unsqueeze", "Alias"}
CURVED = {"Exp", "Log", "Log1P", "LogSigmoid", "Pow", "Reciprocal", "Rsqrt", "Sigmoid", "Softplus", "Sqrt", "Tanh"}
NORMS = {"LinalgVectorNorm", "Norm"}
PRODUCTS = {"Addmm", "Mm", "CdistForward", "Cdist", "EuclideanDist"}


@dataclass(frozen=True)
class MeanOverClasses:
    """A mean of negative log-likelihoods of classes, not all of which need count."""

    classes: int | None  # their number, if it is known
    is_weighted: bool  # or classes count once, or, ignored, not at all
    of: str  # "logits" or "log-probabilities": what the output is but for its shape; "": something else


@dataclass(frozen=True)
class Unknown:
    """Nothing of this; `why`, and whether it shows that samples meet in the loss."""

    why: str
    samples_meet: bool = False


# A mean over the samples, all with as many terms; a sum over them; a sum that was divided or multiplied by something
# that has gone: N, or the sum of weights, or tokens.
Reading = Literal["mean", "sum", "quotient"] | MeanOverClasses | Unknown


@dataclass(frozen=True)
class Source:
    """A tensor () or (N, ...) in autograd's graph, without holding the graph: its node's name and number."""

    name: str
    sequence_number: int
    output_number: int
    shape: Shape

    @staticmethod
    def of(x: Tensor | GradientEdge) -> Source | None:
        """None for what has no node."""
        edge: Any = GradientEdge(x.grad_fn, x.output_nr) if isinstance(x, Tensor) else x  # type: ignore[arg-type]
        if edge.node is None:
            return None
        number = edge.output_nr
        return Source(type(edge.node).__name__, edge.node._sequence_nr(), number, _shape(edge.node, number))

    def is_at(self, edge: Edge) -> bool:
        node, number = edge
        return (
            number == self.output_number
            and node._sequence_nr() == self.sequence_number
            and type(node).__name__ == self.name
        )


def read_loss(source: Source | None, losses: Sequence[Any] = ()) -> Reading:
    """What a loss is, as a function of a tensor (N, ...), from its nodes; by default from the running backward pass."""
    if source is None:
        return Unknown("the model returned a parameter")
    if not source.shape:
        return Unknown("the output has no axis of samples")
    for roots in [losses] if losses else _running_backward_passes():
        found = [between for root in roots if (between := _between(root, source))]
        if len(found) == 1:
            return _classified(found[0], source.shape[0])
        if found:
            return Unknown("there are several losses")
    return Unknown("its graph is not at hand")


def edges_here(sources: Sequence[Any]) -> list[GradientEdge | None]:
    """Where these are in the graph below the node that the running backward pass is at: each a `Source`, or None."""
    nodes = {(type(n).__name__, n._sequence_nr()): n for n in graph_nodes(torch._C._current_autograd_node())}
    found: list[Any] = [source and nodes.get((source.name, source.sequence_number)) for source in sources]
    return [node and GradientEdge(node, source.output_number) for node, source in zip(found, sources, strict=True)]


def _running_backward_passes() -> Iterator[list[Any]]:
    """Nodes at which passes began, the innermost of this thread first. Devices have threads of their own for theirs."""
    for top in (sys._getframe(1), *sys._current_frames().values()):
        frame: Any = top
        while frame is not None:
            if frame.f_code.co_name == "_engine_run_backward":
                tensors = frame.f_locals.get("t_outputs", ())
                yield [x.node if hasattr(x, "node") else x.grad_fn for x in tensors if x is not None]
            frame = frame.f_back


def _between(root: Any, source: Source) -> dict[Any, list[Edge]]:
    """The nodes on the ways from a root to the source, each with its edges that lead there."""
    found: dict[Any, list[Edge]] = {}
    for node in graph_nodes(root):
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        if leading := [edge for edge in edges if source.is_at(edge) or edge[0] in found]:
            found[node] = leading
    return found


def _classified(nodes: dict[Any, list[Edge]], rows: int) -> Reading:
    reductions: list[Any] = []
    others: set[str] = set()
    factors: list[Any] = []  # numbers by which the loss was divided or multiplied; None where they have gone
    for node, edges in nodes.items():
        name, shape = _name(node), _shape(node, 0)
        operands = [_shape(*edge) for edge in edges]
        if not shape and not any(operands):
            if name in ("Mul", "Div"):
                factors.append(getattr(node, "_saved_other", None) if type(node).__name__ == "DivBackward1" else None)
            if (problem := _problem_of_scalar(node, name, edges)) is not None:
                return problem
        elif not shape:
            reductions.append(node)
        elif len(edges) > 1 and name in PRODUCTS:
            return Unknown(f"{name} of outputs with outputs", samples_meet=True)
        elif not _is_by_sample(node, name, operands, rows):
            return Unknown(f"by {name}, of which it is not known whether samples meet in it")
        else:
            others.add(name)
    return _of_reductions(reductions, others, factors, rows)


def _problem_of_scalar(node: Any, name: str, edges: Sequence[Edge]) -> Unknown | None:
    """What is wrong with a function of scalars, if it is not linear."""
    if name in LINEAR:
        return None
    if name in ("Mul", "Div"):
        is_factor = len(edges) == 1 and (name == "Mul" or edges[0] == node.next_functions[0])
        return None if is_factor else Unknown(f"{name} of losses", samples_meet=True)
    return Unknown(f"{name} of the loss", samples_meet=name in CURVED)


def _of_reductions(nodes: Sequence[Any], others: set[str], factors: Sequence[Any], rows: int) -> Reading:
    kinds = {_kind(node) for node in nodes}
    if kinds == {"mean"}:
        return "mean"
    if kinds == {"sum"} and len(nodes) == 1 and rows in factors:  # torch's cross-entropy of probabilities
        return "mean"
    if kinds == {"sum"}:
        return "quotient" if factors else "sum"
    if kinds == {"classes"} and len(nodes) == 1:
        return _mean_over_classes(nodes[0], others)
    norms = [_name(node) for node in nodes if _name(node) in NORMS]
    if norms:
        return Unknown(f"{norms[0]} over samples", samples_meet=True)
    return Unknown(" and ".join(sorted(f"{_name(node)} over samples" for node in nodes)))


def _kind(node: Any) -> str:
    name = _name(node)
    if name in ("Mean", "Sum"):
        return name.lower()
    reduction = getattr(node, "_saved_reduction", None) if name in LOSSES else None
    if reduction == SUM:
        return "sum"
    if reduction != MEAN:
        return ""
    return "classes" if name.startswith("Nll") else "mean"


def _mean_over_classes(node: Any, others: set[str]) -> MeanOverClasses:
    logits = _shape(*node.next_functions[0])
    try:
        is_weighted = node._saved_weight is not None
    except RuntimeError:  # it has been dropped, so there was one
        is_weighted = True
    softmax = others & {"LogSoftmax"}
    is_plain = others - softmax <= SHAPES - {"Expand"}
    of = ("logits" if softmax else "log-probabilities") if is_plain else ""
    return MeanOverClasses(logits[1 if len(logits) > 1 else 0], is_weighted, of)


def _is_by_sample(node: Any, name: str, operands: Sequence[Shape], rows: int) -> bool:
    """Whether a function keeps the samples apart, in order, along its first axis."""
    shape = _shape(node, 0)
    if any(not own or not own[0] or own[0] % rows for own in (shape, *operands)):
        return False
    ndim = len(operands[0])
    if name in LOSSES:
        return getattr(node, "_saved_reduction", None) == TERMS
    if name in SHAPES:
        if name == "Expand":
            return len(shape) == ndim and shape[0] == operands[0][0]
        if name == "Permute":
            return _axis(node._saved_dims[0], ndim) == 0
        axes = [getattr(node, k) for k in ("_saved_dim", "_saved_dim0", "_saved_dim1") if hasattr(node, k)]
        ndim += name == "Unsqueeze"
        return name == "Squeeze" or all(_axis(d, ndim) for own in axes for d in _numbers(own))
    if name in ALONG:
        axes = list(_numbers(getattr(node, "_saved_dim", ())))
        return bool(axes) and all(_axis(d, ndim) for d in axes)
    return name in ENTRYWISE and all(own == shape for own in operands)


def _name(node: Any) -> str:
    return type(node).__name__.partition("Backward")[0]


def _shape(node: Any, number: int) -> Shape:
    return tuple(node._input_metadata[number].shape)


def _axis(dim: int, ndim: int) -> int:
    """Counted from the front; autograd returns negative ones as unsigned numbers of 64 bits."""
    return (dim - (1 << 64) if dim >= 1 << 63 else dim) % max(1, ndim)


def _numbers(axes: Any) -> Sequence[int]:
    return (axes,) if isinstance(axes, int) else tuple(axes or ())
