"""The nodes of autograd's graphs, which of them torch does not know, and vectors that go back through them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.autograd.graph import Node as GraphNode

from curvature.attempts import attempt

OWN = f"{__name__.partition('.')[0]}."  # where functions are defined that leave samples where they are
IN_CPP = "CppFunction"  # the type of nodes of functions that an extension brings
TRANSFORMED, OPERATORS = "torch._functorch.autograd_function", "torch._library"  # where torch makes functions of others


def graph_nodes(*last: GraphNode | None, until: GraphNode | None = None) -> list[GraphNode]:
    """All nodes of the graphs that end in some, each after its inputs, in an order that only the graphs decide.

    Neither `until` nor what is behind it alone is among them.
    """
    order: list[GraphNode] = []
    seen = {until}
    todo = [(node, False) for node in last if node is not None]
    while todo:
        node, is_done = todo.pop()
        if is_done:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            todo.append((node, True))
            todo += [(step, False) for step, _ in node.next_functions if step is not None]
    return order


def is_of_the_user(node: Any) -> bool:
    """Whether it is a function in Python, of the user's or of a library's."""
    return isinstance(node, BackwardCFunction) and not type(node)._forward_cls.__module__.startswith(OWN)  # type: ignore[attr-defined]


def own_functions(results: Iterable[Tensor]) -> list[str]:
    """Names of the functions in the graphs of results of which torch knows nothing, and which do not say themselves
    that they have a second derivative (`twice_differentiable`).

    Functions of torch are right or raise their own error, but for those that it makes of others: of a function under
    `torch.func`, which is that function again, and of an operator of `torch.library`, which cannot say anything.
    """
    nodes = graph_nodes(*(result.grad_fn for result in results))
    classes = [_written(type(node)._forward_cls) for node in nodes if is_of_the_user(node)]  # type: ignore[attr-defined]
    names = [kind.__name__ for kind in classes if not _is_twice_differentiable(kind)]
    return list(dict.fromkeys([*names, *(node.name() for node in nodes if type(node).__name__ == IN_CPP)]))


def require_second_derivatives(results: Iterable[Tensor], what: str, instead: str = "") -> None:
    """RuntimeError where the graph has functions that do not say that they have a second derivative."""
    if names := own_functions(results):
        raise RuntimeError(
            f"{what} needs the second derivative of an autograd.Function ({', '.join(names)}). If torch can "
            "differentiate its backward, which computes everything with torch functions of the gradient that it gets "
            "and of ctx.saved_tensors (no detach, NumPy, once_differentiable, nor what forward put into ctx), say so "
            "by a line in the class, twice_differentiable = True, and check it by torch.autograd.gradgradcheck. Else "
            f"call its formula in place of it{instead}"
        )


def _is_twice_differentiable(kind: Any) -> bool:
    is_of_torch = kind.__module__.startswith("torch.") and not kind.__module__.startswith((TRANSFORMED, OPERATORS))
    return is_of_torch or bool(getattr(kind, "twice_differentiable", False))


def _written(kind: Any) -> Any:
    """The function of which torch.func has made this one, under `vmap` for example."""
    while kind.__module__ == TRANSFORMED:
        kind = inspect.getclosurevars(kind.forward).nonlocals["autograd_function"]
    return kind


def batched_vjp(
    outputs: Sequence[Tensor | GradientEdge], inputs: Sequence[Tensor | GradientEdge], vectors: Sequence[Tensor]
) -> list[Tensor | None]:
    """Gradients (k, *shape) of the inputs, or None, for vectors (k, *shape) of each output; keeps the graph."""
    derive: Any = partial(torch.autograd.grad, outputs, inputs, retain_graph=True, allow_unused=True)
    if not inputs:
        return []
    if len(vectors[0]) > 1:  # some operations have no batched backward pass; any other error recurs below
        together = attempt(lambda: derive(vectors, is_grads_batched=True), "vectors go back one by one")
        if together is not None:
            return [None if g is None else _dense(g) for g in together]
    rows = [derive([v[k].clone() for v in vectors]) for k in range(len(vectors[0]))]
    if len(rows) == 1:
        return [None if g is None else _dense(g)[None] for g in rows[0]]
    columns = zip(*rows, strict=True)
    return [None if column[0] is None else torch.stack([_dense(g) for g in column]) for column in columns]


def _dense(g: Tensor) -> Tensor:
    """Sparse gradients, as of an embedding, and zeros that torch keeps without memory, as of `torch.sgn`, in full."""
    return g.clone() if g._is_zerotensor() else g.to_dense()
