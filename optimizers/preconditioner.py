"""What optimizers with curvature share of a step: renewals and inverses, reports, checkpoints."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvature.linalg import full_precision
from curvature.preconditioners import Block, invert
from curvature.recording import is_sharded
from optimizers.distributed.sharding import local, part, totals, whole
from optimizers.recording.recorder import Recording
from optimizers.steps.finite_check import judged

SHARE = 0.05  # of a factor's mean eigenvalue, added to it where no damping is given


class SecondOrder(Recording):
    """Base of `KFAC`, which says what a step does. Arguments as there."""

    # -- for a step

    # torch.amp.GradScaler hands `grad_scale` and `found_inf` over, and leaves the gradients as they are
    _step_supports_amp_scaling = True

    def _judged(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Take the scale of a `GradScaler` out of gradients, and say on their device whether all are finite."""
        good = judged(gradients.values(), getattr(self, "grad_scale", None))
        found = getattr(self, "found_inf", None)
        good = good & (found.to(good.device) == 0) if isinstance(found, Tensor) else good
        trained = list(self._trained().values())
        return totals((~good).float().expand(len(trained)), trained).sum() == 0  # of other shards, too

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
        found = {name: p.grad for name, p in self._trained().items() if p.grad is not None}
        dense = {name: g.to_dense() if g.layout != torch.strided else g for name, g in found.items()}
        return {name: local(g) for name, g in dense.items()}

    def _skip(self) -> None:
        """Leave a batch out that is not finite."""
        self.skipped += 1
        self._discard()
        self.health.entries.append({"step": self.steps, "accepted": False})

    def _knows_nothing(self) -> bool:
        """Whether all batches were empty so far, on all processes."""
        found = self._was_empty and not self.factors.blocks
        if self.team.processes.size > 1:
            is_new = not self.team.statistics.layout  # the same everywhere
            found = is_new and self.team.processes.largest([float(not found)]) == [0.0]
        return found

    def _renew(self) -> None:
        """Take new statistics into the factors, and invert the blocks whose turn it is."""
        if self._listener.problem:
            raise RuntimeError(self._listener.problem)
        renews = self.schedule.renews(self.steps)
        with self.health.timed("factors"):
            self.passes.settle()
            for taken in self._pending:
                taken(self._loss_scale())
            self._pending.clear()
            self._sent.clear()
            sums: dict[tuple[str, str], Tensor] | None = None
            if renews and self.team.processes.size > 1:
                self.team.statistics.launch()  # first, as where the backward pass did so: one order wherever it can be
                if not any(map(is_sharded, self._trained().values())):
                    self.team.processes.check_alike(self._gradients())
                self.factors.gather(self.passes.total.curvature, self.team.processes.objects)
                sums = self.team.statistics.finish()
            if not self.factors.blocks:
                raise RuntimeError(
                    f"{type(self).__name__}.step: no forward pass of the model was seen; call the model that the "
                    "optimizer was given"
                )
            found = self.passes.take()
            if sums is not None:
                found.curvature.blocks = self.factors.statistics_from(sums)
                found.outputs = {key: x for (name, key), x in sums.items() if not name}
            self.factors.update_average(found.curvature, self._arguments["factor_decay"])
            self.outputs.update(found.outputs)
        blocks, due = self._due()
        with self.health.timed("inverses"):
            self._invert([b for b in due if self.team.workers.makes(b)])
            self.team.workers.exchange(due)
        self._entry: dict[str, Any] = {"step": self.steps, "renewed": renews, "inverted": len(due)}
        self._inverted = sum(b.cost for b in due) / sum(b.cost for b in blocks)

    def _due(self) -> tuple[list[Block], list[Block]]:
        """Blocks that were seen, and those of them whose turn it is to be inverted."""
        blocks = [b for b in self.factors.blocks if b.updates]
        workers = self.team.workers
        workers.assign(blocks)
        turns = self.schedule.inverts(self.steps, [b.cost for b in blocks])
        return blocks, [b for b, turn in zip(blocks, turns, strict=True) if turn or not workers.is_ready(b)]

    def _is_ordinary(self) -> bool:
        """Whether a step has nothing to do for the curvature."""
        blocks = self.factors.blocks
        is_quiet = not self._pending and not self.schedule.renews(self.steps) and not self.passes.total.curvature
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
            if self._entry["renewed"]:
                self.schedule.adjust(self.team.processes.mean)
        self._last = now, spent

    def _invert(self, blocks: Sequence[Block]) -> None:
        options = self._options()
        dampings = [options[b.names[0]]["damping"] if b.names[0] in options else None for b in blocks]
        for damping in dict.fromkeys(dampings):
            alike = [b for b, own in zip(blocks, dampings, strict=True) if own == damping]
            invert(alike, SHARE, damping)

    @full_precision()
    def _solved(self, right: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``(M + damping I)^-1`` times some gradients; parameters that no curvature was seen of get the average."""
        parameters, workers = self._trained(), self.team.workers
        right = {name: whole(g, parameters[name]) for name, g in right.items()}
        found: dict[str, Tensor] = {}
        ready = [b for b in self.factors.blocks if workers.is_ready(b) and all(name in right for name in b.names)]
        for block in ready:
            if workers.keeps(block):
                found |= dict(zip(block.names, block.solve([right[name] for name in block.names]), strict=True))
        workers.gathered(ready, found, right)
        left = [name for name in right if name not in found]
        if left:
            typical = _typical(ready)
            found |= {name: right[name] / typical.to(right[name].dtype) for name in left}
        return {name: part(u, parameters[name]) for name, u in found.items()}

    # -- looking and keeping

    def report(self) -> str:
        """A table of every parameter: how it is preconditioned, factor shapes, memory, and why where it falls back.

        After a first forward pass, and before a first step, the memory is what will be kept at most.
        """
        rows = [("parameter", "preconditioned by", "kept", "MB", "why")]
        seen: set[str] = set()
        total = 0.0
        for block in self.factors.blocks:
            megabytes = (block.bytes if block.is_ready else block.expected_bytes) / 1e6
            total += megabytes
            rows.append((", ".join(block.names), block.structure, block.describe(), f"{megabytes:.2f}", block.reason))
            seen |= set(block.names)
        for name, p in self.model.named_parameters():
            if name not in seen:
                given = {id(q) for group in self.param_groups for q in group["params"]}
                why = "needs a first forward pass" if id(p) in given else "in no parameter group: use add_param_group"
                why = why if p.requires_grad else "does not require a gradient"
                rows.append((name, "nothing yet" if p.requires_grad else "not trained", "", "", why))
        momenta = sum(p.numel() * p.element_size() for p in self._trained().values()) / 1e6
        rows.append(("momentum and displacement", "", "", f"{2 * momenta:.2f}", ""))
        rows.append(("in all", "", "", f"{total + 2 * momenta:.2f}", "kept between steps"))
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, self._substitute] if self._substitute else lines)

    def stats(self) -> dict[str, Any]:
        """How the run goes: the last step's numbers, counts of events, seconds by part, conditions of the factors.

        The conditions (largest over least eigenvalue of each damped block, by its first parameter) are computed here.
        """
        intervals = {"factor_every": self.schedule.factor_every, "decompose_every": self.schedule.decompose_every}
        conditions = {b.names[0]: b.condition() for b in self.factors.blocks if b.is_ready}
        outliers = sum(block.outliers for block in self.factors.blocks)
        return super().stats() | intervals | {"outliers": outliers, "conditions": conditions}

    kept: tuple[str, ...] = ("steps", "skipped")

    def _state(self) -> dict[str, Any]:
        """That of any optimizer, with the curvature under "curvature" and all else under "kfac"."""
        self._settle()
        own = torch.optim.Optimizer.state_dict(self)
        return own | {"curvature": self.factors.state_dict(), "kfac": self._whole()}

    def _whole(self) -> dict[str, Any]:
        """What belongs to no parameter alone, but for the curvature."""
        own = {k: getattr(self, k) for k in self.kept} | {"health": self.health.state(), "shapes": self._shapes()}
        own["intervals"] = [self.schedule.factor_every, self.schedule.decompose_every]
        own |= {"output_scale": self.outputs.scale, "output_size": self.outputs.size}
        own["generator"] = None if self.generator is None else self.generator.get_state()
        return own

    def _restore(self, state_dict: dict[str, Any]) -> None:
        """Take what `_state` gave; tensors move to the parameters' device."""
        state_dict = copy.copy(state_dict)
        own, factors = dict(state_dict.pop("kfac")), state_dict.pop("curvature")
        self._check_shapes(own.pop("shapes"))
        self._open = None
        torch.optim.Optimizer.load_state_dict(self, state_dict)
        self._discard()
        if self._team is not None:
            self._team.workers.made.clear()
        device = next(p for group in self.param_groups for p in group["params"]).device
        generator, scale = own.pop("generator"), own.pop("output_scale")
        self.outputs.scale, self.outputs.size = None if scale is None else scale.to(device), own.pop("output_size")
        self.health.restore(own.pop("health"))
        self.schedule.factor_every, self.schedule.decompose_every = own.pop("intervals")
        for name, value in own.items():
            setattr(self, name, value.to(device) if isinstance(value, Tensor) else value)
        self.factors.load_state_dict(factors, device)
        self.generator = None if generator is None else torch.Generator("cpu")
        if self.generator is not None:
            try:
                self.generator.set_state(generator.cpu())
            except RuntimeError:  # of another kind of device
                self.generator.manual_seed(int(self._arguments["seed"]) + self.steps)
        self._expect()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy or a pickle trains a copy of the model (the same, where both are copied or pickled together)."""
        groups = [dict(group) for group in self.param_groups]
        return _again, (type(self), self.model, self._arguments, groups, self.defaults, self.state_dict())


def _again(kind: Any, model: nn.Module, arguments: Any, groups: Any, defaults: Any, state: dict[str, Any]) -> Any:
    new = kind(model, **arguments)
    new.param_groups, new.defaults = groups, defaults
    new.load_state_dict(state)
    return new


def _typical(blocks: Sequence[Block]) -> Tensor:
    """Mean eigenvalue over all blocks together."""
    if not blocks:
        return torch.ones((), device="cpu")
    traces = torch.stack([b.mean_eigenvalue.float() * b.dimension for b in blocks])
    return (traces.sum() / sum(b.dimension for b in blocks)).clamp(min=torch.finfo(torch.float32).tiny)
