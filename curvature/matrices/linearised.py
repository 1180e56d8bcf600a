"""``J v`` for any number of directions, by the graph of a backward pass.

The vectors that arrive at the layers are linear in the vectors sent back from the output, so differentiating them takes
changes of the layers' outputs to the change of the model's. A layer's rule computes the former, each with one forward
function of the layer; where a parameter is read otherwise, its gradient is differentiated. The first pass at every
shape, and through other functions, is compared with differentiating all parameters' gradients, and these with a vector
that goes back. Where a function's backward pass cannot be differentiated, none is right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from curvature.gradients import Batch, batched_vjp, complete_changes
from curvature.linalg import full_precision
from curvature.recording import Tape, Use, graph_functions

log = logging.getLogger("curvature")
ROUNDINGS = 100  # relative difference from two backward passes, in units of rounding
Directions = Mapping[str, Tensor]  # (c, *shape) by name


class Linearised:
    """The map from directions of the parameters to changes of an output.

    Args:
        through: names of parameters whose changes go through the rules of the layers that read them.

    Attributes:
        through: those names.
        graphs: tensors whose graphs it differentiates.
    """

    def __init__(self, tape: Tape, output: Tensor, through: set[str]) -> None:
        self.through = through
        self.uses = [(use, _slots(use, through)) for use in tape.uses if _slots(use, through)]
        self.others = [name for name, p in tape.parameters.items() if name not in through and p.tensor.numel()]
        self.probe = torch.zeros_like(output, requires_grad=True)
        wanted: Any = [use.edge for use, _ in self.uses] + [tape.parameters[name].tensor for name in self.others]
        self.graphs: list[Tensor | None] = [None] * len(wanted)
        if wanted:
            options: Any = {"create_graph": True, "allow_unused": True}
            self.graphs = list(torch.autograd.grad(output, wanted, self.probe, **options))

    def __call__(self, directions: Directions) -> Tensor | None:
        """Changes (c, *output.shape); None is zero."""
        sent: list[Tensor] = []
        live: list[Tensor] = []
        makers = [_change_of(use, slots, directions) for use, slots in self.uses]
        makers += [partial(directions.__getitem__, name) for name in self.others]
        for graph, make in zip(self.graphs, makers, strict=True):
            if graph is not None and graph.requires_grad:
                live.append(graph)
                change = make()
                sent.append(change.reshape(len(change), *graph.shape).to(graph.dtype))
        return batched_vjp(live, [self.probe], sent)[0] if live else None


@dataclass
class LayerRules:
    """Chooses what goes through the rules of layers: all that they explain, where that proved right.

    Attributes:
        proved: what passes at a shape are known by, with the functions of their graph; and the names of parameters that
            go through rules, or None where not even two backward passes are right.
    """

    proved: dict[Any, set[str] | None] = field(default_factory=dict)

    def linearise(self, batch: Batch, tape: Tape, output: Tensor) -> Linearised | None:
        """The map from directions to changes of the output of a recorded pass; None where torch loses a part of it."""
        explained = _explained(tape)
        case = batch.key, graph_functions(output), frozenset(explained), len(tape.uses)
        if case not in self.proved:
            found = _if_right(batch, tape, output, explained)
            self.proved[case] = None if found is None else found.through
            return found
        through = self.proved[case]
        return None if through is None else Linearised(tape, output, through)


@full_precision()
def _if_right(batch: Batch, tape: Tape, output: Tensor, explained: set[str]) -> Linearised | None:
    """The map through the rules, if it takes a random direction to where two backward passes through all parameters
    take it, else through these; None if these lose a part."""
    directions = random_directions(batch, 1)
    expected = by_backward_passes(batch, output, directions)  # first: its graph is gone when the other is made
    if expected is None:
        return None
    try:
        found = Linearised(tape, output, explained)
        change = found(stacked(directions)) if explained else expected
        if is_near(torch.zeros_like(expected) if change is None else change, expected):
            return found
    except Exception as error:  # a call that a rule does not foresee
        log.info("J v takes two backward passes: %s", str(error).split("\n")[0])
    return Linearised(tape, output, set())


def _explained(tape: Tape) -> set[str]:
    """The parameters of which every read has a rule that knows its change."""
    known = lambda use: use.edge is not None and use.knows_change
    return {name for name, node in tape.parameters.items() if node.uses and all(map(known, node.uses))}


def _slots(use: Use, through: set[str]) -> dict[str, str]:
    """Names of parameters by argument."""
    names = {slot: next(iter(node.names)) for slot, node in use.slots.items() if len(node.names) == 1}
    return {slot: name for slot, name in names.items() if name in through}


def _change_of(use: Use, slots: Mapping[str, str], directions: Directions) -> Callable[[], Tensor]:
    """How the output of a use changes, (c, *its shape), once called."""
    assert use.rule is not None and use.call is not None
    change = partial(use.rule.change, use.call)

    def make() -> Tensor:
        own = {slot: directions[name] for slot, name in slots.items()}
        with torch.no_grad():
            if len(next(iter(own.values()))) == 1:
                return change({slot: d[0] for slot, d in own.items()})[None]
            return vmap(change)(own)

    return make


def random_directions(batch: Batch, count: int) -> list[dict[str, Tensor]]:
    """The same at every call."""
    drawn = torch.Generator().manual_seed(0)
    normal = lambda p: torch.randn(p.shape, generator=drawn, dtype=torch.float64, device="cpu").to(p)
    return [{name: normal(p) for name, p in batch.parameters.items()} for _ in range(count)]


def stacked(directions: Sequence[Directions]) -> dict[str, Tensor]:
    return {name: torch.stack([d[name] for d in directions]) for name in directions[0]}


def by_backward_passes(batch: Batch, output: Tensor, directions: Sequence[Directions]) -> Tensor | None:
    """``J v`` (c, *output.shape) by differentiating the gradients of all parameters; None where that loses a part."""
    changes = complete_changes([output], batch.parameters, directions)
    return None if changes is None else torch.stack([change for (change,) in changes])


def is_near(found: Tensor, expected: Tensor | None) -> bool:
    """Whether one way to compute ``J v`` gives what two backward passes give; the log says where not."""
    if expected is None:
        return False
    difference, size = float((found - expected).norm()), float(expected.norm())
    # far less than one wrong layer of a deep model changes; below single precision rounding hides that
    rounding = torch.finfo(expected.dtype).eps
    agrees = rounding <= torch.finfo(torch.float32).eps and difference <= ROUNDINGS * rounding * size
    if not agrees:
        log.info("J v takes two backward passes: a faster way differs by %.2g of %.2g", difference, size)
    return agrees
