"""Records the forward passes of a model and sends vectors back from its outputs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from curvature import Injection, Tape, empirical, isotropic
from curvature.preconditioners import CurvatureStore
from curvature.recording import Listener, unwrap_compiled, warn_once
from optimizers.distributed.processes import rows_of_whole
from optimizers.distributed.team import Roster
from optimizers.monitor import Monitor
from optimizers.recording.backward_passes import Measured, Passes, is_checkpointed
from optimizers.recording.loss_backprops import LossBackprops, RecordedPass
from optimizers.recording.model_outputs import SUBSTITUTE, Places, places_of
from optimizers.recording.output_scale import Extent
from optimizers.schedule import Schedule

Parameters = Callable[[], Mapping[str, nn.Parameter]]


class Recorder:
    """Hooks on a model. On steps that renew the curvature they record its forward passes into a store.

    Right after such a pass vectors go back from the model's output; the training loop's own backward pass is untouched,
    and tells which passes count: those whose gradients it sends back. With ``inject=empirical()`` nothing is sent, and
    the loop's own backprops are kept.

    Args:
        model: what the training loop calls.
        parameters: those that are trained now, by name.
        store: measures passes.
        passes: those since the last step, and which of them count.
        inject, loss: what is sent back.
        seed: of the random vectors.
        schedule, monitor: say whether the step to come renews the curvature.
        roster: the processes that train the model.
        loss_backprops: listens to the loop's backward pass.
        owner: name of the optimizer, for messages.

    Attributes:
        outputs: how large the model's outputs are.
        generator: of the random vectors; None before the first.
        substitute: what is done in place of `inject`, and why; "" if nothing is.
    """

    def __init__(
        self, model: nn.Module, parameters: Parameters, store: CurvatureStore, passes: Passes, *, inject: Injection,
        loss: Any, seed: int, schedule: Schedule, monitor: Monitor, roster: Roster, loss_backprops: LossBackprops,
        owner: str,
    ) -> None:  # fmt: skip
        self.model, self.parameters = unwrap_compiled(model), parameters
        self.store, self.passes, self.loss_backprops = store, passes, loss_backprops
        self.outputs = Extent()
        self.inject, self.loss, self.seed = inject, loss, seed
        self.schedule, self.monitor, self.roster, self.owner = schedule, monitor, roster, owner
        self.generator: torch.Generator | None = None
        self.substitute = ""
        self.was_empty = False  # the batch of the last recorded pass
        self.is_paused = False
        me = weakref.ref(self)
        self.listener = Listener(model, lambda: _start(me()), lambda tape, output: _done(me(), tape, output), True)
        weakref.finalize(self, self.listener.remove)

    # -- which passes are recorded

    def is_due(self) -> bool:
        """Whether a forward pass now is recorded."""
        # whether the last batch was bad matters, and is waited for, only if this pass would renew the factors
        is_open = torch.is_grad_enabled() and not self.is_paused
        return is_open and self.schedule.renews(self.monitor.started) and self.schedule.renews(self.monitor.steps)

    def expect(self) -> None:
        """Have compiled models run eagerly until the next step if that renews the curvature."""
        with torch.enable_grad():
            self.listener.expect(self.is_due())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Forward passes inside are not recorded: those of a closure that is called again."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def stop(self) -> None:
        """Record no more: the curvature comes from elsewhere (a Jacobian of residuals)."""
        self.discard()
        self.generator = self.outputs.scale = None
        self.is_paused = True

    # -- a recorded pass

    def record(self, tape: Tape, output: Any) -> None:
        """Take a forward pass that returned `output`."""
        places = places_of(tape, output)
        outputs, count = places.tensors, places.count
        hidden = [name for name, node in tape.parameters.items() if not node.uses]
        if hidden and is_checkpointed(outputs):
            raise RuntimeError(
                f"{self.owner}: {hidden[0]} is read within checkpoint(..., use_reentrant=True), where no "
                "curvature is seen; pass use_reentrant=False"
            )
        if not tape.uses:
            return
        self.was_empty = bool(outputs) and not all(x.numel() for x in outputs)
        if not count or self.was_empty:
            return
        if not outputs:
            self._listen_without_outputs(tape, places)
        elif self.inject == empirical():
            self.loss_backprops.listen(RecordedPass(tape, places.sources, Extent.of(outputs), count))
        elif len(outputs) > 1 and self.loss is not None:
            raise ValueError(
                f"{self.owner}: the model returned {len(outputs)} tensors, and loss= is of one; leave loss "
                "out (isotropic())"
            )
        else:
            self._send_back(tape, places)

    def _send_back(self, tape: Tape, places: Places) -> None:
        outputs, team = places.tensors, self.roster.team()
        vectors = [self._vectors(x.detach(), y) for x, y in zip(outputs, places.targets, strict=True)]
        rank, size = team.processes.rank, team.processes.size
        with torch.autocast(outputs[0].device.type, enabled=False):
            found = self.store.measure(tape, outputs, vectors, places.count, rank, size)
        self.passes.wait(Measured(found, Extent.of(outputs)), places.sources, team.statistics.discard)
        if size > 1:
            for x in places.sources:
                x.register_hook(lambda _: team.statistics.launch())

    def _vectors(self, output: Tensor, target: Any) -> Tensor:
        processes = self.roster.team().processes
        found = rows_of_whole(self.inject, output, self.loss, target, processes, self._next_seed)
        return found.to(output.dtype)

    def _next_seed(self) -> int:
        """For the random vectors of one output."""
        if self.generator is None:
            self.generator = torch.Generator("cpu").manual_seed(self.seed)
        return int(torch.randint(1 << 62, (), generator=self.generator, device="cpu"))

    def _listen_without_outputs(self, tape: Tape, places: Places) -> None:
        """The model returned only its loss, made by no function that is known."""
        if not isinstance(self.inject, type(isotropic()) | type(empirical())):
            raise ValueError(
                f"{self.owner}: the model returned no tensor that {self.inject!r} can be sent back from, and "
                "called no loss function of torch; return its output beside the loss"
            )
        scale = next(iter(tape.parameters.values())).tensor.new_ones(()) if places.scale is None else places.scale
        if self.inject != empirical():
            self.substitute = SUBSTITUTE
            warn_once(SUBSTITUTE, logger="optimizers")
        extent = Extent.of([scale.expand(places.count)])
        self.loss_backprops.listen(RecordedPass(tape, [], extent, places.count))

    # -- for a step

    def settle(self, scale: Callable[[], float]) -> None:
        """Complete `passes.total` for a step; `scale` is what the loss was multiplied by before its backward pass.

        Raises:
            RuntimeError: parts of the model were called in its place.
        """
        if self.listener.problem:
            raise RuntimeError(self.listener.problem)
        self.passes.settle()
        self.loss_backprops.deliver(scale)

    @property
    def has_measured(self) -> bool:
        """Whether the next step has anything to take into the averages."""
        return self.loss_backprops.has_arrived or bool(self.passes.total.curvature)

    def reset(self) -> None:
        """Leave what an interrupted forward pass has entered."""
        self.listener.reset()

    def zero(self) -> None:
        """Gradients are zeroed: passes whose gradients these were are forgotten when new ones arrive."""
        self.reset()
        self.passes.zero()
        self.loss_backprops.zero()

    def discard(self) -> None:
        """Forget the forward passes since the last step."""
        self.loss_backprops.discard()
        self.passes.forget()
        self.roster.discard()

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        generator = None if self.generator is None else self.generator.get_state()
        return {"output_scale": self.outputs.scale, "output_size": self.outputs.size, "generator": generator}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device, is_stopped: bool) -> None:
        self.is_paused = is_stopped
        scale, generator = state["output_scale"], state["generator"]
        self.outputs.scale, self.outputs.size = None if scale is None else scale.to(device), state["output_size"]
        self.generator = None if generator is None else torch.Generator("cpu")
        if self.generator is not None:
            try:
                self.generator.set_state(generator.cpu())
            except RuntimeError:  # of another kind of device
                self.generator.manual_seed(self.seed + self.monitor.steps)


def _start(recorder: Recorder | None) -> Tape | None:
    return Tape(recorder.model, recorder.parameters()) if recorder is not None and recorder.is_due() else None


def _done(recorder: Recorder | None, tape: Tape, output: Any) -> None:
    if recorder is not None:
        with recorder.monitor.timed("capture"), recorder.monitor.watching():
            recorder.record(tape, output)
