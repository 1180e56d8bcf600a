"""KFAC in place of SGD: the training loop stays as it is."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvature import Block, Injection, Listener, RunningFactors, Tape, empirical, isotropic
from optimizers.updates import adapted, within_trust

FIRST_CHANGE = 0.1  # root-mean-square change of an output entry that the first step aims at
ADAPTATION = 0.3  # how fast the step size follows the slopes
RELATIVE_LENGTH = 0.05  # largest step as a fraction of the norm of the parameters
GROWTH = 2.0  # how much more than in recent steps a step may change the outputs
MEMORY = 0.9  # how fast that is forgotten
WARM_STEPS = 10  # factors and decompositions are renewed at each of the first steps
RELATIVE_DAMPING = 0.03


class KFAC(torch.optim.Optimizer):
    """Natural-gradient descent with Kronecker-factored curvature (arXiv:1503.05671; shared weights: arXiv:2311.00636).

    Usage:
        opt = KFAC(model)
        for x, y in loader:
            opt.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); opt.step()

    The curvature of each layer comes from vectors that are sent back from the model's output right after the forward
    pass, at the steps that renew it. Every parameter that requires a gradient is trained: those without Kronecker
    factors by a diagonal of the same curvature; `report()` says which and why.

    The displacement is ``-step * (M + damping I)^-1 m`` with m the debiased running mean of the gradients. Isotropic
    curvature knows no loss and hence no unit of the step, so the step size finds itself: it grows while the gradient
    still points along the last displacement and shrinks when it points back, inside a trust region on the predicted
    change of the outputs and on the length of the step.

    Args:
        model: the module that the training loop calls.
        lr: multiplies the step size, without unit; for schedulers. The adaptation slows down in proportion below one.
        damping: added to the curvature, in units of loss / parameter^2 for a loss of ``1/2 ||f||^2`` (as in
            `curvature.isotropic`). None: 0.03 times the geometric mean of the layer's and the model's mean eigenvalue.
        momentum: decay of the running mean of the gradients, 0 to 1.
        weight_decay: decoupled, ``p -= lr * weight_decay * p`` a step.
        loss: the loss module; needed by injections other than `isotropic` only.
        inject: what is sent back (`curvature.isotropic()` unless given); `curvature.empirical()` takes the backprops of
            the training loop's own backward pass, for a loss that is a mean over the batch unless `loss` says "sum".
        sharing: "expand" or "reduce", for weights used at several places of a sample.
        factor_decay: decay of the running averages of the factors, per renewal.
        factor_every: steps from one renewal of the factors to the next, after the first ten.
        decompose_every: steps from one eigendecomposition to the next, after the first ten.
        seed: of the random vectors; the global random state is not touched.

    Raises:
        TypeError, ValueError: an argument of the wrong kind or out of range, by name.
    """

    def __init__(
        self, model: nn.Module, lr: float = 1.0, *, damping: float | None = None, momentum: float = 0.9,
        weight_decay: float = 0.0, loss: Any = None, inject: Injection | None = None, sharing: str = "expand",
        factor_decay: float = 0.95, factor_every: int = 5, decompose_every: int = 10, seed: int = 0,
    ) -> None:  # fmt: skip
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: pass the model itself, not its parameters (found {type(model).__name__})")
        _check_range("lr", lr, 0.0, math.inf)
        _check_range("momentum", momentum, 0.0, 1.0, open_end=True)
        _check_range("weight_decay", weight_decay, 0.0, math.inf)
        _check_range("factor_decay", factor_decay, 0.0, 1.0, open_end=True)
        if damping is not None:
            _check_range("damping", damping, 0.0, math.inf)
        for name, value in (("factor_every", factor_every), ("decompose_every", decompose_every)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: expected a whole number of steps, at least 1, found {value!r}")
        inject = isotropic() if inject is None else inject
        if not isinstance(inject, Injection):
            raise TypeError(f"inject: expected curvature.isotropic() or another injection, found {inject!r:.80}")
        if loss is None and not isinstance(inject, type(isotropic()) | type(empirical())):
            raise ValueError(f"loss: {inject!r} needs the loss module, as in KFAC(model, loss=nn.CrossEntropyLoss())")
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not named:
            raise ValueError("model: no parameter requires a gradient")
        self.factors = RunningFactors(sharing)
        options = {"lr": lr, "damping": damping, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(list(named.values()), options)
        self._arguments: dict[str, Any] = {
            "loss": loss, "inject": inject, "sharing": sharing, "factor_decay": factor_decay,
            "factor_every": factor_every, "decompose_every": decompose_every, "seed": seed,
        }  # fmt: skip
        self.model, self.loss, self.inject = model, loss, inject
        self.factor_decay, self.factor_every, self.decompose_every = factor_decay, factor_every, decompose_every
        self._names = {id(p): name for name, p in model.named_parameters()}
        self.seed = seed
        self.generator: torch.Generator | None = None
        self.steps, self.skipped, self.decomposed_at = 0, 0, -1
        self.step_size: Tensor | None = None
        self.predicted: Tensor | None = None  # slope along the last displacement, at its start
        self.last_change: Tensor | None = None  # largest predicted change of the outputs in recent steps
        self.output_scale: Tensor | None = None  # root mean square of an output entry
        self.output_size = 1.0  # output entries per sample
        self._pending: list[tuple[Tape, list[Tensor | None], int]] = []
        me = weakref.ref(self)
        self._listener = Listener(model, lambda: _start(me()), lambda tape, output: _done(me(), tape, output))
        weakref.finalize(self, self._listener.remove)

    # -- capture

    def _renews_factors(self) -> bool:
        return torch.is_grad_enabled() and (self.steps < WARM_STEPS or self.steps % self.factor_every == 0)

    def _record(self, tape: Tape, output: Any) -> None:
        """Called with every recorded forward pass."""
        outputs = [x for x in _outputs(output) if x.is_floating_point() and x.requires_grad and x.ndim > 0]
        if not outputs or not tape.uses:
            return
        count = outputs[0].shape[0]
        with torch.no_grad():
            squares = torch.stack([x.detach().float().square().sum() for x in outputs]).sum()
            self.output_size = sum(x.numel() for x in outputs) / count
            self.output_scale = (squares / (count * self.output_size)).sqrt()
        if self.inject == empirical():
            self._listen_to_backward(tape, count)
            return
        if self.generator is None:
            self.generator = torch.Generator(outputs[0].device).manual_seed(self.seed)
        if len(outputs) > 1 and self.loss is not None:
            raise ValueError(
                f"KFAC: the model returned {len(outputs)} tensors, and loss= is of one; leave loss out (isotropic())"
            )
        vectors = [self.inject.vectors(x.detach(), self.loss, generator=self.generator).to(x.dtype) for x in outputs]
        with torch.autocast(outputs[0].device.type, enabled=False):
            self.factors.record(tape, outputs, vectors, count)

    def _listen_to_backward(self, tape: Tape, count: int) -> None:
        """Keep the backprops of the loss when the training loop sends them back."""
        found: list[Tensor | None] = [None] * len(tape.uses)
        scale = 1 if getattr(self.loss, "reduction", "mean") == "sum" else count

        def keep(index: int, number: int) -> Callable[[Sequence[Tensor]], None]:
            def hook(gradients: Sequence[Tensor]) -> None:
                if gradients[number] is not None:
                    found[index] = gradients[number].detach().reshape(tape.uses[index].shape) * scale

            return hook

        for use in tape.uses:
            if use.edge is not None:
                use.edge.node.register_prehook(keep(use.index, use.edge.output_nr))
        self._pending.append((tape, found, count))

    # -- step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient.

        Args:
            closure: as for `torch.optim.SGD`: re-evaluates the model and returns the loss.

        Raises:
            RuntimeError: the model was never called with gradients enabled, so that its curvature is unknown.
        """
        self._listener.reset()
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        gradients = {name: p.grad for name, p in self._trained().items() if p.grad is not None}
        if not gradients:
            return value
        if not torch.isfinite(torch.stack([g.float().sum() for g in gradients.values()]).sum()):
            self.skipped += 1
            self._pending.clear()
            self.factors.discard()
            return value
        self._renew()
        directions, energy, slope = self._directions(gradients)
        size = self._step_size(gradients, directions, energy)
        self._apply(directions, size)
        self.predicted = -size * slope
        self.steps += 1
        return value

    def _trained(self) -> dict[str, Tensor]:
        return {self._names[id(p)]: p for group in self.param_groups for p in group["params"]}

    def _options(self) -> dict[str, dict[str, Any]]:
        return {self._names[id(p)]: group for group in self.param_groups for p in group["params"]}

    def _renew(self) -> None:
        """Take new statistics into the factors, and decompose these when it is time."""
        for tape, backprops, count in self._pending:
            self.factors.record_backprops(tape, backprops, count)
        self._pending.clear()
        if not self.factors.blocks:
            raise RuntimeError("KFAC.step: no forward pass of the model was seen; call the model that KFAC was given")
        self.factors.fold(self.factor_decay)
        age = self.steps - self.decomposed_at
        if self.decomposed_at < 0 or self.steps < WARM_STEPS or age >= self.decompose_every:
            self.factors.decompose()
            self.decomposed_at = self.steps
        else:
            self.factors.decompose(only_new=True)

    def _directions(self, gradients: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """``u = (M + damping I)^-1 m``, its energy ``u^T M u`` and its slope ``lr m^T u``."""
        options, parameters = self._options(), self._trained()
        means = {
            name: _running_mean(self.state[parameters[name]], g, options[name]["momentum"])
            for name, g in gradients.items()
        }
        ready = [b for b in self.factors.blocks if b.updates and all(name in means for name in b.names)]
        typical = _typical(ready)
        found: dict[str, Tensor] = {}
        energy = torch.zeros_like(typical)
        for block in ready:
            damping = options[block.names[0]]["damping"]
            if damping is None:
                damping = RELATIVE_DAMPING * (typical * block.mean_eigenvalue).sqrt() + torch.finfo(typical.dtype).tiny
            us, part = block.solve([means[name] for name in block.names], damping)
            found |= dict(zip(block.names, us, strict=True))
            energy = energy + part.to(energy.dtype)
        for name in means.keys() - found.keys():  # no curvature seen: as if it were the model's average
            found[name] = means[name] / typical.to(means[name].dtype)
            energy = energy + (found[name].square().sum() * typical).to(energy.dtype)
        slopes = [options[name]["lr"] * (means[name] * u).sum().float() for name, u in found.items()]
        slope = torch.stack(slopes).sum()
        return found, energy, slope

    def _step_size(self, gradients: Mapping[str, Tensor], directions: Mapping[str, Tensor], energy: Tensor) -> Tensor:
        """The step size, adapted and inside the trust region; it is kept for the next step."""
        change = (energy / self.output_size).sqrt()
        tiny = torch.finfo(change.dtype).tiny
        lr = max(group["lr"] for group in self.param_groups)
        if self.step_size is None:
            self.step_size = FIRST_CHANGE / change.clamp(min=tiny)
        elif self.predicted is not None:
            last = {name: self.state[p].get("displacement") for name, p in self._trained().items()}
            moved = [(g * last[name]).sum().float() for name, g in gradients.items() if last[name] is not None]
            if moved:
                self.step_size = adapted(
                    self.step_size, torch.stack(moved).sum(), self.predicted, ADAPTATION * min(1.0, lr)
                )
        length = torch.stack([u.float().square().sum() for u in directions.values()]).sum().sqrt()
        # a tensor counts for at least one, so that parameters that start at zero can leave it
        size = torch.stack([p.float().square().sum().clamp(min=1) for p in self._trained().values()]).sum().sqrt()
        assert self.output_scale is not None
        reach = 1 + self.output_scale
        if self.last_change is not None:  # one hard batch among easy ones must not be answered with one long step
            reach = torch.minimum(reach, GROWTH * self.last_change)
        self.step_size = within_trust(self.step_size, change, reach, length, size, RELATIVE_LENGTH)
        taken = self.step_size * change
        self.last_change = taken if self.last_change is None else torch.maximum(taken, MEMORY * self.last_change)
        return self.step_size

    def _apply(self, directions: Mapping[str, Tensor], size: Tensor) -> None:
        options = self._options()
        for name, p in self._trained().items():
            direction, group = directions.get(name), options[name]
            if direction is None:
                self.state[p].pop("displacement", None)
                continue
            if group["weight_decay"]:
                p.mul_(1 - group["lr"] * group["weight_decay"])
            displacement = direction * (-size * group["lr"]).to(p.dtype)
            p.add_(displacement)
            self.state[p]["displacement"] = displacement

    # -- looking and keeping

    def report(self) -> str:
        """A table of every parameter: how it is preconditioned, factor shapes, memory, and why where it falls back."""
        rows = [("parameter", "preconditioned by", "kept", "MB", "why")]
        seen: set[str] = set()
        for block in self.factors.blocks:
            megabytes = sum(t.numel() * t.element_size() for t in block.state().values() if isinstance(t, Tensor)) / 1e6
            rows.append((", ".join(block.names), block.structure, block.describe(), f"{megabytes:.2f}", block.reason))
            seen |= set(block.names)
        for name, p in self.model.named_parameters():
            if name not in seen:
                why = "needs a first forward pass" if p.requires_grad else "does not require a gradient"
                rows.append((name, "nothing yet" if p.requires_grad else "not trained", "", "", why))
        widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
        return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)

    def state_dict(self) -> dict[str, Any]:
        """As for any optimizer, with the curvature under "curvature": plain tensors and numbers."""
        own = {
            k: getattr(self, k) for k in ("steps", "skipped", "decomposed_at", "step_size", "predicted", "last_change")
        }
        own |= {"output_scale": self.output_scale, "output_size": self.output_size}
        own["generator"] = None if self.generator is None else self.generator.get_state()
        return super().state_dict() | {"curvature": self.factors.state_dict(), "kfac": own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a `state_dict` of an optimizer over the same parameters; tensors move to the parameters' device."""
        state_dict = copy.copy(state_dict)
        own, factors = dict(state_dict.pop("kfac")), state_dict.pop("curvature")
        super().load_state_dict(state_dict)
        device = next(iter(self._trained().values())).device
        generator = own.pop("generator")
        for name, value in own.items():
            setattr(self, name, value.to(device) if isinstance(value, Tensor) else value)
        self.factors.load_state_dict(factors, device)
        if generator is not None:
            self.generator = torch.Generator(device)
            self.generator.set_state(generator.cpu())

    def __deepcopy__(self, memo: dict[int, Any]) -> KFAC:
        """A copy that trains a copy of the model (the same copy, where both are copied together)."""
        new = type(self)(copy.deepcopy(self.model, memo), **copy.deepcopy(self._arguments, memo))
        memo[id(self)] = new
        new.param_groups = [g | {"params": [memo[id(p)] for p in g["params"]]} for g in self.param_groups]
        new.load_state_dict(copy.deepcopy(self.state_dict()))
        return new


def _start(optimizer: KFAC | None) -> Tape | None:
    return Tape(optimizer.model) if optimizer is not None and optimizer._renews_factors() else None


def _done(optimizer: KFAC | None, tape: Tape, output: Any) -> None:
    if optimizer is not None:
        optimizer._record(tape, output)


def _outputs(output: Any) -> list[Tensor]:
    """The tensors that vectors are injected at: the logits, or every tensor of a sequence or mapping."""
    output = getattr(output, "logits", output)
    if isinstance(output, Tensor):
        return [output]
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple | list) else ()
    return [x for value in values for x in _outputs(value)]


def _running_mean(state: dict[str, Any], gradient: Tensor, decay: float) -> Tensor:
    """The debiased running mean of a parameter's gradients, kept in its state."""
    if "momentum_buffer" not in state:
        state["momentum_buffer"], state["weight"] = torch.zeros_like(gradient), 0.0
    state["weight"] = decay * state["weight"] + (1 - decay)
    return state["momentum_buffer"].lerp_(gradient, 1 - decay) / state["weight"]


def _typical(blocks: Sequence[Block]) -> Tensor:
    """Mean eigenvalue over all blocks together."""
    if not blocks:
        return torch.ones(())
    traces = torch.stack([b.mean_eigenvalue.float() * b.dimension for b in blocks])
    return (traces.sum() / sum(b.dimension for b in blocks)).clamp(min=torch.finfo(torch.float32).tiny)


def _check_range(name: str, value: Any, low: float, high: float, open_end: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}: expected a number, found {type(value).__name__}")
    if not low <= value <= high or (open_end and value == high):
        raise ValueError(f"{name}: expected {low} to {high}{' (exclusive)' if open_end else ''}, found {value}")
