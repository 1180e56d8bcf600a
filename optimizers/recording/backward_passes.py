"""What the loop's backward passes decide: which recorded passes count at a step, and what `empirical()` measures.

`Passes` counts the recorded passes at whose outputs gradients arrive. With ``inject=empirical()``, `LossBackprops`
keeps what arrives, backprops at uses or rows of all parameters, until the step, when the scale of the loss is known.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    is_batchedtensor,
    is_gradtrackingtensor,
    is_legacy_batchedtensor,
)
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from curvature.functional import graph_nodes
from curvature.gradients import computed_weights
from curvature.losses import resolve
from curvature.preconditioners import BatchFacts, CurvatureStatistics
from curvature.recording import ParameterNode, Tape, warn_once
from optimizers.distributed.processes import Team
from optimizers.recording.model_outputs import OutputScale, regular, samples_first, squares_along


class Passes:
    """Recorded passes until a step takes them: those at whose outputs gradients arrive, or else the last."""

    def __init__(self, has_gradients: Callable[[], Any] = lambda: True) -> None:
        self.has_gradients = has_gradients  # whether a parameter has a gradient now
        self.step = object()  # which one is to come
        self.total = CurvatureStatistics()  # of the passes that count
        self.last: CurvatureStatistics | None = None  # of the last pass, kept alive by the hooks on its outputs, too
        self.arrived = False  # whether a pass has counted since the last step
        self.is_old = False  # whether what has counted belongs to gradients that were zeroed
        self.backward = -1  # number of the last backward pass
        self.adds = False  # whether it adds to the gradients of parameters
        self.leaf_hooks: list[RemovableHandle] = []  # of the passes since the last step

    def wait(
        self, measured: CurvatureStatistics, outputs: Sequence[Tensor], parameters: Sequence[Tensor],
        check: Callable[[Tensor], None] | None = None,
    ) -> None:  # fmt: skip
        """Count a pass once a gradient arrives that trains or has a graph; `check` may raise at it."""
        self.last = measured
        me, step = weakref.ref(self), self.step

        def arrive(gradient: Tensor) -> None:
            nonlocal step
            # 1. a gradient of the loss, for the step that is to come
            passes = me()
            if passes is None or step is not passes.step or is_batched(gradient):
                return
            if not torch.is_grad_enabled() and not is_training(parameters):
                return
            if check is not None:
                check(gradient)
            # 2. drop what belongs to gradients that were zeroed
            passes.begin(parameters)
            # 3. count the pass, once
            passes.total.add_(measured)
            step = None

        for x in outputs:
            handle = x.register_hook(arrive)
            if x.is_leaf:  # a parameter that the model returns as it is
                self.leaf_hooks.append(handle)

    def begin(self, parameters: Sequence[Tensor]) -> None:
        """A gradient of the loss arrives: forget what belongs to gradients that were zeroed."""
        number = torch._C._current_graph_task_id()
        if number != self.backward:
            # where the gradients of the backward pass before are gone, the model has zeroed them
            self.is_old |= self.adds and not self.has_gradients()
            self.backward, self.adds = number, is_training(parameters, adds=True)
        if self.is_old:
            self.total = CurvatureStatistics()
        self.is_old, self.arrived = False, True

    def zero(self) -> None:
        """Gradients are zeroed: what counted until now belongs to none, unless nothing follows before the step."""
        self.is_old = True

    def settle(self) -> None:
        """A step begins. Later gradients are dropped: they were measured in the previous eigenbasis."""
        if not self.arrived and self.last is not None:
            self.total.add_(self.last)
        self._end()

    def forget(self) -> None:
        self.total = CurvatureStatistics()
        self._end()

    def _end(self) -> None:
        for handle in self.leaf_hooks:
            handle.remove()
        self.leaf_hooks.clear()
        self.step, self.last, self.arrived, self.is_old, self.adds = object(), None, False, False, False


def is_transformed(model: nn.Module) -> bool:
    """Whether torch.func (but ``grad`` by the parameters, once), forward mode or a trace runs the model now."""
    modes = torch._C._TorchDispatchModeKey.PROXY, torch._C._TorchDispatchModeKey.FAKE
    if (
        torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or any(torch._C._get_dispatch_mode(mode) is not None for mode in modes)
    ):
        return True
    transforms = get_interpreter_stack() or []
    if not transforms:
        return False
    is_gradient = len(transforms) == 1 and transforms[0].key() == TransformType.Grad
    return not is_gradient or not any(map(is_gradtrackingtensor, model.parameters()))


def is_batched(gradient: Tensor) -> bool:
    """Whether a gradient is one of many vectors that ``vmap`` sends back at once: a Jacobian, and no training pass."""
    return is_batchedtensor(gradient) or is_legacy_batchedtensor(gradient)


def is_training(parameters: Iterable[Tensor], adds: bool = False) -> bool:
    """Whether the running backward pass goes on to a parameter, not only to inputs as in a Jacobian by these.

    With `adds`, whether it adds to the ``.grad`` of one, and is not ``torch.autograd.grad``.
    """
    try:
        nodes = (get_gradient_edge(p).node for p in parameters if not adds or isinstance(p, nn.Parameter))
        return any(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:  # of a leaf that torch.autograd.grad was asked for
        return not adds


def is_checkpointed(outputs: Sequence[Tensor]) -> bool:
    """Whether parts of a graph come about only in ``.backward()``: those of ``checkpoint(..., use_reentrant=True)``."""
    nodes = graph_nodes(*(x.grad_fn for x in outputs))
    return any(type(node).__name__ == "CheckpointFunctionBackward" for node in nodes)


SEVERAL_PASSES = (
    "empirical(): several forward passes came before a step; each is taken for a mean over its own samples. If the "
    "loop divides the loss by their number k, factors are k^2 times too small; inject=isotropic() does not depend on it"
)
NO_ROWS = (
    "NaturalGradient needs the gradient of each sample, and the model returned none of its outputs, only a loss that "
    "no loss function of torch made: return the outputs and compute the loss in the loop, or use KFAC"
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
        self.store, self.passes, self.team = store, passes, team
        self.is_sum = loss is not None and getattr(resolve(loss), "reduction", "mean") == "sum"
        self.is_sending = False
        self.discard()

    def listen(self, recorded: RecordedPass) -> None:
        """Register hooks on a recorded pass."""
        raise NotImplementedError

    def measured(self, scale: float) -> Iterator[CurvatureStatistics]:
        """What has arrived, by pass; `scale` is what the loss of each was multiplied by."""
        raise NotImplementedError

    def factor(self, count: int) -> float:
        """What turns a sample's part of the gradient at the output into its own: N in a mean, 1 in a sum."""
        return 1.0 if self.is_sum else float(count)

    def deliver(self, scale: Callable[[], float]) -> None:
        """Measure what has arrived; `scale` is what the loss was multiplied by, asked for only if something has."""
        if len(self.arrived) > 1 and not self.is_sum:
            warn_once(SEVERAL_PASSES, logger="optimizers")
        if self.arrived:
            for measured in self.measured(scale()):
                self.passes.total.add_(measured)
        self.discard()

    def discard(self) -> None:
        """Forget the passes since the last step."""
        self.kept: list[RecordedPass] = []  # until the next step: what is on their own graph would hold them for ever
        self._forget()

    def _forget(self) -> None:
        """Forget what has arrived."""
        self.arrived, self.total = {}, self.passes.total  # to which what arrives will be added

    def _begin(self, recorded: RecordedPass) -> None:
        """A gradient arrives: forget what belongs to gradients that were zeroed, or that the loss is made of."""
        last, was_added = self.passes.backward, self.passes.adds
        self.passes.begin(_parameters(recorded.tape))
        if self.passes.total is not self.total:
            self._forget()
        elif self.passes.backward != last and self.passes.adds and not was_added:
            self.arrived.pop(recorded, None)

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


class LayerBackprops(LossBackprops):
    """Keeps the backprop at every use."""

    def listen(self, recorded: RecordedPass) -> None:
        tape, outputs = recorded.tape, recorded.outputs
        recorded = replace(recorded, outputs=())  # hooks on the graph hold no part of it
        tape.losses.clear()
        computed = computed_weights(tape)
        behind = {name for node in computed for name in node.names}
        signs = recorded.signs() if computed else torch.ones(0, device="cpu")
        me = weakref.ref(recorded)  # held by the hooks on the graph of the outputs, and gone with it
        nodes = [*computed, *(tape.parameters[name] for name in behind)]
        hooks = [(node.tensor, partial(self._at_computed, me, weakref.ref(node), signs)) for node in nodes]
        hooks += [(tape.parameters[k].tensor, partial(self._at_whole, me, k)) for k in _whole(tape) - behind]
        for x, hook in hooks:
            weakref.finalize(recorded, x.register_hook(hook).remove)
        held = {id(node.tensor) for use in tape.uses for node in use.results}
        for x in outputs:
            if x.is_leaf or id(x) in held:  # the tape would hold its own graph
                self.kept.append(recorded)
            else:
                x.register_hook(partial(self._at_output, recorded, x.detach()))
        for use in tape.uses:
            if use.edge is not None and not use.results:  # the graph of a computed weight is held by the tape
                use.edge.node.register_prehook(partial(self._at_use, recorded, use.index, use.edge.output_nr))
                # the node holds the tape by its hook; so does the edge's other reference to nodes of Python functions
                use.edge = GradientEdge(None, use.edge.output_nr)  # type: ignore[arg-type]

    def _at_output(self, recorded: RecordedPass, output: Tensor, gradient: Tensor) -> None:
        if self._takes(recorded, gradient):
            self._begin(recorded)
            arrived, count = self._of_pass(recorded), recorded.batch.count
            if not output.ndim:  # a loss, as the mean of that of each sample
                output, gradient = output.expand(count), gradient.expand(count) / count
            squares = squares_along(regular(output), regular(gradient))
            arrived.squares = arrived.squares + squares.to(arrived.squares.device)

    def _of_pass(self, recorded: RecordedPass) -> Arrived:
        if recorded not in self.arrived:
            zero = _parameters(recorded.tape)[0].new_zeros((), dtype=torch.float32)
            self.arrived[recorded] = Arrived([None] * len(recorded.tape.uses), zero)
        return self.arrived[recorded]

    def _takes(self, recorded: RecordedPass, gradient: Tensor | None) -> bool:
        """Whether a gradient is the loop's own, and of the loss, not of outputs by inputs."""
        return not self.is_sending and _counts(gradient, recorded.tape)

    def _at_use(self, recorded: RecordedPass, index: int, number: int, gradients: Sequence[Tensor]) -> None:
        if self._takes(recorded, gradients[number]):
            self._begin(recorded)
            backprops = self._of_pass(recorded).backprops
            b, before = _widen(gradients[number]).reshape(recorded.tape.uses[index].shape), backprops[index]
            backprops[index] = b if before is None else before + b

    def _at_computed(
        self, waiting: weakref.ref[RecordedPass], node: weakref.ref[ParameterNode], signs: Tensor, gradient: Tensor
    ) -> None:
        """The readers of the tensor have got their backprops, and the graph behind it is still there."""
        recorded, read = waiting(), node()
        if recorded is not None and read is not None and self._takes(recorded, gradient):
            arrived = self._of_pass(recorded)
            with self._sending(gradient.device):
                sums = self.store.weighted_gradients(recorded.tape, read, arrived.backprops, signs)
            arrived.whole |= {(read, name): g for name, g in sums.items()}

    def _at_whole(self, waiting: weakref.ref[RecordedPass], name: str, gradient: Tensor) -> None:
        recorded = waiting()
        if recorded is not None and self._takes(recorded, gradient):
            self._begin(recorded)
            key, g, whole = (None, name), _widen(gradient), self._of_pass(recorded).whole
            whole[key] = whole[key] + g if key in whole else g

    def measured(self, scale: float) -> Iterator[CurvatureStatistics]:
        for recorded, arrived in self.arrived.items():
            times = self.factor(recorded.batch.count) / scale
            backprops = [None if b is None else times * b for b in arrived.backprops]
            whole: dict[str, Tensor] = {}
            for (_, name), g in arrived.whole.items():
                whole[name] = whole[name] + times * g if name in whole else times * g
            measured = self.store.measure_backprops(recorded.tape, backprops, whole, recorded.batch)
            measured.outputs = OutputScale.in_metric(times**2 * arrived.squares, recorded.batch.count)
            yield measured


def _counts(gradient: Tensor | None, tape: Tape) -> bool:
    """Whether a gradient is of the loss, and not of outputs by inputs."""
    return gradient is not None and not is_batched(gradient) and is_training(_parameters(tape))


def _parameters(tape: Tape) -> list[Tensor]:
    return [node.tensor for node in tape.parameters.values()]


def _widen(gradient: Tensor) -> Tensor:
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

    def _forget(self) -> None:
        super()._forget()
        self.passed: dict[tuple[RecordedPass, int], list[Tensor]] = {}  # what came to outputs from others, as sent

    def listen(self, recorded: RecordedPass) -> None:
        if recorded.batch.count > 1 and not any(x.ndim for x in recorded.outputs):
            raise RuntimeError(NO_ROWS)
        self.kept.append(recorded)
        for k, x in enumerate(recorded.outputs):
            hook = partial(self._at_output, weakref.ref(recorded), k)
            weakref.finalize(recorded, x.register_hook(hook).remove)

    def _at_output(self, waiting: weakref.ref[RecordedPass], index: int, gradient: Tensor) -> None:
        recorded = waiting()
        if recorded is None or self.is_sending or not _counts(gradient, recorded.tape):
            return
        self._begin(recorded)
        output, count = recorded.outputs[index], recorded.batch.count
        if not self.arrived:
            self.unit = self.factor(count) if self.team.current().processes.size == 1 else SHARED_UNIT
        with torch.enable_grad():
            output = samples_first(regular(output), count)
        vectors = (samples_first(regular(gradient), count) * (self.factor(count) / self.unit)).detach()
        for came in self.passed.pop((recorded, index), ()):
            vectors -= samples_first(regular(came), count)
        batch = BatchFacts(0 if recorded in self.arrived else count)
        with self._sending(vectors.device):
            self._note_passed(recorded, index, output, vectors)
            measured = self.store.measure(recorded.tape, [output], [vectors[None]], batch)
        measured.outputs = OutputScale.in_metric(squares_along(output, vectors), batch.count)
        self.arrived.setdefault(recorded, CurvatureStatistics()).add_(measured)

    def _note_passed(self, recorded: RecordedPass, index: int, output: Tensor, vectors: Tensor) -> None:
        """Note what comes to other outputs, of which this one was computed: it is part of the gradient there, too."""
        others = {k: x for k, x in enumerate(recorded.outputs) if k != index}
        options: Any = {"retain_graph": True, "allow_unused": True}
        sent = torch.autograd.grad(output, list(others.values()), vectors, **options) if others else ()
        for k, g in zip(others, sent, strict=True):
            if g is not None:
                self.passed.setdefault((recorded, k), []).append(g)

    def measured(self, scale: float) -> Iterator[CurvatureStatistics]:
        # only now: times the scale of the loss it may be too much for float16
        for arrived in self.arrived.values():
            arrived.scale_vectors_(self.unit / scale)
            yield arrived
