"""``J v`` for any number of directions, in the faster way that proves right.

`gradients.Linearised` differentiates a backward pass. `ForwardMode` has dual numbers in place of the parameters, which
takes 0.65 to 0.9 of the time for several columns through group or batch norms. The first pass at every shape, and
through other functions, is checked: backward passes with a vector that goes back, and forward mode with them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import jvp, vmap

from curvature.attempts import attempt
from curvature.functional import TwiceDifferentiable, graph_nodes
from curvature.gradients import Batch, Linearised, RefuseNewData, complete_changes
from curvature.linalg import full_precision
from curvature.recording import ModelState, Tape, call_with

log = logging.getLogger("curvature")
ROUNDINGS = 100  # relative difference from two backward passes, in units of rounding
SLOW_TWICE = "GroupNorm", "BatchNorm"  # in the names of their backward functions
# entries of one layer's outputs, over the columns that forward mode takes: what a CPU's cache holds, and elsewhere
CACHED_ENTRIES, ENTRIES = 1 << 21, 1 << 27
Directions = Mapping[str, Tensor]  # (c, *shape) by name


class ForwardMode:
    """The same by a forward pass of the model with dual numbers, whose columns share the numbers that are not dual."""

    def __init__(self, batch: Batch, tape: Tape, output: Tensor) -> None:
        self.batch, self.start = batch, tape.start or ModelState(batch.model)
        largest = max([output.numel(), *(math.prod(use.shape) for use in tape.uses)])
        self.at_once = max(1, (CACHED_ENTRIES if output.device.type == "cpu" else ENTRIES) // largest)

    def __call__(self, directions: Directions) -> list[Tensor]:
        values = {name: p.detach() for name, p in self.batch.parameters.items()}
        one = lambda direction: jvp(self._output, (values,), (direction,))[1]
        with self.start.again(), torch.no_grad(), TwiceDifferentiable(), RefuseNewData():
            return [_each(one, directions)]

    def _output(self, parameters: Mapping[str, Tensor]) -> Tensor:
        stand_in: Any = lambda *args, **kwargs: call_with(self.batch.model, parameters, args, kwargs)
        return replace(self.batch, model=stand_in).output()


Way = Linearised | ForwardMode


# By what passes at a shape are known: the way, or None where not even two backward passes are right.
Proved = dict[Any, type[Way] | None]


def right_way(batch: Batch, tape: Tape, output: Tensor, proved: Proved) -> Way | None:
    """The faster of the ways to compute ``J v`` for a recorded pass that are right; None where torch loses a part."""
    functions = tuple(map(type, graph_nodes(output.grad_fn)))
    case = batch.key, functions, len(tape.uses)
    if case not in proved:
        proved[case] = _fastest_right(batch, tape, output, functions)
    kind = proved[case]
    if kind is ForwardMode:
        return ForwardMode(batch, tape, output)
    parameters = {name: node.tensor for name, node in tape.parameters.items()}
    return None if kind is None else Linearised([output], parameters)


@full_precision()
def _fastest_right(batch: Batch, tape: Tape, output: Tensor, functions: tuple[type, ...]) -> type[Way] | None:
    """The fastest way whose changes along random directions are right."""
    has_norms = any(slow in function.__name__ for function in functions for slow in SLOW_TWICE)
    forward = ForwardMode(batch, tape, output) if has_norms else None
    if forward is not None and forward.at_once == 1:  # slower: every column computes the values of the pass anew
        forward = None
    directions = random_directions(batch, 1 if forward is None else 2)
    changes = complete_changes([output], batch.parameters, directions)
    if changes is None or forward is None:
        return None if changes is None else Linearised
    expected = torch.stack([change for (change,) in changes])
    along = {name: torch.stack([d[name] for d in directions]) for name in directions[0]}
    change = attempt(lambda: forward(along), "J v takes two backward passes")  # some functions have no other
    return ForwardMode if change is not None and _is_near(change[0], expected) else Linearised


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


def _is_near(change: Tensor, expected: Tensor) -> bool:
    """Whether forward mode gives what two backward passes give; the log says where not."""
    difference, size = float((change - expected).norm()), float(expected.norm())
    # far less than one wrong layer of a deep model changes; below single precision rounding hides that
    rounding = torch.finfo(expected.dtype).eps
    agrees = rounding <= torch.finfo(torch.float32).eps and difference <= ROUNDINGS * rounding * size
    if not agrees:
        log.info("J v takes two backward passes: forward mode differs by %.2g of %.2g", difference, size)
    return agrees
