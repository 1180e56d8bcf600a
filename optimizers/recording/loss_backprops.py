"""What the training loop's own backward pass brings, for ``inject=empirical()``.

Two forms of one thing: backprops at every use for curvature layer by layer, rows for that of all parameters together.
Both listen to a recorded pass, and deliver at the next step, when the scale of the loss is known.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from curvature import Tape
from curvature.preconditioners import BlockDiagonalCurvature, FullCurvature
from optimizers.distributed.team import Teams
from optimizers.recording.backward_passes import Measured, Passes
from optimizers.recording.model_outputs import samples_first
from optimizers.recording.output_scale import Sums

SHARED_UNIT = 256.0  # of rows that several processes with batches of different sizes share


@dataclass(frozen=True)
class RecordedPass:
    """A recorded forward pass over `count` samples, the tensors that its loss is made of, and their sizes."""

    tape: Tape
    outputs: Sequence[Tensor]
    output_sums: Sums
    count: int


class LossBackprops(Protocol):
    """Listens to the training loop's backward pass."""

    def listen(self, found: RecordedPass) -> None:
        """Register hooks on a recorded pass."""

    def deliver(self, scale: Callable[[], float]) -> None:
        """Measure what has arrived; `scale` is what the loss was multiplied by, asked for only if something has."""

    def zero(self) -> None:
        """Gradients are zeroed: what has arrived belongs to none."""

    def discard(self) -> None:
        """Forget the passes since the last step."""

    @property
    def has_arrived(self) -> bool:
        """Whether `deliver` has something to measure."""


class LayerBackprops:
    """Keeps the backprop at every use.

    Args:
        store: measures them.
        passes: takes the result.
        roster: the processes that train the model.
        is_sum: whether the loss is a sum over the batch, not a mean.
    """

    def __init__(self, store: BlockDiagonalCurvature, passes: Passes, teams: Teams, is_sum: bool) -> None:
        self.store, self.passes, self.teams, self.is_sum = store, passes, teams, is_sum
        self.arrived: list[tuple[RecordedPass, list[Tensor | None]]] = []

    def listen(self, found: RecordedPass) -> None:
        tape = found.tape
        backprops: list[Tensor | None] = [None] * len(tape.uses)
        arrival = (replace(found, outputs=()), backprops)  # the graph of the outputs holds what its hooks hold

        def keep(index: int, number: int) -> Callable[[Sequence[Tensor]], None]:
            def hook(gradients: Sequence[Tensor]) -> None:
                if gradients[number] is not None:
                    if not any(backprops is own for _, own in self.arrived):
                        self.arrived.append(arrival)
                    b = gradients[number].detach().reshape(tape.uses[index].shape)
                    # scaled or not, single precision does not overflow
                    backprops[index] = b.to(torch.promote_types(b.dtype, torch.float32))

            return hook

        for use in tape.uses:
            if use.edge is not None:
                use.edge.node.register_prehook(keep(use.index, use.edge.output_nr))
                use.edge = use.edge._replace(node=None)  # type: ignore[arg-type]  # the node holds the tape by its hook

    def deliver(self, scale: Callable[[], float]) -> None:
        processes = self.teams.current().processes
        for found, backprops in self.arrived:
            each = (1 if self.is_sum else found.count) / scale()
            own = [None if b is None else b.mul_(each) for b in backprops]
            measured = self.store.measure_backprops(found.tape, own, found.count, processes.rank, processes.size)
            self.passes.total.add_(Measured(measured, found.output_sums))
        self.arrived.clear()

    def zero(self) -> None:
        for _, backprops in self.arrived:
            backprops[:] = [None] * len(backprops)

    def discard(self) -> None:
        self.arrived.clear()

    @property
    def has_arrived(self) -> bool:
        return bool(self.arrived)


class LossRows:
    """Sends the gradient of the loss at the output back once more, sample by sample, as soon as it arrives there.

    Args:
        store: measures the rows.
        passes: takes the result.
        roster: the processes that train the model.
        is_sum: whether the loss is a sum over the batch, not a mean.
    """

    def __init__(self, store: FullCurvature, passes: Passes, teams: Teams, is_sum: bool) -> None:
        self.store, self.passes, self.teams, self.is_sum = store, passes, teams, is_sum
        self.waiting: list[RecordedPass] = []
        self.unit: float | None = None  # what the rows are multiplied by so far; None before the first

    def listen(self, found: RecordedPass) -> None:
        if len(found.outputs) != 1:
            raise ValueError(
                "inject: rows of empirical() need a model that returns one tensor, or gives a loss function of torch "
                f"one, found {len(found.outputs)}; return the output, and use isotropic() if there are several"
            )
        each = 1.0 if self.is_sum else float(found.count)
        unit = each if self.teams.current().processes.size == 1 else SHARED_UNIT
        self.waiting.append(found)  # until the next step; its own graph would hold it for ever
        waiting = weakref.ref(found)

        def sent(gradient: Tensor) -> None:
            handle.remove()  # what goes back now passes here too
            own = waiting()
            if own is not None:
                self._measure(own, gradient, each, unit)

        handle = found.outputs[0].register_hook(sent)

    def _measure(self, found: RecordedPass, gradient: Tensor, each: float, unit: float) -> None:
        self.passes.begin(self.teams.discard)
        if self.unit is None:
            self.unit = unit
        with torch.enable_grad():
            output = samples_first(found.outputs[0], found.count)
        vectors = samples_first(gradient * (each / self.unit), found.count).detach()[None]
        with torch.autocast(gradient.device.type, enabled=False):
            measured = self.store.measure(found.tape, [output], [vectors], found.count)
        self.passes.total.add_(Measured(measured, found.output_sums))

    def deliver(self, scale: Callable[[], float]) -> None:
        if self.unit is not None:  # only now: times the scale of the loss it may be too much for float16
            self.passes.total.curvature.scale_vectors_(self.unit / scale())
        self.discard()

    def zero(self) -> None:
        pass

    def discard(self) -> None:
        self.waiting.clear()
        self.unit = None

    @property
    def has_arrived(self) -> bool:
        return self.unit is not None
