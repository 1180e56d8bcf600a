"""What the forward passes of a model tell its optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from curvature import Injection, Tape, empirical, isotropic
from curvature.preconditioners import BlockDiagonalCurvature, CurvatureStore
from curvature.recording import Listener
from optimizers.arguments import check_arguments, check_whole
from optimizers.distributed.processes import Processes, rows_of_whole, trained_by
from optimizers.distributed.statistics import Statistics, Team
from optimizers.distributed.workers import Workers
from optimizers.model_optimizer import ModelOptimizer
from optimizers.recording.backward_passes import Measured, Passes, is_checkpointed
from optimizers.recording.model_outputs import SUBSTITUTE, Places, note_once, places_of
from optimizers.recording.output_scale import Extent, Sums
from optimizers.schedule import Schedule


class Recording(ModelOptimizer):
    """Base: takes statistics from the forward passes of a model. Arguments as of `KFAC`."""

    block = "kronecker"
    whole = ""  # why every process needs all that the curvature is solved with

    def __init__(self, model: nn.Module, options: dict[str, Any], arguments: dict[str, Any]) -> None:
        check_arguments(model, options | arguments)
        for name in ("factor_every", "decompose_every"):
            check_whole(name, arguments[name], 1, 10**9)
        check_whole("seed", arguments["seed"], -(2**63), 2**64 - 1)
        inject, loss = arguments["inject"], arguments["loss"]
        if loss is not None and (isinstance(loss, type) or not callable(loss)):
            raise TypeError(
                f"loss: expected a loss module as in nn.CrossEntropyLoss(), or a function, found {loss!r:.80}"
            )
        if not isinstance(inject, Injection):
            raise TypeError(f"inject: expected curvature.isotropic() or another injection, found {inject!r:.80}")
        if loss is None and not isinstance(inject, type(isotropic()) | type(empirical())):
            raise ValueError(f"loss: {inject!r} needs the loss module, as in KFAC(model, loss=nn.CrossEntropyLoss())")
        model, config = trained_by(model, arguments["distributed"])
        if self.whole and config.gradient_worker_fraction < 1:
            raise ValueError(f"gradient_worker_fraction: expected 1, {type(self).__name__} {self.whole}")
        super().__init__(model, options)
        self._arguments = arguments
        self.loss, self.inject = loss, inject
        self.factors = self._curvature()
        intervals = int(arguments["factor_every"]), int(arguments["decompose_every"])
        self.schedule = Schedule(*intervals, arguments["max_overhead"])
        self.generator: torch.Generator | None = None
        self.outputs = Extent()
        self._distributed = config
        self._team: Team | None = None
        self._was_empty = False  # the batch of the last recorded pass
        self._substitute = ""  # what is done in place of `inject`, and why
        # when the last step ended, and seconds by part until then
        self._last: tuple[float, dict[str, float]] | None = None
        # what is known after the loss's own backward pass; it takes the factor by which that was scaled
        self._pending: list[Callable[[float], None]] = []
        self._sent: list[list[Tensor | None]] = []  # by it
        self.passes = Passes()
        me = weakref.ref(self)
        self._listener = Listener(model, lambda: _start(me()), lambda tape, output: _done(me(), tape, output), True)
        weakref.finalize(self, self._listener.remove)

    # -- processes

    @property
    def team(self) -> Team:
        """The processes that train the model together; another once torch.distributed is initialised, or no longer."""
        is_alone = not (dist.is_available() and dist.is_initialized())
        if self._team is None or self._team.processes.is_alone != is_alone:
            self._team = self._gathered()
        return self._team

    def _gathered(self) -> Team:
        processes = Processes(self._distributed, next(self.model.parameters()).device)
        workers = Workers(processes, self._distributed.gradient_worker_fraction)
        passes = self.passes
        take = lambda: passes.total.pop_sums(processes.rank, processes.size)
        statistics = Statistics(processes, take, self.factors)
        return Team(processes, workers, statistics)

    # -- capture

    def _curvature(self) -> CurvatureStore:
        """What the curvature is kept in."""
        return BlockDiagonalCurvature(self._arguments["sharing"], self.block)

    def _records(self) -> bool:
        # whether the last batch was bad makes a difference only where this one would renew the factors
        return torch.is_grad_enabled() and self.schedule.renews(self._steps) and self.schedule.renews(self.steps)

    def _expect(self) -> None:
        """Compiled models are to run uncompiled until the next step, if that renews the factors."""
        with torch.enable_grad():
            self._listener.expect(self._records())

    def _record(self, tape: Tape, output: Any) -> None:
        """Called with every recorded forward pass."""
        places = places_of(tape, output)
        outputs, count = places.tensors, places.count
        hidden = [name for name, node in tape.parameters.items() if not node.uses]
        if hidden and is_checkpointed(outputs):
            raise RuntimeError(
                f"{type(self).__name__}: {hidden[0]} is read within checkpoint(..., use_reentrant=True), where no "
                "curvature is seen; pass use_reentrant=False"
            )
        if not tape.uses:
            return
        self._was_empty = bool(outputs) and not all(x.numel() for x in outputs)
        if not count or self._was_empty:
            return
        if not outputs:
            self._record_without_outputs(tape, places)
            return
        if self.inject == empirical():
            self._listen_to_backward(tape, places.sources, Extent.of(outputs), count)
            return
        if len(outputs) > 1 and self.loss is not None:
            raise ValueError(
                f"{type(self).__name__}: the model returned {len(outputs)} tensors, and loss= is of one; leave loss "
                "out (isotropic())"
            )
        vectors = [self._vectors(x.detach(), y) for x, y in zip(outputs, places.targets, strict=True)]
        processes = self.team.processes
        with torch.autocast(outputs[0].device.type, enabled=False):
            found = self.factors.measure(tape, outputs, vectors, count, processes.rank, processes.size)
        self.passes.wait(Measured(found, Extent.of(outputs)), places.sources, self.team.statistics.discard)
        if processes.size > 1:
            for x in places.sources:
                x.register_hook(lambda _: self.team.statistics.launch())

    def _vectors(self, output: Tensor, target: Any) -> Tensor:
        found = rows_of_whole(self.inject, output, self.loss, target, self.team.processes, self._seed)
        return found.to(output.dtype)

    def _seed(self) -> int:
        """For the random vectors of one output."""
        if self.generator is None:
            self.generator = torch.Generator("cpu").manual_seed(int(self._arguments["seed"]))
        return int(torch.randint(1 << 62, (), generator=self.generator, device="cpu"))

    def _record_without_outputs(self, tape: Tape, places: Places) -> None:
        """Of a model that returned only its loss, made of no function that is known."""
        if not isinstance(self.inject, type(isotropic()) | type(empirical())):
            raise ValueError(
                f"{type(self).__name__}: the model returned no tensor that {self.inject!r} can be sent back from, and "
                "called no loss function of torch; return its output beside the loss"
            )
        scale = next(iter(tape.parameters.values())).tensor.new_ones(()) if places.scale is None else places.scale
        if self.inject != empirical():
            self._substitute = SUBSTITUTE
            note_once(SUBSTITUTE)
        self._listen_to_backward(tape, [], Extent.of([scale.expand(places.count)]), places.count)

    def _listen_to_backward(self, tape: Tape, outputs: Sequence[Tensor], extent: Sums, count: int) -> None:
        """Keep the backprops of the loss when the training loop sends them back."""
        found: list[Tensor | None] = [None] * len(tape.uses)
        each = 1 if getattr(self.loss, "reduction", "mean") == "sum" else count

        def keep(index: int, number: int) -> Callable[[Sequence[Tensor]], None]:
            def hook(gradients: Sequence[Tensor]) -> None:
                if gradients[number] is not None:
                    if taken not in self._pending:
                        self._pending.append(taken)
                        self._sent.append(found)
                    b = gradients[number].detach().reshape(tape.uses[index].shape)
                    found[index] = b.to(torch.promote_types(b.dtype, torch.float32))  # scaled or not, no overflow

            return hook

        for use in tape.uses:
            if use.edge is not None:
                use.edge.node.register_prehook(keep(use.index, use.edge.output_nr))
                use.edge = use.edge._replace(node=None)  # type: ignore[arg-type]  # which holds the tape by its hook
        factors = self.factors
        assert isinstance(factors, BlockDiagonalCurvature)

        def taken(scale: float) -> None:
            backprops = [None if b is None else b.mul_(each / scale) for b in found]
            processes = self.team.processes
            measured = factors.measure_backprops(tape, backprops, count, processes.rank, processes.size)
            self.passes.total.add_(Measured(measured, extent))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As for any optimizer; what passes have shown whose gradients these were is forgotten when new ones arrive."""
        self._listener.reset()
        super().zero_grad(set_to_none)
        self.passes.zero()
        for found in self._sent:
            found[:] = [None] * len(found)

    def _discard(self) -> None:
        """Forget what the forward passes since the last step have shown."""
        self._pending.clear()
        self._sent.clear()
        self.passes.forget()
        if self._team is not None:
            self._team.statistics.discard()


def _start(optimizer: Recording | None) -> Tape | None:
    return Tape(optimizer.model, optimizer._there()) if optimizer is not None and optimizer._records() else None


def _done(optimizer: Recording | None, tape: Tape, output: Any) -> None:
    if optimizer is not None:
        with optimizer.health.timed("capture"), optimizer.health.watching():
            optimizer._record(tape, output)
