"""``J v`` for any number of directions, in the fastest way that proves right.

`Linearised` goes by the graph of a backward pass: the vectors that arrive at the layers are linear in the vectors sent
back from the output, so differentiating them takes changes of the layers' outputs to the change of the model's. A
layer's rule computes the former, each with one forward function of the layer; where a parameter is read otherwise, its
gradient is differentiated. `ForwardMode` has dual numbers in place of the parameters, which takes two thirds of the
time for several columns through group or batch norms, whose backward passes are slow to differentiate.

The first pass at every shape, and through other functions, is compared with differentiating all parameters' gradients,
and these with a vector that goes back. Where a function's backward pass cannot be differentiated, none is right.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, jvp, vmap

from curvature.functional import TwiceDifferentiable, graph_nodes
from curvature.gradients import Batch, RefuseNewData, batched_vjp, complete_changes
from curvature.linalg import full_precision
from curvature.recording import ModelState, Tape, Use

log = logging.getLogger("curvature")
ROUNDINGS = 100  # relative difference from two backward passes, in units of rounding
SLOW_TWICE = "GroupNorm", "BatchNorm"  # in the names of their backward functions
# entries of one layer's outputs, over the columns that forward mode takes: what a CPU's cache holds, and elsewhere
CACHED_ENTRIES, ENTRIES = 1 << 21, 1 << 27
Directions = Mapping[str, Tensor]  # (c, *shape) by name


class Linearised:
    """The map from directions of the parameters to changes of an output, by its graph.

    Args:
        through: names of parameters whose changes go through the rules of the layers that read them.

    Attributes:
        graphs: tensors whose graphs it differentiates.
        at_once: for how many directions it is best called; None: for as many as their graph may hold.
    """

    at_once: int | None = None

    def __init__(self, tape: Tape, output: Tensor, through: Collection[str]) -> None:
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


class ForwardMode:
    """The same by a forward pass of the model with dual numbers, whose columns share the numbers that are not dual."""

    def __init__(self, batch: Batch, tape: Tape, output: Tensor) -> None:
        self.batch, self.start = batch, tape.start or ModelState(batch.model)
        largest = max([output.numel(), *(math.prod(use.shape) for use in tape.uses)])
        self.at_once = max(1, (CACHED_ENTRIES if output.device.type == "cpu" else ENTRIES) // largest)

    def __call__(self, directions: Directions) -> Tensor:
        values = {name: p.detach() for name, p in self.batch.parameters.items()}
        one = lambda direction: jvp(self._output, (values,), (direction,))[1]
        with self.start.again(), torch.no_grad(), TwiceDifferentiable(), RefuseNewData():
            return _each(one, directions)

    def _output(self, parameters: Mapping[str, Tensor]) -> Tensor:
        stand_in: Any = lambda *args, **kwargs: functional_call(self.batch.model, dict(parameters), args, kwargs)
        return replace(self.batch, model=stand_in).output()


Way = Linearised | ForwardMode


@dataclass
class Ways:
    """Chooses among the ways to compute ``J v``: the first that proves right, the fastest being tried first.

    Attributes:
        proved: what passes at a shape are known by, with the functions of their graph; and the number of the way, or
            None where not even two backward passes are right.
    """

    proved: dict[Any, int | None] = field(default_factory=dict)

    def find(self, batch: Batch, tape: Tape, output: Tensor) -> Way | None:
        """The map from directions to changes of the output of a recorded pass; None where torch loses a part of it."""
        functions, explained = tuple(map(type, graph_nodes(output.grad_fn))), _explained(tape)
        graph = partial(Linearised, tape, output)
        ways: list[partial[Any]] = [partial(graph, through) for through in dict.fromkeys((explained, frozenset()))]
        if any(slow in function.__name__ for function in functions for slow in SLOW_TWICE):
            ways.insert(0, partial(ForwardMode, batch, tape, output))
        case = batch.key, functions, explained, len(tape.uses)
        if case in self.proved:
            number = self.proved[case]
            return None if number is None else ways[number]()
        self.proved[case], way = _first_right(batch, output, ways)
        return way


@full_precision()
def _first_right(batch: Batch, output: Tensor, ways: Sequence[partial[Any]]) -> tuple[int | None, Way | None]:
    """The number of the first way that takes random directions to where two backward passes through all parameters take
    them, as the last one does, and its map; None and None if these lose a part."""
    several = any(make.func is ForwardMode for make in ways)  # it is for these
    directions = random_directions(batch, 2 if several else 1)
    expected = by_backward_passes(batch, output, directions)  # first: its graph is gone when the others are made
    if expected is None:
        return None, None
    for number, make in enumerate(ways[:-1]):
        try:
            way = make()
            change = way(stacked(directions))
            if is_near(torch.zeros_like(expected) if change is None else change, expected):
                return number, way
        except Exception as error:  # a call that a rule does not foresee, a function without forward derivative
            log.info("J v takes two backward passes: %s", str(error).split("\n")[0])
    return len(ways) - 1, ways[-1]()


def _explained(tape: Tape) -> frozenset[str]:
    """The parameters of which every read has a rule that knows its change."""
    known = lambda use: use.edge is not None and use.knows_change
    return frozenset(name for name, node in tape.parameters.items() if node.uses and all(map(known, node.uses)))


def _slots(use: Use, through: Collection[str]) -> dict[str, str]:
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
            return _each(change, own)

    return make


def _each(function: Callable[[dict[str, Tensor]], Tensor], directions: Directions) -> Tensor:
    """A function of each direction."""
    if len(next(iter(directions.values()))) == 1:
        return function({name: d[0] for name, d in directions.items()})[None]
    return vmap(function)(dict(directions))


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


def is_near(found: Tensor, expected: Tensor) -> bool:
    """Whether one way to compute ``J v`` gives what two backward passes give; the log says where not."""
    difference, size = float((found - expected).norm()), float(expected.norm())
    # far less than one wrong layer of a deep model changes; below single precision rounding hides that
    rounding = torch.finfo(expected.dtype).eps
    agrees = rounding <= torch.finfo(torch.float32).eps and difference <= ROUNDINGS * rounding * size
    if not agrees:
        log.info("J v takes two backward passes: a faster way differs by %.2g of %.2g", difference, size)
    return agrees
