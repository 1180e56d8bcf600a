"""Records forward passes of a model and sends vectors back from its outputs; `Passes.total` has what they tell."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils.checkpoint import CheckpointError

from curvature.linalg import stack, widen
from curvature.losses import Injection, empirical, isotropic
from curvature.operators import Named
from curvature.preconditioners import BatchFacts, CurvatureStatistics, CurvatureStore
from curvature.recording import Listener, Tape, unwrap_compiled, warn_once
from optimizers.distributed.processes import Processes, Team, vectors_of_global_batch
from optimizers.monitor import Monitor
from optimizers.recording.backward_passes import LossBackprops, Passes, RecordedPass, is_checkpointed, is_transformed
from optimizers.recording.model_outputs import SUBSTITUTE, ModelOutputs, OutputScale, find_outputs, squares_along
from optimizers.schedule import Schedule

Parameters = Callable[[], Mapping[str, nn.Parameter]]
CANCELLED = 0.01  # of the sum of absolute values: what adds up to less is zero but for rounding


class Scaling(NamedTuple):
    """What a `torch.amp.GradScaler` has passed to the optimizer for a step."""

    scale: Tensor | None = None  # of the loss (); None without a scaler, or after `unscale_`
    found_inf: Tensor | None = None  # whether it found gradients that are not finite; None without a scaler
    worked: Tensor | None = None  # the scale of the last step that was taken

    def unscale(self, gradients: Named) -> None:
        """Divide gradients in place by the scale."""
        if self.scale is not None:
            inverse = widen(self.scale).reciprocal()
            for g in gradients.values():
                g.mul_(inverse.to(g.device, torch.promote_types(g.dtype, torch.float32)))

    def has_worked(self, processes: Processes) -> bool:
        """Whether a step was taken at this scale or above, so that it is no reason for gradients that are not finite.

        The host waits once.
        """
        if self.scale is None or self.worked is None:
            return self.scale is None
        scale, worked = processes.agreed(stack([self.scale, self.worked])).tolist()
        return scale <= worked


class Recorder:
    """Hooks on a model that record its forward passes before steps that renew the curvature.

    Right after such a pass the recorder backpropagates vectors from the model's output. The training loop's own
    backward pass stays untouched and decides which passes count: those that it differentiates. With
    ``inject=empirical()`` the recorder keeps the loop's own backprops instead.
    """

    def __init__(
        self, model: nn.Module, parameters: Parameters, displacement: Callable[[], Named], store: CurvatureStore,
        passes: Passes, *, inject: Injection, loss: Any, seed: int, schedule: Schedule, monitor: Monitor, team: Team,
        backprops: type[LossBackprops], owner: str,
    ) -> None:  # fmt: skip
        self.model, self.parameters, self.displacement = unwrap_compiled(model), parameters, displacement
        self.store, self.passes, self.loss_backprops = store, passes, backprops(store, passes, team, loss)
        self.outputs, self.scaling = OutputScale(), Scaling()
        self.inject, self.loss, self.seed = inject, loss, seed
        self.schedule, self.monitor, self.team, self.owner = schedule, monitor, team, owner
        self.generator: torch.Generator | None = None  # of the random vectors; None before the first
        self.is_axis_checked = False  # whether a gradient had its classes where the loss says
        self.substitute = ""  # what replaces `inject`, and why
        self.was_empty = False  # whether the last recorded batch was empty
        self.is_paused = False
        self.listener = Listener(model, weakly(self._start), weakly(self._end), True)
        weakref.finalize(self, self.listener.remove)

    # -- which passes are recorded

    def may_be_due(self) -> bool:
        """Whether the next step renews the curvature, by its number."""
        return not self.is_paused and self.schedule.renews(self.monitor.steps)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not record forward passes inside: a closure is called again."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def stop(self) -> None:
        """Stop recording for good: the curvature comes from a Jacobian of residuals."""
        self.discard()
        self.generator, self.outputs = None, OutputScale()
        self.is_paused = True

    # -- a recorded pass

    def _start(self) -> Tape | None:
        is_due = torch.is_grad_enabled() and self.may_be_due() and not is_transformed(self.model)
        return Tape(self.model, self.parameters()) if is_due else None

    def _end(self, tape: Tape, output: Any) -> None:
        try:
            with self.paused(), self.monitor.timed("capture"), self.monitor.watching():
                self._measure(tape, output)
        except CheckpointError as error:  # it calls the model again, before it has seen the end of this call
            raise RuntimeError(
                f"{self.owner}: the model is called within checkpoint(...); call checkpoint within its forward"
            ) from error

    def _measure(self, tape: Tape, output: Any) -> None:
        """Measure a recorded forward pass that returned `output`, or what its backward pass will bring."""
        # 1. outputs: the tensors that vectors are sent back from
        if not tape.parameters:  # all are frozen: a judge through which a generator is trained
            return
        outputs = find_outputs(tape, output)
        self._require_visible(tape, outputs)
        self.was_empty = bool(outputs.tensors) and not all(x.numel() for x in outputs.tensors)
        if not outputs.count or self.was_empty:
            return
        processes = self.team.current().processes
        batch = BatchFacts(outputs.count, processes.rank, processes.size, self.displacement())

        # 2. injection: the one asked for, or what takes its place at such outputs
        inject, loss = self._choose(len(outputs.tensors))
        if inject == empirical():  # what the loop sends back is measured as it arrives
            sources = list({id(x): x for x in outputs.sources}.values())
            self.store.learn_axes(tape, sources, outputs.count)
            signs = functools.partial(self._signs, outputs.count)
            self.loss_backprops.listen(RecordedPass(tape, sources, batch, signs))
            return

        # 3. vectors for each output; classes are on the axis that the loss says, by default on axis 1
        first, is_isotropic = outputs.tensors[0], inject.is_isotropic
        has_axis = _has_classes(loss) and not is_isotropic and first is outputs.sources[0] and first.ndim > 2
        axis = getattr(loss, "class_axis", 1) if has_axis else 1
        pairs = zip(outputs.tensors, outputs.targets, strict=True)
        vectors = [self._vectors(inject, loss, x.detach(), y, axis) for x, y in pairs]
        if is_isotropic:
            sums = OutputScale.of(outputs.tensors)
        else:
            sums = OutputScale.in_metric(stack(map(squares_along, outputs.tensors, vectors)).sum(), len(first))

        # 4. statistics: what the vectors show of each block, and how far the last step has moved the outputs
        batch = replace(batch, independent=is_isotropic)
        with torch.autocast(first.device.type, enabled=False):
            measured = self.store.measure(tape, outputs.tensors, as_many(vectors), batch)
        measured.outputs = sums

        # 5. the pass counts once a gradient of the loop arrives, which shows the axis of the classes, too
        check = functools.partial(self._check_class_axis, axis) if has_axis and not self.is_axis_checked else None
        self.passes.wait(measured, outputs.sources, [node.tensor for node in tape.parameters.values()], check)

    def _require_visible(self, tape: Tape, outputs: ModelOutputs) -> None:
        hidden = [name for name, node in tape.parameters.items() if not node.uses]
        if hidden and is_checkpointed(outputs.tensors):
            raise RuntimeError(
                f"{self.owner}: {hidden[0]} is read within checkpoint(..., use_reentrant=True), where no "
                "curvature is seen; pass use_reentrant=False"
            )

    def _choose(self, number: int) -> tuple[Injection, Any]:
        """The injection for so many outputs, and the loss that it is of; notes if it is not the one asked for."""
        inject, loss, why = self.inject, self.loss, ""
        if not number:
            inject, why = empirical(), SUBSTITUTE
        elif number > 1 and loss is not None and inject != empirical():
            why = f"the model returned {number} tensors, and loss= is of one: curvature by isotropic()"
            inject, loss = inject if inject.is_isotropic else isotropic(), None
        if inject != self.inject:
            self.substitute = why
            warn_once(why, logger="optimizers")
        return inject, loss

    def _check_class_axis(self, axis: int, gradient: Tensor) -> None:
        """Once: raise where the gradient of the loop's loss has its classes on the other axis."""
        if is_functorch_wrapped_tensor(gradient):
            return
        g, other = widen(gradient.detach()), -1 if axis == 1 else 1
        here, there, size = stack([g.sum(axis).abs().sum(), g.sum(other).abs().sum(), g.abs().sum()]).tolist()
        if there < CANCELLED * size <= here:
            raise RuntimeError(
                f"{self.owner}: loss= has classes on axis {axis} of outputs {tuple(g.shape)}, and the gradient of the "
                f"loop's loss has them on axis {other}: set loss.class_axis = {other} on the loss that you pass as "
                "loss=, or use isotropic(), which needs no loss"
            )
        self.is_axis_checked = size > 0  # a gradient of zero does not say

    def _vectors(self, inject: Injection, loss: Any, output: Tensor, target: Any, axis: int = 1) -> Tensor:
        """The vectors (k, *output.shape), given the axis of classes, if there are any."""
        processes, seed = self.team.processes, self._next_seed
        draw = lambda x, y: vectors_of_global_batch(inject, x, loss, y, processes, seed).to(output.dtype)
        if _has_classes(loss) and output.ndim == 1:  # of one sample, without an axis of samples
            return draw(output[None], None)[:, 0]
        return draw(output, target) if axis == 1 else draw(output.movedim(-1, 1), target).movedim(2, -1)

    def _signs(self, count: int) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(self._next_seed())
        return 1.0 - 2.0 * torch.randint(2, (count,), generator=generator, device="cpu")

    def _next_seed(self) -> int:
        """The seed of the random vectors for one output."""
        if self.generator is None:
            self.generator = torch.Generator("cpu").manual_seed(self.seed)
        return int(torch.randint(1 << 62, (), generator=self.generator, device="cpu"))

    # -- for a step

    def take(self) -> CurvatureStatistics:
        """What the passes that count at a step have measured, once."""
        if self.listener.problem:
            raise RuntimeError(self.listener.problem)
        self.passes.settle()
        self.loss_backprops.deliver(self._loss_scale)
        measured, self.passes.total = self.passes.total, CurvatureStatistics()
        return measured

    def _loss_scale(self) -> float:
        """The factor that a GradScaler put on the loss."""
        scale, found_inf = self.scaling.scale, self.scaling.found_inf
        if scale is None and found_inf is not None:
            instead = "let the model return its outputs, too" if self.substitute else "use isotropic()"
            raise RuntimeError(
                f"{self.owner}: {self.substitute or 'inject=empirical() takes the backprops of the loss'}; "
                "GradScaler.unscale_ was called before the step, so that the scale of what the loss sends back is "
                f"unknown: leave unscale_ out, and clip at max_norm * scaler.get_scale(), or {instead}"
            )
        return 1.0 if scale is None else float(scale)

    @property
    def has_measured(self) -> bool:
        """Whether there are new statistics for the running averages."""
        return bool(self.loss_backprops.arrived or self.passes.total)

    def discard(self) -> None:
        """Forget the forward passes since the last step."""
        self.loss_backprops.discard()
        self.passes.forget()

    # -- checkpoints

    def state_dict(self) -> dict[str, Any]:
        generator = None if self.generator is None else self.generator.get_state()
        scale, size = self.outputs.rms, self.outputs.entries_per_sample
        return {"output_scale": scale, "output_size": size, "generator": generator}

    def load_state_dict(self, state: Mapping[str, Any], is_stopped: bool) -> None:
        self.is_paused = is_stopped
        self.outputs.rms, self.outputs.entries_per_sample = state["output_scale"], state["output_size"]
        generator = state["generator"]
        self.generator = None if generator is None else torch.Generator("cpu")
        if self.generator is not None:
            try:
                self.generator.set_state(generator.cpu())
            except RuntimeError:  # the state of a generator on another kind of device
                self.generator.manual_seed(self.seed + self.monitor.steps)


def _has_classes(loss: Any) -> bool:
    return isinstance(loss, nn.CrossEntropyLoss) or loss is F.cross_entropy


def as_many(vectors: Sequence[Tensor]) -> list[Tensor]:
    """Vectors (k, *output.shape) for each output, k the same for all: where there are fewer, zeros beside them."""
    k = max(map(len, vectors), default=0)
    return [x if len(x) == k else torch.cat([x, x.new_zeros(k - len(x), *x.shape[1:])]) for x in vectors]


def weakly(method: Any) -> Callable[..., Any]:
    """A method that does not keep its object alive; None, and nothing is done, once that is gone."""
    known, function = weakref.ref(method.__self__), method.__func__
    return lambda *args: None if (alive := known()) is None else function(alive, *args)
