"""``J v`` for any number of directions, in the fastest way that proves right.

`Linearised` differentiates a backward pass: the vectors that arrive at layers are linear in those sent back from the
output, so this takes changes of the layers' outputs, which their rules compute, to the change of the model's; where a
parameter is read otherwise, its gradient is differentiated. `ForwardMode` has dual numbers in place of the parameters,
two thirds of the time for several columns through group or batch norms. The first pass at every shape, and through
other functions, is compared with differentiating all parameters' gradients, and these with a vector that goes back.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vmap

from curvature.functional import TwiceDifferentiable, graph_nodes
from curvature.gradients import Batch, RefuseNewData, batched_vjp, complete_changes
from curvature.linalg import full_precision
from curvature.recording import ModelState, Tape, Use, call_with

log = logging.getLogger("curvature")
ROUNDINGS = 100  # relative difference from two backward passes, in units of rounding
SLOW_TWICE = "GroupNorm", "BatchNorm"  # in the names of their backward functions
# entries of one layer's outputs, over the columns that forward mode takes: what a CPU's cache holds, and elsewhere
CACHED_ENTRIES, ENTRIES = 1 << 21, 1 << 27
Directions = Mapping[str, Tensor]  # (c, *shape) by name


class Linearised:
    """The map from directions of the parameters to changes of an output, by its graph.

    The changes of the parameters in `through` go through the rules of the layers that read them.
    """

    at_once: int | None = None  # for how many directions it is best called; None: for as many as their graph may hold

    def __init__(self, tape: Tape, output: Tensor, through: Collection[str]) -> None:
        self.uses = [(use, _slots(use, through)) for use in tape.uses if _slots(use, through)]
        self.others = [name for name, p in tape.parameters.items() if name not in through and p.tensor.numel()]
        self.probe = torch.zeros_like(output, requires_grad=True)
        wanted: Any = [use.edge for use, _ in self.uses] + [tape.parameters[name].tensor for name in self.others]
        self.graphs: list[Tensor | None] = [None] * len(wanted)  # tensors whose graphs it differentiates
        if wanted:
            options: Any = {"create_graph": True, "allow_unused": True}
            self.graphs = list(torch.autograd.grad(output, wanted, self.probe, **options))

    def __call__(self, directions: Directions) -> Tensor | None:
        """Changes (c, *output.shape); None is zero."""
        sent: list[Tensor] = []
        live: list[Tensor] = []
        makers = [partial(_change_of, use, slots, directions) for use, slots in self.uses]
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
        stand_in: Any = lambda *args, **kwargs: call_with(self.batch.model, parameters, args, kwargs)
        return replace(self.batch, model=stand_in).output()


Way = Linearised | ForwardMode


# By what passes at a shape are known: the number of the way, or None where not even two backward passes are right.
Proved = dict[Any, int | None]


def right_way(batch: Batch, tape: Tape, output: Tensor, proved: Proved) -> Way | None:
    """The fastest of the ways to compute ``J v`` for a recorded pass that are right; None where torch loses a part."""
    functions, explained = tuple(map(type, graph_nodes(output.grad_fn))), _explained(tape)
    graph = partial(Linearised, tape, output)
    ways: list[partial[Any]] = [partial(graph, through) for through in dict.fromkeys((explained, frozenset()))]
    if any(slow in function.__name__ for function in functions for slow in SLOW_TWICE):
        ways.insert(0, partial(ForwardMode, batch, tape, output))
    case = batch.key, functions, explained, len(tape.uses)
    if case in proved:
        number = proved[case]
        return None if number is None else ways[number]()
    proved[case], way = _first_right(batch, output, ways)
    return way


@full_precision()
def _first_right(batch: Batch, output: Tensor, ways: Sequence[partial[Any]]) -> tuple[int | None, Way | None]:
    """The first way, and its number, that agrees with two backward passes through all parameters, as the last does."""
    several = any(make.func is ForwardMode for make in ways)  # it is for these
    directions = random_directions(batch, 2 if several else 1)
    changes = complete_changes([output], batch.parameters, directions)  # first: its graph is then gone
    if changes is None:
        return None, None
    expected = torch.stack([change for (change,) in changes])
    together = {name: torch.stack([d[name] for d in directions]) for name in directions[0]}
    for number, make in enumerate(ways[:-1]):
        try:
            way = make()
            change = way(together)
            if _is_near(torch.zeros_like(expected) if change is None else change, expected):
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


def _change_of(use: Use, slots: Mapping[str, str], directions: Directions) -> Tensor:
    """How the output of a use changes, (c, *its shape)."""
    assert use.rule is not None and use.call is not None
    with torch.no_grad():
        return _each(partial(use.rule.change, use.call), {slot: directions[name] for slot, name in slots.items()})


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


def _is_near(found: Tensor, expected: Tensor) -> bool:
    """Whether one way to compute ``J v`` gives what two backward passes give; the log says where not."""
    difference, size = float((found - expected).norm()), float(expected.norm())
    # far less than one wrong layer of a deep model changes; below single precision rounding hides that
    rounding = torch.finfo(expected.dtype).eps
    agrees = rounding <= torch.finfo(torch.float32).eps and difference <= ROUNDINGS * rounding * size
    if not agrees:
        log.info("J v takes two backward passes: a faster way differs by %.2g of %.2g", difference, size)
    return agrees
