"""What the optimizers with layer-wise curvature share: capture, factors, parameter groups, reports, checkpoints."""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvature import Block, Blocks, Injection, Listener, RunningFactors, Tape, empirical, invert, isotropic
from optimizers.base import ModelOptimizer, check_arguments
from optimizers.schedule import Schedule
from optimizers.verdict import judged

SHARE = 0.05  # of a factor's mean eigenvalue, added to it where no damping is given


class SecondOrder(ModelOptimizer):
    """Base of `KFAC`, which says what a step does. Arguments as there."""

    block = "kronecker"

    def __init__(self, model: nn.Module, options: dict[str, Any], arguments: dict[str, Any]) -> None:
        check_arguments(model, options | arguments)
        for name in ("factor_every", "decompose_every"):
            if not isinstance(arguments[name], int) or arguments[name] < 1:
                raise ValueError(f"{name}: expected a whole number of steps, at least 1, found {arguments[name]!r}")
        inject, loss = arguments["inject"], arguments["loss"]
        if not isinstance(inject, Injection):
            raise TypeError(f"inject: expected curvature.isotropic() or another injection, found {inject!r:.80}")
        if loss is None and not isinstance(inject, type(isotropic()) | type(empirical())):
            raise ValueError(f"loss: {inject!r} needs the loss module, as in KFAC(model, loss=nn.CrossEntropyLoss())")
        super().__init__(model, options)
        self._arguments = arguments
        self.loss, self.inject = loss, inject
        self.factors = self._curvature()
        self.schedule = Schedule(arguments["factor_every"], arguments["decompose_every"], arguments["max_overhead"])
        self.generator: torch.Generator | None = None
        self._was_empty = False  # the batch of the last recorded pass
        self.output_scale: Tensor | None = None  # root mean square of an output entry
        self.output_size = 1.0  # output entries per sample
        # when the last step ended, and seconds by part until then
        self._last: tuple[float, dict[str, float]] | None = None
        # what is known after the loss's own backward pass; it takes the factor by which that was scaled
        self._pending: list[Callable[[float], None]] = []
        me = weakref.ref(self)
        self._listener = Listener(model, lambda: _start(me()), lambda tape, output: _done(me(), tape, output))
        weakref.finalize(self, self._listener.remove)

    # -- capture

    def _curvature(self) -> Blocks:
        """What the curvature is kept in."""
        return RunningFactors(self._arguments["sharing"], self.block)

    def _records(self) -> bool:
        # whether the last batch was bad makes a difference only where this one would renew the factors
        return torch.is_grad_enabled() and self.schedule.renews(self._steps) and self.schedule.renews(self.steps)

    def _record(self, tape: Tape, output: Any) -> None:
        """Called with every recorded forward pass."""
        outputs = [x for x in _outputs(output) if x.is_floating_point() and x.requires_grad and x.ndim > 0]
        if not outputs or not tape.uses:
            return
        count = outputs[0].shape[0]
        self._was_empty = not all(x.numel() for x in outputs)
        if self._was_empty:
            return
        with torch.no_grad():
            squares = torch.stack([x.detach().float().square().sum() for x in outputs]).sum()
            self.output_size = sum(x.numel() for x in outputs) / count
            scale = (squares / (count * self.output_size)).sqrt()
            known = scale if self.output_scale is None else self.output_scale
            self.output_scale = torch.where(scale.isfinite(), scale, known)
        if self.inject == empirical():
            self._listen_to_backward(tape, outputs, count)
            return
        if self.generator is None:
            self.generator = torch.Generator(outputs[0].device).manual_seed(self._arguments["seed"])
        if len(outputs) > 1 and self.loss is not None:
            raise ValueError(
                f"{type(self).__name__}: the model returned {len(outputs)} tensors, and loss= is of one; leave loss "
                "out (isotropic())"
            )
        vectors = [self.inject.vectors(x.detach(), self.loss, generator=self.generator).to(x.dtype) for x in outputs]
        with torch.autocast(outputs[0].device.type, enabled=False):
            self.factors.record(tape, outputs, vectors, count)

    def _listen_to_backward(self, tape: Tape, outputs: Sequence[Tensor], count: int) -> None:
        """Keep the backprops of the loss when the training loop sends them back."""
        found: list[Tensor | None] = [None] * len(tape.uses)
        each = 1 if getattr(self.loss, "reduction", "mean") == "sum" else count

        def keep(index: int, number: int) -> Callable[[Sequence[Tensor]], None]:
            def hook(gradients: Sequence[Tensor]) -> None:
                if gradients[number] is not None:
                    if taken not in self._pending:
                        self._pending.append(taken)
                    b = gradients[number].detach().reshape(tape.uses[index].shape)
                    found[index] = b.to(torch.promote_types(b.dtype, torch.float32))  # scaled or not, no overflow

            return hook

        for use in tape.uses:
            if use.edge is not None:
                use.edge.node.register_prehook(keep(use.index, use.edge.output_nr))
                use.edge = use.edge._replace(node=None)  # type: ignore[arg-type]  # which holds the tape by its hook
        factors = self.factors
        assert isinstance(factors, RunningFactors)

        def taken(scale: float) -> None:
            backprops = [None if b is None else b.mul_(each / scale) for b in found]
            factors.record_backprops(tape, backprops, count)

    # -- for a step

    # torch.amp.GradScaler hands `grad_scale` and `found_inf` over, and leaves the gradients as they are
    _step_supports_amp_scaling = True

    def _judged(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Take the scale of a `GradScaler` out of gradients, and say on their device whether all are finite."""
        good = judged(gradients.values(), getattr(self, "grad_scale", None))
        found = getattr(self, "found_inf", None)
        return good & (found.to(good.device) == 0) if isinstance(found, Tensor) else good

    def _loss_scale(self) -> float:
        """What the loss was multiplied by before its backward pass, as far as a `GradScaler` did that."""
        scale = getattr(self, "grad_scale", None)
        if scale is None and hasattr(self, "found_inf"):
            raise RuntimeError(
                f"{type(self).__name__}: inject=empirical() takes the backprops of the loss, and GradScaler.unscale_ "
                "was called before the step, so that their scale is unknown; leave unscale_ out or use isotropic()"
            )
        return 1.0 if scale is None else float(scale)

    def _gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self._trained().items() if p.grad is not None}

    def _skip(self) -> None:
        """Leave a batch out that is not finite."""
        self.skipped += 1
        self._discard()
        self.health.entries.append({"step": self.steps, "accepted": False})

    def _knows_nothing(self) -> bool:
        """Whether all batches were empty so far."""
        return self._was_empty and not self.factors.blocks

    def _discard(self) -> None:
        """Forget what the forward passes since the last step have shown."""
        self._pending.clear()
        self.factors.discard()

    def _renew(self) -> None:
        """Take new statistics into the factors, and invert the blocks whose turn it is."""
        renews = self.schedule.renews(self.steps)
        with self.health.timed("factors"):
            for taken in self._pending:
                taken(self._loss_scale())
            self._pending.clear()
            if not self.factors.blocks:
                raise RuntimeError(
                    f"{type(self).__name__}.step: no forward pass of the model was seen; call the model that the "
                    "optimizer was given"
                )
            self.factors.fold(self._arguments["factor_decay"])
        blocks, due = self._due()
        with self.health.timed("inverses"):
            self._invert(due)
        self._entry: dict[str, Any] = {"step": self.steps, "renewed": renews, "inverted": len(due)}
        self._inverted = sum(b.cost for b in due) / sum(b.cost for b in blocks)

    def _due(self) -> tuple[list[Block], list[Block]]:
        """Blocks that were seen, and those of them whose turn it is to be inverted."""
        blocks = [b for b in self.factors.blocks if b.updates]
        turns = self.schedule.inverts(self.steps, [b.cost for b in blocks])
        return blocks, [b for b, turn in zip(blocks, turns, strict=True) if turn or not b.is_ready]

    def _is_ordinary(self) -> bool:
        """Whether a step has nothing to do for the curvature."""
        blocks = self.factors.blocks
        is_quiet = not self._pending and not self.schedule.renews(self.steps) and not any(b.samples for b in blocks)
        return is_quiet and bool(blocks) and not self._due()[1]

    def _measure(self) -> None:
        """Tell the schedule what the step took: what it may choose to do more rarely, and the rest."""
        if self.schedule.max_overhead is None:
            return
        now, spent = time.perf_counter(), dict(self.health.seconds)
        if self._last is not None:
            end, before = self._last
            part = lambda name: spent.get(name, 0.0) - before.get(name, 0.0)
            renewal, inverses = part("capture") + part("factors"), part("inverses")
            self.schedule.note("rest", now - end - renewal - inverses)
            if self._entry["renewed"]:
                self.schedule.note("renewal", renewal)
            if self._inverted:
                self.schedule.note("all", inverses / self._inverted)
            self.schedule.adjust()
        self._last = now, spent

    def _invert(self, blocks: Sequence[Block]) -> None:
        options = self._options()
        given = {b.names[0]: options[b.names[0]]["damping"] for b in blocks if b.names[0] in options}
        invert([b for b in blocks if given.get(b.names[0]) is None], SHARE)
        for block in blocks:
            damping = given.get(block.names[0])
            if damping is not None:
                invert([block], SHARE, damping)

    def _solved(self, right: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``(M + damping I)^-1`` times some gradients; parameters that no curvature was seen of get the average."""
        found: dict[str, Tensor] = {}
        ready = [b for b in self.factors.blocks if b.is_ready and all(name in right for name in b.names)]
        for block in ready:
            found |= dict(zip(block.names, block.solve([right[name] for name in block.names]), strict=True))
        left = [name for name in right if name not in found]
        if left:
            typical = _typical(ready)
            found |= {name: right[name] / typical.to(right[name].dtype) for name in left}
        return found

    # -- looking and keeping

    def report(self) -> str:
        """A table of every parameter: how it is preconditioned, factor shapes, memory, and why where it falls back.

        After a first forward pass, and before a first step, the memory is what will be kept at most.
        """
        rows = [("parameter", "preconditioned by", "kept", "MB", "why")]
        seen: set[str] = set()
        total = 0.0
        for block in self.factors.blocks:
            megabytes = (block.bytes if block.is_ready else block.expected) / 1e6
            total += megabytes
            rows.append((", ".join(block.names), block.structure, block.describe(), f"{megabytes:.2f}", block.reason))
            seen |= set(block.names)
        for name, p in self.model.named_parameters():
            if name not in seen:
                why = "needs a first forward pass" if p.requires_grad else "does not require a gradient"
                rows.append((name, "nothing yet" if p.requires_grad else "not trained", "", "", why))
        momenta = sum(p.numel() * p.element_size() for p in self._trained().values()) / 1e6
        rows.append(("momentum and displacement", "", "", f"{2 * momenta:.2f}", ""))
        rows.append(("in all", "", "", f"{total + 2 * momenta:.2f}", "kept between steps"))
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)

    def stats(self) -> dict[str, Any]:
        """How the run goes: the last step's numbers, counts of events, seconds by part, conditions of the factors.

        The conditions (largest over least eigenvalue of each damped block, by its first parameter) are computed here.
        """
        intervals = {"factor_every": self.schedule.factor_every, "decompose_every": self.schedule.decompose_every}
        conditions = {b.names[0]: b.condition() for b in self.factors.blocks if b.is_ready}
        outliers = sum(int(b.gate.count) for b in self.factors.blocks if b.gate.count is not None)
        return super().stats() | intervals | {"outliers": outliers, "conditions": conditions}

    kept: tuple[str, ...] = ("steps", "skipped", "output_scale", "output_size")

    def state_dict(self) -> dict[str, Any]:
        """As for any optimizer, with the curvature under "curvature": plain tensors and numbers."""
        self._settle()
        own = {k: getattr(self, k) for k in self.kept} | {"health": self.health.state(), "shapes": self._shapes()}
        own["intervals"] = [self.schedule.factor_every, self.schedule.decompose_every]
        own["generator"] = None if self.generator is None else self.generator.get_state()
        return super().state_dict() | {"curvature": self.factors.state_dict(), "kfac": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a `state_dict` of an optimizer over the same parameters; tensors move to the parameters' device."""
        state_dict = copy.copy(state_dict)
        own, factors = dict(state_dict.pop("kfac")), state_dict.pop("curvature")
        self._check_shapes(own.pop("shapes"))
        self._open = None
        super().load_state_dict(state_dict)
        device = next(iter(self._trained().values())).device
        generator = own.pop("generator")
        self.health.restore(own.pop("health"))
        self.schedule.factor_every, self.schedule.decompose_every = own.pop("intervals")
        for name, value in own.items():
            setattr(self, name, value.to(device) if isinstance(value, Tensor) else value)
        self.factors.load_state_dict(factors, device)
        if generator is not None:
            self.generator = torch.Generator(device)
            self.generator.set_state(generator.cpu())

    def __deepcopy__(self, memo: dict[int, Any]) -> SecondOrder:
        """A copy that trains a copy of the model (the same copy, where both are copied together)."""
        new = type(self)(copy.deepcopy(self.model, memo), **copy.deepcopy(self._arguments, memo))
        memo[id(self)] = new
        new.param_groups = [g | {"params": [memo[id(p)] for p in g["params"]]} for g in self.param_groups]
        new.defaults = copy.deepcopy(self.defaults)
        new.load_state_dict(copy.deepcopy(self.state_dict()))
        return new


def _start(optimizer: SecondOrder | None) -> Tape | None:
    return Tape(optimizer.model) if optimizer is not None and optimizer._records() else None


def _done(optimizer: SecondOrder | None, tape: Tape, output: Any) -> None:
    if optimizer is not None:
        with optimizer.health.timed("capture"), optimizer.health.watching():
            optimizer._record(tape, output)


def _outputs(output: Any) -> list[Tensor]:
    """The tensors that vectors are injected at: the logits, or every tensor of a sequence or mapping."""
    output = getattr(output, "logits", output)
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return [x for value in values for x in _outputs(value)]


def _typical(blocks: Sequence[Block]) -> Tensor:
    """Mean eigenvalue over all blocks together."""
    if not blocks:
        return torch.ones(())
    traces = torch.stack([b.mean_eigenvalue.float() * b.dimension for b in blocks])
    return (traces.sum() / sum(b.dimension for b in blocks)).clamp(min=torch.finfo(torch.float32).tiny)
