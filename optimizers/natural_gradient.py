"""The natural gradient without an approximation of the curvature, for small and medium networks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from curvature import Injection, Jacobian, LeastSquares, Tape, WholeCurvature, WrittenOut, exact, isotropic
from optimizers.base import check_flag
from optimizers.kfac import KFAC
from optimizers.quadratic import GROW, next_damping
from optimizers.replay import Replay, State
from optimizers.updates import are_finite, inner

HALVINGS = 30  # of the step, at most
TRIES = 12  # dampings tried before a step is given up
FIRST = 1e-3  # the first damping, relative to the largest eigenvalue


class NaturalGradient(KFAC):
    """Natural-gradient or Gauss-Newton steps of all parameters together, solved for exactly.

    Usage: the training loop as it is,
        opt = NaturalGradient(model, loss=nn.CrossEntropyLoss())
        for x, y in loader:
            opt.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); opt.step()

    or a closure that returns residuals r (M,) and calls no backward; the loss is then ``1/2 ||r||^2``:
        opt = NaturalGradient(model)
        def closure():
            return torch.cat([interior(model) / len(x) ** 0.5, boundary(model) / len(y) ** 0.5])
        for _ in range(60):
            loss = opt.step(closure)

    In a training loop the curvature G is that of the batch, by vectors sent back from the model's output right after
    the forward pass, as in `KFAC`; so are the step size, the trust region, and `adaptive`. The direction is
    ``(G + damping)^-1 g``. A step keeps the batch's activations, and its backprops for each of the vectors.

    Residuals may differentiate the model by ``torch.autograd.grad(..., create_graph=True)``, to any order. The step
    ``d = -J^+ r`` is solved for in the smaller of parameter and sample space (energy natural gradient,
    arXiv:2302.13163; in sample space arXiv:2402.10680), and halved until the loss stops falling, up to 30 times. Double
    precision is recommended: the condition number of the problem is squared.

    Args:
        model: its parameters that require a gradient are trained.
        lr: multiplies the step, without unit; for schedulers.
        damping: added to G or ``J^T J``, in units of loss / parameter^2. None: for residuals zero, so that the step is
            the shortest of all that solve the linear problem, eigenvalues below 50 eps of the largest left out; in a
            training loop 0.05 of the mean eigenvalue of G in the smaller of parameter and sample space.
        momentum: of the direction, 0 to 1: the step solves for what it leaves (SPRING, arXiv:2401.10190).
        weight_decay: decoupled, ``p -= lr * weight_decay * p`` a step.
        solver: "woodbury" solves in sample space where that is smaller: the Gram matrix of the rows from activations
            and backprops; "cg" by conjugate gradients, preconditioned by KFAC, from the last solution on; "dense" keeps
            the running average of the whole matrix, "diagonal" that of its diagonal. Residuals take "woodbury".
        loss: the loss module, needed by injections other than `curvature.isotropic` and `curvature.empirical`.
        inject: what is sent back: `curvature.exact()` for the Fisher or Gauss-Newton matrix of the batch if the loss is
            given, else `curvature.isotropic()`; `curvature.sampled()` where the outputs are many.
        adaptive: needs a closure. Of the loss: as for `KFAC`. Of residuals: no line search; the damping follows the
            reduction ratio (Levenberg-Marquardt), a step that makes the loss worse is tried again with more.
        line_search: needs a closure. Halve steps until the loss of the batch stops falling; residuals always do.
        factor_decay: decay of the running averages, where there are any.
        seed: of the random vectors; the global random state is not touched.

    Raises:
        TypeError, ValueError: an argument of the wrong kind or out of range, by name.
    """

    def __init__(
        self, model: nn.Module, lr: float = 1.0, *, damping: float | None = None, momentum: float = 0.0,
        weight_decay: float = 0.0, solver: str = "woodbury", loss: Any = None, inject: Injection | None = None,
        adaptive: bool = False, line_search: bool = False, factor_decay: float = 0.9, seed: int = 0,
    ) -> None:  # fmt: skip
        check_flag("line_search", line_search)
        if inject is None:
            inject = isotropic() if loss is None else exact()
        self.solver = solver
        super().__init__(
            model, lr, damping=damping, momentum=momentum, weight_decay=weight_decay, loss=loss, inject=inject,
            adaptive=adaptive, factor_decay=factor_decay, factor_every=1, decompose_every=1, seed=seed,
        )  # fmt: skip
        if adaptive and line_search:
            raise ValueError("line_search: adaptive=True finds the step size itself; choose one of the two")
        self._arguments = {
            "solver": solver, "loss": loss, "inject": inject, "adaptive": adaptive, "line_search": line_search,
            "factor_decay": factor_decay, "seed": seed,
        }  # fmt: skip
        self.damping: float | None = None  # of an adaptive run on residuals
        self._looking = False  # whether a closure is called to see what it returns
        self.of_residuals: bool | None = None  # whether the closure returns them

    def _curvature(self) -> WholeCurvature:
        return WholeCurvature(self.model, self.solver, getattr(self.loss, "reduction", "mean") == "sum")

    def _listen_to_backward(self, tape: Tape, outputs: Sequence[Tensor], count: int) -> None:
        """Send the gradient of the loss at the output back once more, sample by sample, when it arrives there."""
        if len(outputs) > 1:
            raise ValueError(
                f"inject: empirical() needs a model that returns one tensor, found {len(outputs)}; use isotropic()"
            )
        scale = 1 if getattr(self.loss, "reduction", "mean") == "sum" else count

        def sent(gradient: Tensor) -> None:
            handle.remove()  # what goes back now passes here too
            self.factors.record(tape, outputs, [(gradient * scale).detach()[None]], count)

        handle = outputs[0].register_hook(sent)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters.

        Args:
            closure: computes the loss, as for `torch.optim.LBFGS`, or the residuals r (M,), M at least 1, and then
                calls no ``backward``. With `adaptive`, `line_search` or residuals it is called several times, with the
                same random numbers; buffers are as after the first call. The first step calls it once more to see what
                it returns.

        Returns:
            The loss before the step, if there is a closure.

        Raises:
            TypeError: the closure returns no tensor, or there is none where one is needed.
            ValueError: what it returns is neither a scalar nor (M,), or was computed without gradients.
            RuntimeError: no closure, and the model was never called with gradients enabled.
        """
        if closure is None:
            if self.of_residuals:
                raise TypeError("NaturalGradient.step: pass the closure that returns the residuals")
            if self._arguments["line_search"]:
                raise TypeError("NaturalGradient(line_search=True).step: pass a closure that computes the loss")
            return super().step()
        if self.of_residuals is None:
            self.of_residuals = self._looked_at(closure)
        if self.of_residuals:
            return self._residual_step(closure)
        return self._searched_step(closure) if self._arguments["line_search"] else super().step(closure)

    @torch.no_grad()
    def _looked_at(self, closure: Callable[[], Any]) -> bool:
        """Whether a closure returns residuals, by a call that leaves no trace."""
        before, gradients = State(self.model), [(p, p.grad) for p in self.model.parameters()]
        self._looking = True
        try:
            with torch.enable_grad():
                found = closure()
        finally:
            self._looking = False
            before.restore()
            for p, g in gradients:
                p.grad = g
        if not isinstance(found, Tensor) or found.ndim > 1:
            raise TypeError(
                f"closure: expected the loss, a scalar tensor, or residuals (M,), found {_described(found)}"
            )
        return found.ndim == 1

    def _records(self) -> bool:
        return super()._records() and not self.of_residuals and not self._looking

    def _shared(self, name: str) -> Any:
        """An option that all groups have to agree on."""
        found = list(dict.fromkeys(group[name] for group in self.param_groups))
        if len(found) > 1:
            raise ValueError(f"{name}: all parameters are solved for together, found {found} in the parameter groups")
        return found[0]

    # -- steps of a loss

    def _solved(self, right: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Parameters that this batch did not use have a gradient of zero."""
        self._shared("damping")
        trained = self._trained()
        unused = {k: torch.zeros_like(trained[k]) for b in self.factors.blocks for k in b.names if k not in right}
        found = super()._solved({**right, **unused})
        return {name: found[name] for name in right}

    def _directions(self, gradients: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """``u = (G + damping)^-1 (g + damping * momentum * last u)`` and ``u^T G u``.

        This is the minimum of ``1/2 u^T G u - g^T u + damping/2 ||u - momentum * last u||^2`` (SPRING).
        """
        damping = getattr(self.factors.blocks[0], "damping", None) or 0.0
        parameters, momentum = self._trained(), self._shared("momentum")
        right = dict(gradients)
        if momentum:
            lasts = {name: self.state[parameters[name]].get("direction") for name in gradients}
            right |= {k: gradients[k] + damping * momentum * u for k, u in lasts.items() if u is not None}
        found = self._solved(right)
        if momentum:
            for name, u in found.items():
                self.state[parameters[name]]["direction"] = u.clone()  # the step scales u in place
        self._slopes = {name: inner(gradients[name], u).float() for name, u in found.items()}
        energies = [inner(right[k], u).float() - damping * inner(u, u).float() for k, u in found.items()]
        return found, torch.stack(energies).sum().clamp(min=0)

    def _searched_step(self, closure: Callable[[], Any]) -> Tensor:
        """Halve the step until the loss of the batch stops falling."""
        start = time.perf_counter()
        self._listener.reset()
        self.replay = replay = Replay(self.model, closure)
        try:
            with self.health.timed("closure"):
                loss = replay.first()
            gradients = self._gradients()
            if not gradients or not are_finite([loss, *gradients.values()]):
                self._skip()
                return loss
            self._renew()
            with self.health.timed("solve"):
                directions, _ = self._directions(gradients)
            displacement = self._displacement({name: -u for name, u in directions.items()})
            entry = self._by_length(displacement, float(loss), lambda: float(replay.loss()))
        finally:
            self.replay = None
        self._note({"loss": loss} | self._entry | entry, start)
        return loss

    # -- steps of residuals

    def _residual_step(self, closure: Callable[[], Any]) -> Tensor:
        start = time.perf_counter()
        before = State(self.model)
        with self.health.timed("closure"):
            residuals = _called(closure)
        after = State(self.model)
        values = residuals.detach()
        loss = values.square().sum() / 2
        if not bool(torch.isfinite(loss)):
            before.restore_buffers()
            self._skip()
            return loss
        if not any(group["lr"] for group in self.param_groups):  # a schedule that begins at zero
            self._note({"loss": loss, "accepted": True, "step_size": 0.0}, start)
            return loss
        with self.health.timed("jacobian"), torch.enable_grad():
            problem = LeastSquares(Jacobian.of(residuals, self.model))
        del residuals
        left = problem.jacobian.shapes.keys() - self._trained().keys()
        if left:
            raise ValueError(
                f"{min(left)} requires a gradient but is in no parameter group of the optimizer; use add_param_group"
            )

        def tried() -> float:
            before.restore()
            return float(_called(closure).detach().square().sum()) / 2

        try:
            if self.adaptive is not None:
                entry = self._by_damping(problem, values, float(loss), tried)
            else:
                damping = self._shared("damping") or 0.0
                with self.health.timed("solve"):
                    displacement = self._displacement(self._direction(problem, values, damping))
                entry = self._by_length(displacement, float(loss), tried) | {"damping": damping}
        finally:
            after.restore()
        self._note({"loss": loss} | entry, start)
        return loss

    def _direction(self, problem: LeastSquares, values: Tensor, damping: float) -> dict[str, Tensor]:
        """``-J^+ r``, or with momentum what is left to solve for after the last displacement, and that."""
        momentum, trained = self._shared("momentum"), self._trained()
        last = {name: self.state[trained[name]].get("displacement") for name in problem.jacobian.shapes}
        if not momentum or any(d is None for d in last.values()):
            return problem.solve(-values, damping)
        carried = {name: momentum * d for name, d in last.items()}
        rest = problem.solve(-values - problem.times(carried), damping)
        return {name: d + carried[name] for name, d in rest.items()}

    def _by_damping(
        self, problem: LeastSquares, values: Tensor, loss: float, tried: Callable[[], float]
    ) -> dict[str, Any]:
        """More damping until the loss falls (Levenberg-Marquardt)."""
        if self.damping is None:
            self.damping = FIRST * problem.largest
        _ = problem.spectrum  # every damping is solved for with the same
        ratio = math.nan
        for _ in range(TRIES):
            with self.health.timed("solve"):
                displacement = self._displacement(self._direction(problem, values, self.damping))
            expected = loss - float((values + problem.times(displacement)).square().sum()) / 2
            with self._moving(displacement) as move:
                move(1.0)
                ratio = (loss - self._timed(tried)) / expected if expected > 0 else math.nan
                if not ratio > 0:
                    move(0.0)
            if ratio > 0:
                self._keep(displacement, 1.0)
                entry = {"accepted": True, "step_size": 1.0, "damping": self.damping, "ratio": ratio}
                self.damping = next_damping(self.damping, ratio)
                return entry
            self.damping *= GROW
            self.health.counts["rollbacks"] += 1
        self._keep({}, 0.0)
        return {"accepted": False, "step_size": 0.0, "damping": self.damping, "ratio": ratio}

    # -- what both share

    def _displacement(self, direction: Mapping[str, Tensor]) -> dict[str, Tensor]:
        options = self._options()
        return {name: d * options[name]["lr"] for name, d in direction.items()}

    def _by_length(self, displacement: Mapping[str, Tensor], loss: float, tried: Callable[[], float]) -> dict[str, Any]:
        """Halve the step until the loss has fallen and falls no more."""
        best, found = loss, 0.0
        with self._moving(displacement) as move:
            for k in range(HALVINGS + 1):
                move(0.5**k)
                value = self._timed(tried)
                if value < best:
                    best, found = value, 0.5**k
                elif found:
                    break
            move(found)
        self._keep(displacement, found)
        return {"accepted": found > 0, "step_size": found, "after": best}

    def _timed(self, tried: Callable[[], float]) -> float:
        with self.health.timed("trials"):
            value = tried()
        return value if math.isfinite(value) else math.inf

    @contextmanager
    def _moving(self, displacement: Mapping[str, Tensor]) -> Iterator[Callable[[float], None]]:
        """A function that moves the parameters to a part of the way; after an exception they are where they were."""
        trained = self._trained()
        origin = {name: trained[name].detach().clone() for name in displacement}

        def move(part: float) -> None:
            for name, start in origin.items():
                trained[name].copy_(start).add_(displacement[name], alpha=part)

        try:
            yield move
        except BaseException:
            move(0.0)
            raise

    def _keep(self, displacement: Mapping[str, Tensor], length: float) -> None:
        """Decay what was moved, and remember what the next step's momentum is of."""
        options, trained = self._options(), self._trained()
        for p in trained.values():
            self.state[p].pop("displacement", None)
        for name, d in displacement.items():
            group, p = options[name], trained[name]
            if length:
                p.mul_(1 - group["lr"] * group["weight_decay"])
            if group["momentum"]:
                self.state[p]["displacement"] = d * length

    def _note(self, entry: dict[str, Any], start: float) -> None:
        self.health.counts["failures"] += not entry["accepted"]
        self.health.entries.append({"step": self.steps, "seconds": time.perf_counter() - start} | entry)
        self.steps += 1

    def report(self) -> str:
        """How every parameter is preconditioned."""
        if not self.of_residuals:
            return super().report()
        return "\n".join(
            f"{name}  exact Gauss-Newton" if p.requires_grad else f"{name}  not trained"
            for name, p in self.model.named_parameters()
        )

    def state_dict(self) -> dict[str, Any]:
        """As for any optimizer, with the course of the run: plain tensors and numbers."""
        return super().state_dict() | {"residuals": {"damping": self.damping}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state_dict = dict(state_dict)
        self.damping = state_dict.pop("residuals")["damping"]
        super().load_state_dict(state_dict)


def _called(closure: Callable[[], Any]) -> Tensor:
    with torch.enable_grad(), WrittenOut():
        residuals = closure()
    if not isinstance(residuals, Tensor):
        raise TypeError(f"closure: expected the residuals, a tensor (M,), found {type(residuals).__name__}")
    if residuals.ndim != 1 or not len(residuals):
        raise ValueError(f"closure: expected the residuals (M,), found shape {tuple(residuals.shape)}")
    return residuals


def _described(found: Any) -> str:
    return f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
