"""``J v`` in forward mode: dual numbers in place of the parameters.

One forward pass gives the output with its graph and ``J v``, without the two backward passes that this takes otherwise.
But functions may lack a forward derivative, or have a wrong one (in torch 2.13 layer norm's backward pass has), and a
parameter may be read past its module. So the first pass at every shape, and through other functions, is compared with
two backward passes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call

from curvature.functional import TwiceDifferentiable
from curvature.gradients import Batch, output_changes, plan_key, record
from curvature.linalg import full_precision
from curvature.recording import Tape, capture, graph_functions

log = logging.getLogger("curvature")
ROUNDINGS = 100  # relative difference from two backward passes, in units of rounding
Recorded = tuple[Tape, Any, Tensor | None]  # tape, output and ``J v``, if that is known


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
            return (*record(batch), None) if found is None else found

    def _along(self, batch: Batch, direction: Mapping[str, Tensor]) -> Recorded | None:
        key = plan_key(batch)
        if key in self.refuted:
            return None
        try:
            found = along(batch, direction)
            case = key, graph_functions(found[1])
            if case in self.proved or _agrees(batch):
                self.proved.add(case)
                return found
        except Exception as error:  # the general way follows, and shows what is wrong with the model itself
            log.info("J v takes two backward passes: %s", str(error).split("\n")[0])
        self.refuted.add(key)
        return None


def along(batch: Batch, direction: Mapping[str, Tensor]) -> Recorded:
    """A pass with dual numbers: its tape has no reads, since the model does not meet the parameters themselves."""
    model = batch.model
    with forward_ad.dual_level(), capture(model) as tape:
        duals: Any = {name: forward_ad.make_dual(p, direction[name]) for name, p in batch.parameters.items()}
        stand_in: Any = lambda *args, **kwargs: functional_call(model, duals, args, kwargs)
        output, change = forward_ad.unpack_dual(replace(batch, model=stand_in).output())
    return tape, output, torch.zeros_like(output) if change is None else change.detach()


@full_precision()
def _agrees(batch: Batch) -> bool:
    """Whether forward mode gives what two backward passes give, in a random direction."""
    drawn = torch.Generator().manual_seed(0)
    direction = {
        name: torch.randn(p.shape, generator=drawn, dtype=torch.float64, device="cpu").to(p)
        for name, p in batch.parameters.items()
    }
    _, output, found = along(batch, direction)
    ((expected,),) = output_changes([output], batch.parameters, [direction])
    assert found is not None
    difference, size = float((found - expected).norm()), float(expected.norm())
    # far less than one wrong layer of a deep model changes; below single precision rounding hides that
    rounding = torch.finfo(output.dtype).eps
    agrees = rounding <= torch.finfo(torch.float32).eps and difference <= ROUNDINGS * rounding * size
    if not agrees:
        log.info("J v takes two backward passes: torch's forward mode differs by %.2g of %.2g", difference, size)
    return agrees
