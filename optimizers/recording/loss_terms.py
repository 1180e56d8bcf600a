"""The tensors that a loss is the sum or mean of, found in autograd's graph.

In: scalars that a model returned. Out: what they were reduced from, and the gradient of their sum at these tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from curvature.recording import Tape


def loss_terms(tape: Tape, losses: Sequence[Tensor]) -> list[Tensor]:
    """What sums and means over data made the losses, with nothing but scalar functions and penalties after them.

    Empty if the losses come about in any other way: by a norm, say.
    """
    terms = {x.grad_fn: terms for terms, x in tape.reductions}
    without_data = {x.grad_fn for x in _computed_from_parameters(tape)}
    found: dict[Any, Tensor] = {}
    todo: list[Any] = [(x.grad_fn, 0) for x in losses]
    seen = set()
    while todo:
        node, number = todo.pop()
        if node in terms:
            found[node] = terms[node]
        elif node is not None and node not in seen and node not in without_data and not hasattr(node, "variable"):
            if node._input_metadata[number].shape:
                return []
            seen.add(node)
            todo += node.next_functions
    return list(found.values())


def _computed_from_parameters(tape: Tape) -> Iterator[Tensor]:
    for use in tape.uses:
        for node in use.results:
            yield node.tensor


def gradients_at(terms: Sequence[Tensor], losses: Sequence[Tensor]) -> list[Tensor]:
    """The gradient of the sum of the losses at tensors that they depend on."""
    return list(torch.autograd.grad(list(losses), list(terms), retain_graph=True))
