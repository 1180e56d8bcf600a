"""What the loop's own backward pass brings, for ``inject=empirical()``: backprops at uses, or rows of all parameters.

Both are delivered at the next step, when the scale of the loss is known.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from curvature.gradients import computed_weights
from curvature.preconditioners import BatchFacts
from curvature.recording import ParameterNode, Tape, warn_once
from optimizers.distributed.team import Team
from optimizers.recording.backward_passes import Measured, Passes, is_batched, is_training
from optimizers.recording.loss_graph import Source, find_edges
from optimizers.recording.loss_masses import Division, SampleFactors
from optimizers.recording.model_outputs import OutputScale, regular, samples_first, squares_along

SEVERAL = (
    "empirical(): samples count differently in what goes back from the model's outputs, and there are several: assumed "
    "that all samples count alike; inject=isotropic() needs no loss"
)
SHARED_UNIT = 256.0  # of rows that several processes with batches of different sizes share


@dataclass(frozen=True)
class RecordedPass:
    """A recorded forward pass, and the tensors that its loss is made of."""

    tape: Tape
    outputs: Sequence[Tensor]
    count: int  # of samples
    signs: Callable[[], Tensor]  # draws a random one (count,) for each sample
    displacement: Mapping[str, Tensor]  # the last one


class LossBackprops:
    """Listens to the training loop's backward pass; `loss` is that which the optimizer was given, or None."""

    has_arrived: bool  # whether `deliver` has something to measure

    def __init__(self, store: Any, passes: Passes, team: Team, loss: Any) -> None:
        self.store, self.passes, self.team, self.factors = store, passes, team, SampleFactors(loss)
        self.division = Division()
        self.discard()

    def listen(self, found: RecordedPass) -> None:
        """Register hooks on a recorded pass."""
        raise NotImplementedError

    def deliver(self, scale: Callable[[], float]) -> None:
        """Measure what has arrived; `scale` is what the loss was multiplied by, asked for only if something has."""
        raise NotImplementedError

    def discard(self) -> None:
        """Forget the passes since the last step."""
        self.kept: list[Any] = []  # passes, until the next step: what is on their own graph would hold them for ever
        self._forget()

    def _forget(self) -> None:
        """Forget what has arrived."""
        self.division.forget()
        self.has_arrived, self.total = False, self.passes.total  # to which what arrives will be added


@dataclass
class Arrived:
    """What the loop's backward pass has brought to a recorded pass so far."""

    found: RecordedPass
    backprops: list[Tensor | None]  # at every use
    squares: Tensor  # `squares_along` of the outputs, as the loss is scaled
    # sums over samples, each with a random sign, of the gradients of parameters from which a tensor was computed that
    # data met; by that tensor
    computed: dict[ParameterNode, Mapping[str, Tensor]] = field(default_factory=dict)
    # gradients of the batch, of parameters that no function with a rule reads together with data
    whole: dict[str, Tensor] = field(default_factory=dict)
    factor: float | Tensor | None = None  # see `SampleFactors`, of all samples; None before a gradient is at an output
    measured: object = None  # since when the gradient was sent back once more, with factors that differ

    def clear(self) -> None:
        self.backprops[:] = [None] * len(self.backprops)
        self.computed.clear()
        self.whole.clear()
        self.squares = torch.zeros_like(self.squares)
        self.factor = None


class LayerBackprops(LossBackprops):
    """Keeps the backprop at every use."""

    is_measuring = False

    def listen(self, found: RecordedPass) -> None:
        tape = found.tape
        zero = next(iter(tape.parameters.values())).tensor.new_zeros((), dtype=torch.float32)
        # hooks on the graph hold no part of it
        arrival = Arrived(replace(found, outputs=()), [None] * len(tape.uses), zero)
        tape.losses.clear()
        tape.reductions.clear()
        computed = computed_weights(tape)
        behind = {name for node in computed for name in node.names}
        signs = found.signs() if computed else torch.ones(0, device="cpu")
        me = weakref.ref(arrival)  # held by the hooks on the graph of the outputs, and gone with it
        nodes = [*computed, *(tape.parameters[name] for name in behind)]
        hooks = [(node.tensor, partial(self._at_computed, me, weakref.ref(node), signs)) for node in nodes]
        hooks += [(tape.parameters[k].tensor, partial(self._at_whole, me, k)) for k in _whole(tape) - behind]
        for x, hook in hooks:
            weakref.finalize(arrival, x.register_hook(hook).remove)
        held = {id(node.tensor) for use in tape.uses for node in use.results}
        places = [None if use.edge is None else Source.of(use.edge) for use in tape.uses]
        for x in found.outputs:
            if x.is_leaf or id(x) in held:  # the tape would hold its own graph
                self.kept.append(arrival)
            else:
                own = [Source.of(x), *places] if len(found.outputs) == 1 else [Source.of(x)]
                x.register_hook(partial(self._at_output, arrival, own, x.detach()))
        for use in tape.uses:
            if use.edge is not None and not use.results:  # the graph of a computed weight is held by the tape
                use.edge.node.register_prehook(partial(self._at_use, arrival, use.index, use.edge.output_nr))
                use.edge = use.edge._replace(node=None)  # type: ignore[arg-type]  # the node holds the tape by its hook

    def _at_output(self, arrival: Arrived, places: Sequence[Source | None], output: Tensor, gradient: Tensor) -> None:
        """At an output, the first of the places; those of all uses follow, if there is no other output."""
        if self.is_measuring or not _counts(gradient, arrival.found.tape):
            return
        self.passes.note_backward(_parameters(arrival.found.tape))
        self._begin()
        factor = self.factors.of(places[0], output, gradient, arrival.found.count)
        self.division.note(arrival if len(places) > 1 else None, places[0], output, gradient)
        if isinstance(factor, Tensor) and factor.ndim and len(places) > 1 and arrival.measured is not self.since:
            self._measure(arrival, find_edges(places), output, gradient, factor)
            return
        # what goes back from several outputs has one factor for all samples of all
        before = arrival.factor
        if isinstance(factor, Tensor) and factor.ndim or before is not None and bool(factor != before):
            warn_once(SEVERAL, logger="optimizers")
            factor = float(arrival.found.count)
        arrival.factor = factor
        found = squares_along(regular(output), regular(gradient))
        arrival.squares = arrival.squares + found.to(arrival.squares.device)

    def _measure(
        self, arrival: Arrived, edges: Sequence[GradientEdge | None], output: Tensor, gradient: Tensor, factor: Tensor
    ) -> None:
        """Send the gradient back once more, times a factor of each sample, whose place in backprops is not known."""
        found, batch, tape = arrival.found, self._facts(arrival), arrival.found.tape
        each = factor.to(gradient.device) * found.signs().to(gradient.device)
        rows = each.repeat_interleave(len(gradient) // found.count).reshape(-1, *[1] * (gradient.ndim - 1))
        vectors = (_widened(gradient) * rows).to(gradient.dtype)
        self.is_measuring = True  # what goes back now passes the hooks, too
        before = [use.edge for use in tape.uses]
        for use, edge in zip(tape.uses, edges[1:], strict=True):
            use.edge = edge
        try:
            with torch.autocast(gradient.device.type, enabled=False):
                measured = self.store.measure(tape, cast("list[Tensor]", edges[:1]), [vectors[None]], batch)
        finally:
            self.is_measuring = False
            for use, edge in zip(tape.uses, before, strict=True):
                use.edge = edge
        both = (samples_first(regular(x), found.count) for x in (output, vectors))
        self.measured.append(Measured(measured, OutputScale.in_metric(squares_along(*both), found.count)))
        arrival.measured, self.has_arrived = self.since, True

    def _at_use(self, arrival: Arrived, index: int, number: int, gradients: Sequence[Tensor]) -> None:
        if self.is_measuring or arrival.measured is self.since:
            return
        if gradients[number] is not None and _counts(gradients[number], arrival.found.tape):
            self._note(arrival)
            b, before = _widened(gradients[number]), arrival.backprops[index]
            b = b.reshape(arrival.found.tape.uses[index].shape)
            arrival.backprops[index] = b if before is None else before + b

    def _at_computed(
        self, arrival: weakref.ref[Arrived], node: weakref.ref[ParameterNode], signs: Tensor, gradient: Tensor
    ) -> None:
        """The readers of the tensor have got their backprops, and the graph behind it is still there."""
        own, read = arrival(), node()
        if own is None or read is None or own.measured is self.since or self.is_measuring or is_batched(gradient):
            return
        self.is_measuring = True  # what goes back now passes here, too
        try:
            own.computed[read] = self.store.weighted_gradients(own.found.tape, read, own.backprops, signs)
        finally:
            self.is_measuring = False

    def _at_whole(self, arrival: weakref.ref[Arrived], name: str, gradient: Tensor) -> None:
        own = arrival()
        if own is not None and own.measured is not self.since and not self.is_measuring and not is_batched(gradient):
            g = _widened(gradient)
            self._note(own)
            own.whole[name] = own.whole[name] + g if name in own.whole else g

    def _begin(self) -> None:
        """A gradient arrives: forget what belongs to gradients that were zeroed."""
        self.passes.begin()
        if self.passes.total is not self.total:
            for own in self.arrived:
                own.clear()
            self._forget()

    def _note(self, arrival: Arrived) -> None:
        self._begin()
        self.has_arrived = True
        if not any(arrival is own for own in self.arrived):
            self.arrived.append(arrival)

    def _facts(self, arrival: Arrived) -> BatchFacts:
        found, processes = arrival.found, self.team.current().processes
        return BatchFacts(found.count, processes.rank, processes.size, found.displacement)

    def deliver(self, scale: Callable[[], float]) -> None:
        # passes that were measured before the scale was known are rescaled, and others with them
        unit = 1.0 if self.measured or not self.arrived else self.division.unit(scale())
        for own in self.arrived:
            each = (self.factors.usual(own.found.count) if own.factor is None else own.factor) / unit
            times = partial(_times, each)
            backprops = [None if b is None else times(b) for b in own.backprops]
            whole = dict(own.whole)
            for name, g in (pair for sums in own.computed.values() for pair in sums.items()):
                whole[name] = whole[name] + g if name in whole else g
            whole = {name: times(g) for name, g in whole.items()}
            measured = self.store.measure_backprops(own.found.tape, backprops, whole, self._facts(own))
            size = OutputScale.in_metric(times(times(own.squares)), own.found.count)
            self.passes.total.add_(Measured(measured, size))
        for sent in self.measured:
            self.passes.total.add_(sent)
        if self.measured and (rest := 1 / self.division.unit(scale())) != 1:
            self.passes.total.scale_vectors_(rest)
        self.discard()

    def _forget(self) -> None:
        super()._forget()
        self.since = object()
        self.arrived: list[Arrived] = []
        self.measured: list[Measured] = []  # of samples that count differently, as the loss is scaled


def _counts(gradient: Tensor, tape: Tape) -> bool:
    """Whether a gradient is of the loss, and not of outputs by inputs."""
    return not is_batched(gradient) and is_training(_parameters(tape))


def _parameters(tape: Tape) -> list[Tensor]:
    return [node.tensor for node in tape.parameters.values()]


def _times(factor: float | Tensor, x: Tensor) -> Tensor:
    return x * (factor.to(x) if isinstance(factor, Tensor) else factor)


def _widened(gradient: Tensor) -> Tensor:
    """Scaled or not, single precision does not overflow."""
    return gradient.detach().to(torch.promote_types(gradient.dtype, torch.float32))


def _whole(tape: Tape) -> set[str]:
    """Names of the parameters that no function with a rule reads together with data, or that another one reads too."""
    reads = [use for use in tape.uses if not use.results]
    known = {name for use in reads if use.edge is not None and use.shape for name in use.names}
    unknown = {name for use in reads if use.edge is None or not use.shape for name in use.names}
    return tape.parameters.keys() - known | unknown


class LossRows(LossBackprops):
    """Sends the gradient of the loss at the output back once more, sample by sample, as soon as it arrives there."""

    def _forget(self) -> None:
        super()._forget()
        self.unit = 1.0  # what the rows are multiplied by so far
        self.is_sum = False  # whether the loop's loss turned out to be a sum, which nobody has told the store

    def listen(self, found: RecordedPass) -> None:
        each = self.factors.usual(found.count)
        unit = each if self.team.current().processes.size == 1 else SHARED_UNIT
        self.kept.append(found)
        handles: list[Any] = []
        for k, x in enumerate(found.outputs):
            hook = partial(self._at_output, weakref.ref(found), k, Source.of(x), unit, handles)
            handles.append(x.register_hook(hook))

    def _at_output(
        self, waiting: weakref.ref[RecordedPass], index: int, source: Source | None, unit: float, handles: list[Any],
        gradient: Tensor | None,
    ) -> None:  # fmt: skip
        found = waiting()
        if gradient is None or found is None or not _counts(gradient, found.tape):
            return
        handles[index].remove()  # what goes back now passes here too
        factor = self.factors.of(source, found.outputs[index], gradient, found.count)
        self.passes.note_backward(_parameters(found.tape))
        self.passes.begin()
        if self.passes.total is not self.total:
            self._forget()
        part = found if len(found.outputs) == 1 else None
        self.division.note(part, source, found.outputs[index], gradient)
        if not self.has_arrived:
            self.unit, self.has_arrived = unit, True
        self.is_sum |= found.count > 1 and not self.store.is_sum and isinstance(factor, float) and factor == 1
        with torch.enable_grad():
            output = samples_first(regular(found.outputs[index]), found.count)
        rows, each = samples_first(regular(gradient), found.count), factor / self.unit
        if isinstance(each, Tensor):
            each = each.to(rows.device, rows.dtype).reshape(-1, *[1] * (rows.ndim - 1))
        vectors = (rows * each).detach()[None]
        with torch.autocast(gradient.device.type, enabled=False):
            measured = self.store.measure(found.tape, [output], [vectors], BatchFacts(found.count))
        sums = OutputScale.in_metric(squares_along(output, vectors[0]), found.count)
        self.passes.total.add_(Measured(measured, sums))

    def deliver(self, scale: Callable[[], float]) -> None:
        if self.has_arrived:  # only now: times the scale of the loss it may be too much for float16
            rows = self.passes.total.curvature.rows
            samples = rows.samples if rows is not None and self.is_sum else 1
            self.passes.total.scale_vectors_(samples**0.5 * self.unit / self.division.unit(scale()))
        self.discard()
