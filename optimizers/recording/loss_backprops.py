"""What the loop's own backward pass brings, for ``inject=empirical()``: backprops at uses, or rows of all parameters.

Both are delivered at the next step, when the scale of the loss is known.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from curvature.gradients import computed_weights
from curvature.preconditioners import BatchFacts
from curvature.recording import ParameterNode, Tape, warn_once
from optimizers.distributed.team import Team
from optimizers.recording.backward_passes import Measured, Passes, is_batched, is_training
from optimizers.recording.loss_graph import Source, edges_here, read_loss
from optimizers.recording.loss_masses import Division, SampleFactors
from optimizers.recording.model_outputs import OutputScale, regular, samples_first, squares_along

SEVERAL = (
    "empirical(): samples count differently in what goes back from the model's outputs, and there are several: assumed "
    "that all samples count alike; inject=isotropic() needs no loss"
)
SHARED_UNIT = 256.0  # of rows that several processes with batches of different sizes share


@dataclass(frozen=True, eq=False)
class RecordedPass:
    """A recorded forward pass, and the tensors that its loss is made of."""

    tape: Tape
    outputs: Sequence[Tensor]
    batch: BatchFacts
    signs: Callable[[], Tensor]  # draws a random one for each sample


class LossBackprops:
    """Listens to the training loop's backward pass; `loss` is that which the optimizer was given, or None."""

    arrived: dict[RecordedPass, Any]  # what the loop's backward pass has brought so far

    def __init__(self, store: Any, passes: Passes, team: Team, loss: Any) -> None:
        self.store, self.passes, self.team, self.factors = store, passes, team, SampleFactors(loss)
        self.division, self.is_sending = Division(), False
        self.discard()

    def listen(self, found: RecordedPass) -> None:
        """Register hooks on a recorded pass."""
        raise NotImplementedError

    def measured(self, unit: float) -> Iterator[Measured]:
        """What has arrived, by pass; `unit` is what the loss of each was multiplied by."""
        raise NotImplementedError

    def deliver(self, scale: Callable[[], float]) -> None:
        """Measure what has arrived; `scale` is what the loss was multiplied by, asked for only if something has."""
        if self.arrived:
            for each in self.measured(self.division.unit(scale())):
                self.passes.total.add_(each)
        self.discard()

    def discard(self) -> None:
        """Forget the passes since the last step."""
        self.kept: list[RecordedPass] = []  # until the next step: what is on their own graph would hold them for ever
        self._forget()

    def _forget(self) -> None:
        """Forget what has arrived."""
        self.division.forget()
        self.arrived, self.total = {}, self.passes.total  # to which what arrives will be added

    def _begin(self, found: RecordedPass) -> None:
        """A gradient arrives: forget what belongs to gradients that were zeroed, or that the loss is made of."""
        last, was_added = self.passes.backward, self.passes.adds
        self.passes.note_backward(_parameters(found.tape))
        self.passes.begin()
        if self.passes.total is not self.total:
            self._forget()
        elif self.passes.backward != last and self.passes.adds and not was_added:
            self.arrived.pop(found, None)

    @contextmanager
    def _sending(self, device: torch.device) -> Iterator[None]:
        """What goes back now passes the hooks, too, and is no gradient of the loop's."""
        self.is_sending = True
        try:
            with torch.autocast(device.type, enabled=False):
                yield
        finally:
            self.is_sending = False


@dataclass
class Arrived:
    """What the loop's backward pass has brought to a recorded pass so far."""

    backprops: list[Tensor | None]  # at every use
    squares: Tensor  # `squares_along` of the outputs, as the loss is scaled
    # by parameter, sums over samples of the gradients through tensors that were computed from it and that data met,
    # each sample with a random sign; None: the gradients of the batch, where no function with a rule reads it with data
    whole: dict[tuple[ParameterNode | None, str], Tensor] = field(default_factory=dict)
    factor: float | Tensor | None = None  # see `SampleFactors`, of all samples; None before a gradient is at an output
    measured: Measured | None = None  # of the gradient, sent back once more with factors that differ


class LayerBackprops(LossBackprops):
    """Keeps the backprop at every use."""

    def listen(self, found: RecordedPass) -> None:
        tape, outputs = found.tape, found.outputs
        found = replace(found, outputs=())  # hooks on the graph hold no part of it
        tape.losses.clear()
        tape.reductions.clear()
        computed = computed_weights(tape)
        behind = {name for node in computed for name in node.names}
        signs = found.signs() if computed else torch.ones(0, device="cpu")
        me = weakref.ref(found)  # held by the hooks on the graph of the outputs, and gone with it
        nodes = [*computed, *(tape.parameters[name] for name in behind)]
        hooks = [(node.tensor, partial(self._at_computed, me, weakref.ref(node), signs)) for node in nodes]
        hooks += [(tape.parameters[k].tensor, partial(self._at_whole, me, k)) for k in _whole(tape) - behind]
        for x, hook in hooks:
            weakref.finalize(found, x.register_hook(hook).remove)
        held = {id(node.tensor) for use in tape.uses for node in use.results}
        places = [None if use.edge is None else Source.of(use.edge) for use in tape.uses]
        for x in outputs:
            if x.is_leaf or id(x) in held:  # the tape would hold its own graph
                self.kept.append(found)
            else:
                x.register_hook(partial(self._at_output, found, Source.of(x), places, x.detach(), len(outputs) == 1))
        for use in tape.uses:
            if use.edge is not None and not use.results:  # the graph of a computed weight is held by the tape
                use.edge.node.register_prehook(partial(self._at_use, found, use.index, use.edge.output_nr))
                use.edge = use.edge._replace(node=None)  # type: ignore[arg-type]  # the node holds the tape by its hook

    def _at_output(
        self, found: RecordedPass, source: Source | None, places: Sequence[Source | None], output: Tensor,
        is_only: bool, gradient: Tensor,
    ) -> None:  # fmt: skip
        """At an output; `places` are those of the uses, to which the gradient goes next."""
        if self.is_sending or not _counts(gradient, found.tape):
            return
        self._begin(found)
        reading = read_loss(source)
        factor = self.factors.of(reading, output, gradient, found.batch.count)
        self.division.note(found if is_only else None, reading, output, gradient)
        own = self._arrived(found)
        if isinstance(factor, Tensor) and factor.ndim and is_only and own.measured is None:
            own.measured = self._measured_again(found, [source, *places], output, gradient, factor)
            return
        # what goes back from several outputs has one factor for all samples of all
        if isinstance(factor, Tensor) and factor.ndim or own.factor is not None and bool(factor != own.factor):
            warn_once(SEVERAL, logger="optimizers")
            factor = float(found.batch.count)
        own.factor = factor
        own.squares = own.squares + squares_along(regular(output), regular(gradient)).to(own.squares.device)

    def _measured_again(
        self, found: RecordedPass, places: Sequence[Source | None], output: Tensor, gradient: Tensor, factor: Tensor
    ) -> Measured:
        """Of the gradient times a factor of each sample, whose place in backprops is not known."""
        each = factor.to(gradient.device) * found.signs().to(gradient.device)
        rows = each.repeat_interleave(len(gradient) // found.batch.count).reshape(-1, *[1] * (gradient.ndim - 1))
        vectors = (_widened(gradient) * rows).to(gradient.dtype)
        here, *edges = edges_here(places)
        before = [use.edge for use in found.tape.uses]
        for use, edge in zip(found.tape.uses, edges, strict=True):
            use.edge = edge
        try:
            with self._sending(vectors.device):
                measured = self.store.measure(found.tape, [here], [vectors[None]], found.batch)
        finally:
            for use, edge in zip(found.tape.uses, before, strict=True):
                use.edge = edge
        both = (samples_first(regular(x), found.batch.count) for x in (output, vectors))
        return Measured(measured, OutputScale.in_metric(squares_along(*both), found.batch.count))

    def _arrived(self, found: RecordedPass) -> Arrived:
        if found not in self.arrived:
            zero = _parameters(found.tape)[0].new_zeros((), dtype=torch.float32)
            self.arrived[found] = Arrived([None] * len(found.tape.uses), zero)
        return self.arrived[found]

    def _takes(self, found: RecordedPass, gradient: Tensor | None) -> bool:
        """Whether a gradient counts, and its pass has not been measured when it was at the output."""
        is_measured = found in self.arrived and self.arrived[found].measured is not None
        return not self.is_sending and not is_measured and _counts(gradient, found.tape)

    def _at_use(self, found: RecordedPass, index: int, number: int, gradients: Sequence[Tensor]) -> None:
        if self._takes(found, gradients[number]):
            self._begin(found)
            backprops = self._arrived(found).backprops
            b, before = _widened(gradients[number]).reshape(found.tape.uses[index].shape), backprops[index]
            backprops[index] = b if before is None else before + b

    def _at_computed(
        self, waiting: weakref.ref[RecordedPass], node: weakref.ref[ParameterNode], signs: Tensor, gradient: Tensor
    ) -> None:
        """The readers of the tensor have got their backprops, and the graph behind it is still there."""
        found, read = waiting(), node()
        if found is not None and read is not None and self._takes(found, gradient):
            own = self._arrived(found)
            with self._sending(gradient.device):
                sums = self.store.weighted_gradients(found.tape, read, own.backprops, signs)
            own.whole |= {(read, name): g for name, g in sums.items()}

    def _at_whole(self, waiting: weakref.ref[RecordedPass], name: str, gradient: Tensor) -> None:
        found = waiting()
        if found is not None and self._takes(found, gradient):
            self._begin(found)
            key, g, whole = (None, name), _widened(gradient), self._arrived(found).whole
            whole[key] = whole[key] + g if key in whole else g

    def measured(self, unit: float) -> Iterator[Measured]:
        for found, own in self.arrived.items():
            if own.measured is not None:
                own.measured.scale_vectors_(1 / unit)
                yield own.measured
                continue
            each = self.factors.usual(found.batch.count) if own.factor is None else own.factor
            times = partial(_times, each / unit)
            backprops = [None if b is None else times(b) for b in own.backprops]
            whole: dict[str, Tensor] = {}
            for (_, name), g in own.whole.items():
                whole[name] = whole[name] + times(g) if name in whole else times(g)
            measured = self.store.measure_backprops(found.tape, backprops, whole, found.batch)
            yield Measured(measured, OutputScale.in_metric(times(times(own.squares)), found.batch.count))


def _counts(gradient: Tensor | None, tape: Tape) -> bool:
    """Whether a gradient is of the loss, and not of outputs by inputs."""
    return gradient is not None and not is_batched(gradient) and is_training(_parameters(tape))


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

    unit = 1.0  # what the rows are multiplied by so far
    is_sum = False  # whether the loop's loss turned out to be a sum, which nobody has told the store

    def _forget(self) -> None:
        super()._forget()
        self.passed: dict[tuple[RecordedPass, int], list[Tensor]] = {}  # what came to outputs from others, as sent

    def listen(self, found: RecordedPass) -> None:
        self.kept.append(found)
        for k, x in enumerate(found.outputs):
            hook = partial(self._at_output, weakref.ref(found), k, Source.of(x))
            weakref.finalize(found, x.register_hook(hook).remove)

    def _at_output(
        self, waiting: weakref.ref[RecordedPass], index: int, source: Source | None, gradient: Tensor
    ) -> None:
        found = waiting()
        if found is None or self.is_sending or not _counts(gradient, found.tape):
            return
        self._begin(found)
        output, count = found.outputs[index], found.batch.count
        reading = read_loss(source)
        factor = self.factors.of(reading, output, gradient, count)
        self.division.note(found if len(found.outputs) == 1 else None, reading, output, gradient)
        if not self.arrived:
            is_alone = self.team.current().processes.size == 1
            self.unit, self.is_sum = self.factors.usual(count) if is_alone else SHARED_UNIT, False
        self.is_sum |= count > 1 and not self.store.is_sum and isinstance(factor, float) and factor == 1
        with torch.enable_grad():
            output = samples_first(regular(output), count)
        rows, each = samples_first(regular(gradient), count), factor / self.unit
        if isinstance(each, Tensor):
            each = each.to(rows.device, rows.dtype).reshape(-1, *[1] * (rows.ndim - 1))
        vectors = (rows * each).detach()
        for came in self.passed.pop((found, index), ()):
            vectors -= samples_first(regular(came), count)
        batch = BatchFacts(0 if found in self.arrived else count)
        with self._sending(vectors.device):
            self._note_passed(found, index, output, vectors)
            measured = self.store.measure(found.tape, [output], [vectors[None]], batch)
        sums = OutputScale.in_metric(squares_along(output, vectors), batch.count)
        self.arrived.setdefault(found, Measured()).add_(Measured(measured, sums))

    def _note_passed(self, found: RecordedPass, index: int, output: Tensor, vectors: Tensor) -> None:
        """What comes to other outputs, of which this one was computed: it is part of the gradient there, too."""
        others = {k: x for k, x in enumerate(found.outputs) if k != index}
        options: Any = {"retain_graph": True, "allow_unused": True}
        sent = torch.autograd.grad(output, list(others.values()), vectors, **options) if others else ()
        for k, g in zip(others, sent, strict=True):
            if g is not None:
                self.passed.setdefault((found, k), []).append(g)

    def measured(self, unit: float) -> Iterator[Measured]:
        # only now: times the scale of the loss it may be too much for float16
        samples = sum(own.curvature.rows.samples for own in self.arrived.values()) if self.is_sum else 1
        for own in self.arrived.values():
            own.scale_vectors_(samples**0.5 * self.unit / unit)
            yield own
