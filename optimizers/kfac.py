"""KFAC in place of SGD: the training loop stays as it is, or passes a closure."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from curvature import Injection, Jacobian, isotropic
from curvature.recording import force_eager
from optimizers.arguments import check_flag, check_numbers
from optimizers.checkpoints import packed, unpacked
from optimizers.distributed.processes import Distributed
from optimizers.distributed.sharding import refuse_shards
from optimizers.steps.adaptive import Adaptive
from optimizers.steps.closure_replay import Replay, State
from optimizers.steps.residuals import (
    FoundResiduals,
    ResidualSteps,
    Trials,
    described,
    refuse_arguments,
    without_residuals,
)
from optimizers.steps.trust_region import PlainSteps
from optimizers.steps.updates import Move, are_finite, take

PLAIN_EVERY = 10, 10  # steps between renewals of the factors, and between inversions of a block
ADAPTIVE_EVERY = 3, 3  # the same, where few and long steps are taken
PATIENCE = 3  # so many steps in a row without a decomposition are an error
ADAPTIVE_VECTORS = 2  # sent back at a renewal, then


class KFAC(PlainSteps):
    """Natural-gradient descent with Kronecker-factored curvature (arXiv:1503.05671; shared weights: arXiv:2311.00636).

    Usage:
        opt = KFAC(model)
        for x, y in loader:
            opt.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); opt.step()

    or, with step size, momentum and damping from an exact model of each batch, for large batches:
        opt = KFAC(model, adaptive=True)
        for x, y in loader:
            def closure():
                opt.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); return loss
            opt.step(closure)

    The curvature of each layer comes from vectors that are sent back from the model's output right after the forward
    pass, at the steps that renew it. Every parameter that requires a gradient is trained: those without Kronecker
    factors by a diagonal of the same curvature; `report()` says which and why.

    Without `adaptive` the displacement is ``-step * (M + damping)^-1 m`` with m the debiased running mean of the
    gradients. Isotropic curvature knows no loss and hence no unit of the step, so the step size finds itself: it grows
    while the gradient still points along the last displacement and shrinks when it points back, inside a trust region
    on the predicted change of the outputs and on the length of each layer's step.

    With `adaptive` the layers' directions and the last displacement span the exact damped quadratic model of the loss
    of the batch, and its minimum is the step (arXiv:1503.05671, sections 6.4 to 7, there with one direction for all
    layers). Damping follows the reduction ratio (Levenberg-Marquardt); a step that makes the loss worse or not finite
    is rolled back and tried again with more damping. What the next batch says of a step shortens those that follow.

    A closure that returns residuals r (M,) in place of a loss means ``1/2 ||r||^2``, as for `NaturalGradient`; it may
    differentiate the model, and calls no ``backward``:
        def closure():
            return torch.cat([interior(model) / len(x) ** 0.5, boundary(model) / len(y) ** 0.5])
    The factors are those of each layer and piece of ``J^T J`` (`residual_blocks`; arXiv:2405.15603), anew at
    every step, and the step is the minimum of the exact quadratic model over the directions that they give layer by
    layer and the last displacements. A step that raises the loss is never taken. `damping` is added to ``J^T J`` then,
    in residual^2 / parameter^2 (None: Levenberg-Marquardt), `momentum` says only whether displacements are directions
    (zero: no), and `adaptive` and what is said of factors and their renewal has no effect.

    Args:
        model: the module that the training loop calls.
        lr: multiplies the step, without unit; for schedulers. The adaptation slows down in proportion below one.
        damping: added to the curvature, in units of loss / parameter^2 for a loss of ``1/2 ||f||^2`` (as in
            `curvature.isotropic`). None: factored, 0.05 of its mean eigenvalue for each Kronecker factor.
        momentum: decay of the running mean of the gradients, 0 to 1; not with `adaptive`, which finds its own.
        weight_decay: decoupled, ``p -= lr * weight_decay * p`` a step.
        loss: the loss module; needed by injections other than `isotropic` only.
        inject: what is sent back (`curvature.isotropic()` unless given); `curvature.empirical()` takes the backprops of
            the training loop's own backward pass, for a loss that is a mean over the batch unless `loss` says "sum".
        sharing: "expand" or "reduce", for weights used at several places of a sample.
        adaptive: find step size, momentum and damping; `step` then needs a closure.
        factor_decay: decay of the running averages of the factors, per renewal.
        factor_every: steps from one renewal of the factors to the next; 10, or 3 with `adaptive`. At first they are
            shorter, one step more every ten steps.
        decompose_every: steps from one inversion of a block to the next; likewise. Blocks take turns.
        max_overhead: choose both intervals by timing, so that they take at most this part of the rest of a step: 0.3,
            say. Then runs are no longer repeatable to the last bit.
        seed: of the random vectors; the global random state is not touched.
        distributed: how the processes of torch.distributed share the work, if there are several.

    Raises:
        TypeError, ValueError: an argument of the wrong kind or out of range, by name.
    """

    def __init__(
        self, model: nn.Module, lr: float = 1.0, *, damping: float | None = None, momentum: float = 0.9,
        weight_decay: float = 0.0, loss: Any = None, inject: Injection | None = None, sharing: str = "expand",
        adaptive: bool = False, factor_decay: float = 0.9, factor_every: int | None = None,
        decompose_every: int | None = None, max_overhead: float | None = None, seed: int = 0,
        distributed: Distributed | None = None,
    ) -> None:  # fmt: skip
        check_flag("adaptive", adaptive)
        if adaptive:
            refuse_shards(model, "adaptive")
        options = {"lr": lr, "damping": damping, "momentum": momentum, "weight_decay": weight_decay}
        intervals = ADAPTIVE_EVERY if adaptive else PLAIN_EVERY
        arguments = {
            "loss": loss, "inject": isotropic(ADAPTIVE_VECTORS if adaptive else 1) if inject is None else inject,
            "sharing": sharing, "adaptive": adaptive,
            "factor_decay": factor_decay, "factor_every": intervals[0] if factor_every is None else factor_every,
            "decompose_every": intervals[1] if decompose_every is None else decompose_every,
            "max_overhead": max_overhead, "seed": seed, "distributed": distributed,
        }  # fmt: skip
        super().__init__(model, options, arguments)
        self.adaptive = Adaptive() if adaptive else None
        self.replay: Replay | None = None  # of the batch at hand
        self.residuals: ResidualSteps | None = None  # once a closure has returned such
        self._is_loss = False  # once a closure has returned a loss
        self._stuck = 0  # steps in a row that were not taken since a decomposition failed
        self._expect()

    def _records(self) -> bool:
        silent = self.replay is not None and self.replay.silent
        return self.residuals is None and super()._records() and not silent

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient.

        Args:
            closure: re-evaluates the model on the batch and returns the loss, as for `torch.optim.LBFGS`. With
                `adaptive` it is needed, and called several times: with the same random numbers and without effect on
                buffers (of BatchNorm) after the first, with ``loss.backward()`` left out where only the loss is needed.
                One that returns residuals (M,) is called several times too, once more at the first step.

        Returns:
            The loss before the step, if there is a closure.

        Raises:
            RuntimeError: the model was never called with gradients enabled, so that its curvature is unknown.
            TypeError: `adaptive`, and no closure, or one that does not return a loss; no closure, or a loss, after
                residuals, and the other way round.
            ValueError: residuals, and an argument that has no meaning for them.
        """
        return self._step(closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        value, move = self._prepared(closure)
        if move is not None:
            take(move)  # this is what torch.compile(opt.step) compiles
        return value

    @torch._disable_dynamo
    def _prepared(self, closure: Callable[[], Any] | None) -> tuple[Any, Move | None]:
        """All of a step but, in a plain one, the last thing to do."""
        if closure is not None and not callable(closure):
            raise TypeError(f"closure: expected a function that computes the loss, found {type(closure).__name__}")
        for group in self.param_groups:
            check_numbers(group)
        if closure is None and self._is_at_rest():
            return None, None
        self._move = None
        self._listener.reset()
        if closure is not None and hasattr(self, "found_inf"):
            raise RuntimeError(
                f"{type(self).__name__}.step: GradScaler takes no closure; use bfloat16 without a scaler"
            )
        start, steps = time.perf_counter(), self.steps
        with self.health.watching(), force_eager() if self._differentiates(closure) else nullcontext():
            value = self._loss_step(closure) if self.residuals is None else None
            if self.residuals is not None:
                value = self._residual_step(closure, self.residuals)
        if self._steps > steps:
            self.health.entries[-1]["seconds"] = time.perf_counter() - start
            if self.residuals is None:
                self._measure()
        self._expect()
        move, self._move = self._move, None
        return value, move

    def _differentiates(self, closure: Callable[[], Any] | None) -> bool:
        """Whether the closure's model may be looked into or differentiated twice, which compiled code cannot be."""
        repeats = self.adaptive is not None or self._arguments.get("line_search", False)
        return closure is not None and (repeats or not self._is_loss)

    def _is_at_rest(self) -> bool:
        """Whether nothing could move: `torch.distributed.checkpoint` takes such a step to see what the state holds."""
        is_unable = self.adaptive is not None or not self.factors.blocks
        return self.residuals is None and is_unable and not any(group["lr"] for group in self.param_groups)

    def _loss_step(self, closure: Callable[[], Any] | None) -> Any:
        """A step with a loss; where a first closure returns residuals instead, only that is kept."""
        before = State(self.model) if closure is not None and not self._is_loss else None
        try:
            value = self._of_loss(None if closure is None else without_residuals(closure))
            self._is_loss |= closure is not None
            return value
        except FoundResiduals:
            self._discard()
            if before is None:
                raise TypeError("KFAC.step: the closure returned residuals, and a loss before") from None
            before.restore()
            self._check_for_residuals()
            self.generator = self.outputs.scale = None
            self.residuals = ResidualSteps()
            return None

    def _of_loss(self, closure: Callable[[], Any] | None) -> Any:
        if self.adaptive is not None:
            return self._adaptive_step(closure, self.adaptive)
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        self._plain_step(self._gradients())
        return value

    def _attempted(self, move: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What to remember of a step; none is taken where a decomposition fails, unless that goes on."""
        try:
            entry, self._stuck = move(), 0
            return entry
        except torch.linalg.LinAlgError:
            self._stuck += 1
            if self._stuck == PATIENCE:
                raise
            return {"accepted": False, "rollbacks": 0}

    # -- with a closure of residuals

    def _check_for_residuals(self) -> None:
        """Refuse what has no meaning for residuals."""
        refuse_shards(self.model, "closure")
        refuse_arguments(self._arguments, self.block)

    def _residual_step(self, closure: Callable[[], Any] | None, residuals: ResidualSteps) -> Tensor:
        if closure is None:
            raise TypeError(f"{type(self).__name__}.step: the closure returned residuals before; pass it at every step")
        with self.health.timed("closure"):
            trials = Trials(self.model, closure, self.team.processes)
        loss = trials.values.square().sum() / 2
        if not bool(torch.isfinite(loss)):
            trials.before.restore_buffers()
            self._skip()
            return loss
        for name in ("damping", "momentum"):
            self._shared(name)
        try:
            with self.health.timed("jacobian"):
                jacobian = trials.jacobian(self.model)
            self._check_trained(jacobian.shapes)
            if not are_finite(jacobian.transposed(trials.values).values()):  # a root of zero, say
                self._skip()
                return loss
            entry = self._attempted(lambda: self._moved(jacobian, trials, residuals))
        finally:
            trials.after.restore()
        self.health.counts["rollbacks"] += entry.pop("rollbacks")
        self.health.counts["failures"] += not entry["accepted"]
        self.health.entries.append({"step": self.steps, "loss": float(loss)} | entry)
        self.steps += 1
        return loss

    def _moved(self, jacobian: Jacobian, trials: Trials, residuals: ResidualSteps) -> dict[str, Any]:
        """Take the step, or leave the parameters as they are; what to remember of it."""
        with self.health.timed("step"):
            return residuals.move(jacobian, trials, self._trained(), self._options())

    # -- with a closure

    def _adaptive_step(self, closure: Callable[[], Any] | None, adaptive: Adaptive) -> Tensor:
        if closure is None:
            raise TypeError(
                "KFAC(adaptive=True).step: pass a closure that computes the loss of the batch, as for torch.optim.LBFGS"
            )
        self.replay = replay = Replay(self.model, closure, self.team.processes.mean)
        try:
            loss = self._evaluated(replay, adaptive)
            gradients = self._gradients()
            if not gradients or not _finite(loss, gradients) or self._knows_nothing():
                if gradients:
                    self._skip()
                return loss
            self._renew()
            with self.health.timed("direction"):
                groups = self._groups(self._solved(gradients))
            with self.health.timed("model"):
                rates = {name: group["lr"] for name, group in self._options().items()}
                entry = self._attempted(lambda: adaptive.move(replay, loss, gradients, groups, rates))
            for name, group in self._options().items():
                if group["weight_decay"] and name in gradients and entry["accepted"]:
                    self._trained()[name].mul_(1 - group["lr"] * group["weight_decay"])
        finally:
            self.replay = None
        self.health.counts["rollbacks"] += entry.pop("rollbacks")
        self.health.counts["failures"] += not entry["accepted"]
        self.health.entries.append(self._entry | entry)
        self.steps += 1
        return loss

    def _evaluated(self, replay: Replay, adaptive: Adaptive) -> Tensor:
        """The loss and its gradients; where they are not finite because of the last step, that is undone."""
        with self.health.timed("closure"):
            loss = replay.first()
        if _finite(loss, self._gradients()) or not adaptive.last:
            return loss
        self._discard()
        there = adaptive.undo(dict(self.model.named_parameters()))
        with self.health.timed("closure"):
            again = replay.again()
        if _finite(again, self._gradients()):
            self.health.counts["rollbacks"] += 1
            adaptive.forget()
            return again
        adaptive.redo(dict(self.model.named_parameters()), there)  # it was the batch
        return again

    def _groups(self, directions: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Descent directions of neighbouring layers, each to have a step size of its own."""
        layers = [
            {name: -directions[name] for name in block.names}
            for block in self.factors.blocks
            if all(name in directions for name in block.names)
        ]
        seen = {name for layer in layers for name in layer}
        rest = {name: -u for name, u in directions.items() if name not in seen}
        return Adaptive.grouped([*layers, rest] if rest else layers)

    def report(self) -> str:
        """A table of every parameter: how it is preconditioned, factor shapes, and why where it falls back."""
        return super().report() if self.residuals is None else described(self.residuals.blocks, self.model)

    def _kind(self) -> dict[str, Any]:
        """What a state must have in common with an optimizer that takes it."""
        own = {"adaptive": self.adaptive is not None, "sharing": self._arguments["sharing"]}
        return {"curvature": self.block, **own}

    def _blank(self, p: Tensor) -> dict[str, Any]:
        return {} if self.adaptive is not None else super()._blank(p)

    def state_dict(self) -> dict[str, Any]:
        """As for any optimizer: tensors, numbers and strings; see `optimizers.checkpoints` for the form."""
        return packed(self, self._state(), self._kind(), self._blank)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a `state_dict`, also one of earlier code; its tensors are copied, to device and dtype of the parameters.

        Raises:
            TypeError: not a dict.
            ValueError: it is of another optimizer, model or choice of `adaptive`, `sharing` or `solver`, of newer code,
                or damaged; what was found is said, and nothing was changed.
        """
        self._restore(unpacked(self, state_dict, self._kind(), self._whole()))

    def _whole(self) -> dict[str, Any]:
        state = super()._whole()
        if self.adaptive is not None:
            state["adaptive"] = vars(self.adaptive).copy()
        if self.residuals is not None:
            state["residuals"] = self.residuals.state()
        return state

    def _restore(self, state_dict: dict[str, Any]) -> None:
        own = dict(state_dict["kfac"])
        adaptive, residuals = dict(own.pop("adaptive", {})), own.pop("residuals", None)
        super()._restore(state_dict | {"kfac": own})
        self.residuals = None if residuals is None else ResidualSteps()
        if self.residuals is not None:
            self.residuals.restore(residuals, self._trained())
        if self.adaptive is not None and adaptive:
            parameters = self._trained()
            for what in ("last", "start"):
                adaptive[what] = {name: d.to(parameters[name]) for name, d in adaptive[what].items()}
            vars(self.adaptive).update(adaptive)


def _finite(loss: Tensor, gradients: Mapping[str, Tensor]) -> bool:
    return are_finite([loss, *gradients.values()])
