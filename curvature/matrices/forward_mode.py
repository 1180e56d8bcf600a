"""``J v`` in forward mode: dual numbers in place of the parameters.

One forward pass gives the output with its graph and ``J v``, without the two backward passes that this takes otherwise.
But functions may lack a forward derivative, or have a wrong one (in torch 2.13 layer norm's backward pass has), and a
parameter may be read past its module. So the first pass at every shape, and through other functions, is compared with
two backward passes.

Several columns share the numbers that are not dual. Where they pass group or batch norms, whose backward passes take
several times as long to differentiate, this takes two thirds of the time of `Linearised`; elsewhere it takes longer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, jvp, vmap

from curvature.functional import TwiceDifferentiable
from curvature.gradients import Batch, RefuseNewData, record
from curvature.linalg import full_precision
from curvature.matrices.linearised import by_backward_passes, is_near, log, random_directions, stacked
from curvature.recording import ModelState, Tape, capture, graph_functions

SLOW_TWICE = "GroupNorm", "BatchNorm"  # in the names of their backward functions
# entries of one layer's outputs, over the columns that a pass takes: what a CPU's cache holds, and elsewhere
CACHED_ENTRIES, ENTRIES = 1 << 21, 1 << 27
TWO_PASSES = "J v takes two backward passes: %s"
Recorded = tuple[Tape, Any, Tensor | None]  # tape, output and ``J v``, if that is known
# from directions (c, *shape) by name to (c, *output.shape), and the best c
Columns = tuple[Callable[[Mapping[str, Tensor]], Tensor], int]


@dataclass
class ForwardMode:
    """Records forward passes, with ``J v`` where forward mode proved right.

    Attributes:
        proved: keys of plans, with the functions of the graph, for which it did.
        refuted: keys of plans for which it did not.
    """

    proved: set[Any] = field(default_factory=set)
    refuted: set[Any] = field(default_factory=set)

    def record(self, batch: Batch, direction: Mapping[str, Tensor] | None) -> Recorded:
        """A recorded pass; without a direction, or where forward mode is wrong, ``J v`` is None."""
        with TwiceDifferentiable():
            found = None if direction is None else self._along(batch, direction)
            return (*record(batch)[:2], None) if found is None else found

    def columns(self, batch: Batch, tape: Tape, output: Tensor) -> Columns | None:
        """``J v`` for several directions (c, *shape) by name; None where forward mode is no faster, or wrong."""
        functions = graph_functions(output)
        if not any(slow in function.__name__ for function in functions for slow in SLOW_TWICE):
            return None
        case = batch.key, functions, "columns"
        if case in self.refuted:
            return None
        start = tape.start or ModelState(batch.model)

        def changes(directions: Mapping[str, Tensor]) -> Tensor:
            with start.again():
                return _along_columns(batch, directions)

        try:
            directions = [] if case in self.proved else random_directions(batch, 2)
            if not directions or is_near(changes(stacked(directions)), by_backward_passes(batch, output, directions)):
                self.proved.add(case)
                return changes, _columns_at_once(tape, output)
        except Exception as error:
            log.info(TWO_PASSES, str(error).split("\n")[0])
        self.refuted.add(case)
        return None

    def _along(self, batch: Batch, direction: Mapping[str, Tensor]) -> Recorded | None:
        key, start = batch.key, ModelState(batch.model)
        if key in self.refuted:
            return None
        try:
            if any(known == key for known, *_ in self.proved):
                found = along(batch, direction)
                if (key, graph_functions(found[1])) in self.proved:
                    return found
                del found  # the check takes as much memory again
                start.restore()
            with start.again():
                functions = _functions_where_right(batch)
            if functions is not None:
                self.proved.add((key, functions))
                return along(batch, direction)
        except Exception as error:  # the general way follows, and shows what is wrong with the model itself
            log.info(TWO_PASSES, str(error).split("\n")[0])
            start.restore()
        self.refuted.add(key)
        return None


def along(batch: Batch, direction: Mapping[str, Tensor]) -> Recorded:
    """A pass with dual numbers: its tape has no reads, since the model does not meet the parameters themselves."""
    model = batch.model
    with forward_ad.dual_level(), capture(model, batch.parameters) as tape:
        # copies: a model that changes its parameters in place changes what is beside them, too
        duals: Any = {name: forward_ad.make_dual(p, direction[name].clone()) for name, p in batch.parameters.items()}
        stand_in: Any = lambda *args, **kwargs: functional_call(model, duals, args, kwargs)
        output, change = forward_ad.unpack_dual(replace(batch, model=stand_in).output())
    return tape, output, torch.zeros_like(output) if change is None else change.detach()


def _along_columns(batch: Batch, directions: Mapping[str, Tensor]) -> Tensor:
    """``J v`` (c, *output.shape) for directions (c, *shape)."""
    values = {name: p.detach() for name, p in batch.parameters.items()}

    def output(parameters: Mapping[str, Tensor]) -> Tensor:
        stand_in: Any = lambda *args, **kwargs: functional_call(batch.model, dict(parameters), args, kwargs)
        return replace(batch, model=stand_in).output()

    one = lambda direction: jvp(output, (values,), (direction,))[1]
    with torch.no_grad(), TwiceDifferentiable(), RefuseNewData():
        if len(next(iter(directions.values()))) == 1:
            return one({name: d[0] for name, d in directions.items()})[None]
        return vmap(one)(dict(directions))


def _columns_at_once(tape: Tape, output: Tensor) -> int:
    largest = max([output.numel(), *(math.prod(use.shape) for use in tape.uses)])
    return max(1, (CACHED_ENTRIES if output.device.type == "cpu" else ENTRIES) // largest)


@full_precision()
def _functions_where_right(batch: Batch) -> Any:
    """The functions of a pass, if it takes a random direction to where two backward passes take it; else None."""
    (direction,) = random_directions(batch, 1)
    _, output, found = along(batch, direction)
    assert found is not None
    is_right = is_near(found[None], by_backward_passes(batch, output, [direction]))
    return graph_functions(output) if is_right else None
