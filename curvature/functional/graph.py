"""The nodes of autograd's graphs, and which of them torch does not know."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node as GraphNode

OWN = f"{__name__.partition('.')[0]}."  # where functions are defined that leave samples where they are
IN_CPP = "CppFunction"  # the type of nodes of functions that an extension brings
BY_VMAP = "Vmapped"  # how torch begins the name of a function that it made of another


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
    """Names of the functions in the graphs of results that torch does not know, of the user's or of a library's."""
    nodes = graph_nodes(*(result.grad_fn for result in results))
    classes: list[Any] = [type(node) for node in nodes if is_of_the_user(node)]
    in_python = [kind._forward_cls.__name__.removeprefix(BY_VMAP) for kind in classes]
    return list(dict.fromkeys([*in_python, *(node.name() for node in nodes if type(node).__name__ == IN_CPP)]))
