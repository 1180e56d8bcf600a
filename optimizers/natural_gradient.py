"""The natural gradient without an approximation of the curvature, for small and medium networks."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvature import Injection, Jacobian, LeastSquares, Tape, exact, isotropic
from curvature.preconditioners import FullCurvature
from optimizers.arguments import check_flag
from optimizers.distributed.processes import Distributed
from optimizers.distributed.sharding import refuse_shards
from optimizers.kfac import KFAC
from optimizers.recording.backward_passes import Measured
from optimizers.recording.model_outputs import samples_first
from optimizers.recording.output_scale import Sums
from optimizers.steps.closure_replay import Replay
from optimizers.steps.line_search import Curves, Point
from optimizers.steps.quadratic_model import GROW, next_damping
from optimizers.steps.residuals import ResidualSteps, Trials, loss_of
from optimizers.steps.updates import are_finite, inner

TRIES = 12  # dampings tried before a step is given up
FIRST = 1e-3  # the first damping, relative to the largest eigenvalue
CUTS = 0.0, 1e-12, 1e-10, 1e-8, 1e-6  # eigenvalues left out, relative to the largest: first those that are rounding
PROGRESS = 0.03  # part of the fall promised by the linear problem below which the next cut is tried
NEAR = 0.01  # promised part of the loss below which a straight step will do: a minimum is near
LONGEST = 16  # steps without another try after so many in vain
REACH = 0.1  # part of a step over which its curvature is seen
LEAST = 2.0**-10  # of a step, where there was no better
UNIT = 256.0  # of rows that several processes with batches of different sizes share


@dataclass(eq=False)
class Waiting:
    """A recorded pass whose loss is yet to be sent back."""

    tape: Tape
    outputs: Sequence[Tensor]


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
    ``(G + damping)^-1 g``. "woodbury" and "cg" hold the batch's activations, and its backprops for each of the vectors,
    until the next batch.

    Residuals may differentiate the model by ``torch.autograd.grad(..., create_graph=True)``, to any order. The step
    ``d = -J^+ r`` is solved for in the smaller of parameter and sample space (energy natural gradient,
    arXiv:2302.13163; in sample space arXiv:2402.10680), bent to second order (geodesic acceleration, arXiv:1201.5885),
    and halved until the loss stops falling, up to 30 times; a second step with the same ``J^+`` corrects it. Where that
    brings little, coarser pseudo-inverses are tried. Double precision is recommended: the condition number of the
    problem is squared.

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
        distributed: which processes of torch.distributed train the model together, if there are several.

    Raises:
        TypeError, ValueError: an argument of the wrong kind or out of range, by name.
    """

    whole = "solves for all parameters together on every process"

    def __init__(
        self, model: nn.Module, lr: float = 1.0, *, damping: float | None = None, momentum: float = 0.0,
        weight_decay: float = 0.0, solver: str = "woodbury", loss: Any = None, inject: Injection | None = None,
        adaptive: bool = False, line_search: bool = False, factor_decay: float = 0.9, seed: int = 0,
        distributed: Distributed | None = None,
    ) -> None:  # fmt: skip
        check_flag("line_search", line_search)
        refuse_shards(model, "NaturalGradient")
        if inject is None:
            inject = isotropic() if loss is None else exact()
        if adaptive is True and line_search:
            raise ValueError("line_search: adaptive=True finds the step size itself; choose one of the two")
        self.solver = solver
        self._waiting: list[Waiting] = []
        self._each = 1.0  # what the rows since the last step are to be multiplied by, for `empirical`
        super().__init__(
            model, lr, damping=damping, momentum=momentum, weight_decay=weight_decay, loss=loss, inject=inject,
            adaptive=adaptive, factor_decay=factor_decay, factor_every=1, decompose_every=1, seed=seed,
            distributed=distributed,
        )  # fmt: skip
        self._arguments = {
            "solver": solver, "loss": loss, "inject": inject, "adaptive": adaptive, "line_search": line_search,
            "factor_decay": factor_decay, "seed": seed, "distributed": distributed,
        }  # fmt: skip

    def _kind(self) -> dict[str, Any]:
        return {"curvature": self.solver, "adaptive": self.adaptive is not None}

    def _blank(self, p: Tensor) -> dict[str, Any]:
        names = ["displacement"] + ["direction"] * any(group["momentum"] for group in self.param_groups)
        return {} if self.adaptive is not None else {name: torch.zeros_like(p) for name in names}

    def _curvature(self) -> FullCurvature:
        return FullCurvature(self.model, self.solver, getattr(self.loss, "reduction", "mean") == "sum")

    def _listen_to_backward(self, tape: Tape, outputs: Sequence[Tensor], extent: Sums, count: int) -> None:
        """Send the gradient of the loss at the output back once more, sample by sample, when it arrives there."""
        if len(outputs) != 1:
            raise ValueError(
                "inject: rows of empirical() need a model that returns one tensor, or gives a loss function of torch "
                f"one, found {len(outputs)}; return the output, and use isotropic() if there are several"
            )
        each = 1 if getattr(self.loss, "reduction", "mean") == "sum" else count
        unit = each if self.team.processes.size == 1 else UNIT
        waiting = weakref.ref(kept := Waiting(tape, outputs))
        self._waiting.append(kept)  # until the next step: held by its own graph it would be held for ever

        def sent(gradient: Tensor) -> None:
            handle.remove()  # what goes back now passes here too
            found = waiting()
            if found is None:
                return
            self.passes.begin(self.team.statistics.discard)
            if not self._pending:  # later: times the scale of the loss it may be too much for float16
                self._each = unit
                self._pending.append(lambda scale: self.passes.total.curvature.scale_vectors_(unit / scale))
            with torch.enable_grad():
                output = samples_first(found.outputs[0], count)
            vectors = samples_first(gradient * (each / self._each), count).detach()[None]
            with torch.autocast(gradient.device.type, enabled=False):
                measured = self.factors.measure(found.tape, [output], [vectors], count)
            self.passes.total.add_(Measured(measured, extent))

        handle = outputs[0].register_hook(sent)

    def _discard(self) -> None:
        super()._discard()
        self._waiting.clear()

    def _renew(self) -> None:
        super()._renew()
        self._waiting.clear()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters.

        Args:
            closure: computes the loss, as for `torch.optim.LBFGS`, or the residuals r (M,), M at least 1, and then
                calls no ``backward``. With `adaptive`, `line_search` or residuals it is called several times, with the
                same random numbers; buffers are as after the first call.

        Returns:
            The loss before the step, if there is a closure.

        Raises:
            TypeError: the closure returns no tensor, or there is none where one is needed.
            ValueError: what it returns is neither a scalar nor (M,), or was computed without gradients.
            RuntimeError: no closure, and the model was never called with gradients enabled.
        """
        return self._step(closure)

    # -- steps of a loss

    def _of_loss(self, closure: Callable[[], Any] | None) -> Any:
        if not self._arguments["line_search"]:
            return super()._of_loss(closure)
        if closure is None:
            raise TypeError("NaturalGradient(line_search=True).step: pass a closure that computes the loss")
        self.replay = replay = Replay(self.model, closure, self.team.processes.mean)
        try:
            with self.health.timed("closure"):
                loss = replay.first()
            gradients = self._gradients()
            if not gradients or not are_finite([loss, *gradients.values()]):
                self._skip()
                return loss
            self._renew()
            with self.health.timed("solve"):
                directions, _ = self._directions(gradients, self._judged(gradients))
            found = self._searched(directions, float(loss), replay)
        finally:
            self.replay = None
        self.health.counts["failures"] += not found.part
        entry = {"loss": loss, "accepted": found.part > 0, "step_size": found.part}
        self.health.entries.append(self._entry | entry)
        self.steps += 1
        return loss

    def _searched(self, directions: Mapping[str, Tensor], loss: float, replay: Replay) -> Point:
        """Halve the step until the loss of the batch stops falling."""
        trained = self._trained()
        curves = Curves({name: trained[name] for name in directions}, loss, lambda: (float(replay.loss()), None))
        step = -self._paced(directions)
        with self.health.timed("trials"), curves.returning():
            found = curves.straight(step)
            self._arrive(curves, found)
        return found

    def _solved(self, right: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Parameters that this batch did not use have a gradient of zero."""
        self._shared("damping")
        if not all(block.is_ready for block in self.factors.blocks):
            raise RuntimeError(
                f'NaturalGradient(solver="{self.solver}").step: no forward pass of the model since the state was loaded'
            )
        trained = self._trained()
        unused = {k: torch.zeros_like(trained[k]) for b in self.factors.blocks for k in b.names if k not in right}
        found = super()._solved({**right, **unused})
        return {name: found[name] for name in right}

    def _directions(self, gradients: Mapping[str, Tensor], good: Tensor) -> tuple[dict[str, Tensor], Tensor]:
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

    # -- steps of residuals

    def _check_for_residuals(self) -> None:
        if self.loss is not None:
            raise ValueError("loss: the closure returned residuals r, whose loss is 1/2 ||r||^2; leave loss= out")
        if self.solver != "woodbury":
            raise ValueError(
                f'solver: residuals are solved for exactly, by "woodbury", found "{self.solver}"; KFAC takes the same '
                "closure where that is too much"
            )

    def _moved(self, jacobian: Jacobian, trials: Trials, residuals: ResidualSteps) -> dict[str, Any]:
        values, trained = trials.values, self._trained()
        if not any(group["lr"] for group in self.param_groups):  # a schedule that begins at zero
            return {"accepted": True, "step_size": 0.0, "rollbacks": 0}
        with self.health.timed("gram"):
            problem = LeastSquares(jacobian)
        own = {name: trained[name] for name in jacobian.shapes}
        residuals.align(own)

        def look() -> tuple[float, Tensor]:
            found = trials.again()
            return loss_of(found), found

        curves = Curves(own, loss_of(values), look)
        move = self._by_damping if self.adaptive is not None else self._by_curves
        with curves.returning():
            entry, found = move(problem, values, curves, residuals)
            self._arrive(curves, found)
        residuals.moves = (
            [problem.jacobian.split(found.displacement)] if self._shared("momentum") and found.part else []
        )
        return entry | {"accepted": found.part > 0, "step_size": found.part}

    def _direction(
        self, problem: LeastSquares, values: Tensor, residuals: ResidualSteps, damping: float, cut: float = 0.0
    ) -> Tensor:
        """``-J^+ r``, or with momentum what is left to solve for after the last displacement, and that."""
        with self.health.timed("solve"):
            if not residuals.moves:
                return self._paced(problem.solve(-values, damping, cut))
            carried = {name: self._shared("momentum") * d for name, d in residuals.moves[-1].items()}
            rest = problem.solve(-values - problem.times(carried), damping, cut)
            return self._paced({name: d + carried[name] for name, d in rest.items()})

    def _by_curves(
        self, problem: LeastSquares, values: Tensor, curves: Curves, residuals: ResidualSteps
    ) -> tuple[dict[str, Any], Point]:
        """The lowest loss along bent steps: by the pseudo-inverse, and by coarser ones where that brings little."""
        damping, loss = self._shared("damping") or 0.0, curves.origin.loss
        best, count = curves.origin, 0
        d = self._direction(problem, values, residuals, damping)
        promised = loss - loss_of(values + problem.times(problem.jacobian.split(d)))
        residuals.wait = max(0, residuals.wait - 1)
        for cut in CUTS if damping == 0 and not residuals.wait else CUTS[:1]:
            if cut:
                d = self._direction(problem, values, residuals, damping, cut)
            solve = lambda v, cut=cut: self._paced(problem.solve(-v, damping, cut))
            with self.health.timed("trials"):
                is_near = promised < NEAR * loss
                found = curves.straight(d) if is_near else self._bent(problem, values, curves, d, solve)
            best = min(best, found, key=lambda point: point.loss)
            if loss - best.loss > PROGRESS * promised:
                residuals.pause = 1
                break
            count += 1
        if count == len(CUTS):  # in vain: not again at once
            residuals.wait, residuals.pause = residuals.pause + 1, min(2 * residuals.pause, LONGEST)
        return {"damping": damping, "after": best.loss, "coarser": count, "rollbacks": 0}, best

    def _bent(
        self, problem: LeastSquares, values: Tensor, curves: Curves, d: Tensor, solve: Callable[[Tensor], Tensor]
    ) -> Point:
        """The better of a straight step ``t d`` and a bent one ``t d + t^2/2 a``, corrected once.

        Along ``t d`` the residuals bend by r'', seen by a difference; ``a = -J^+ r''`` bends the step back (geodesic
        acceleration, arXiv:1201.5885, equation 3).
        """
        origin = curves.origin
        best = curves.straight(d)
        t = REACH * (best.part or LEAST)
        seen = curves.at(t * d).residuals
        assert seen is not None
        a = solve(2 / t * ((seen - values) / t - problem.times(problem.jacobian.split(d))))
        if bool(torch.isfinite(a).all()):
            best = min(best, curves.lowest(lambda t: t * d + t * t / 2 * a, origin), key=lambda point: point.loss)
        if best is origin:
            return best
        assert best.residuals is not None
        correction = solve(best.residuals)
        found = curves.lowest(lambda t: best.displacement + t * correction, best)
        return Point(found.displacement, found.loss, found.residuals, best.part)

    def _by_damping(
        self, problem: LeastSquares, values: Tensor, curves: Curves, residuals: ResidualSteps
    ) -> tuple[dict[str, Any], Point]:
        """More damping until the loss falls (Levenberg-Marquardt)."""
        if residuals.damping < 0:
            residuals.damping = FIRST * problem.largest
        _ = problem.spectrum  # every damping is solved for with the same
        loss, ratio = curves.origin.loss, math.nan
        for rollbacks in range(TRIES):
            damping = residuals.damping
            d = self._direction(problem, values, residuals, damping)
            expected = loss - loss_of(values + problem.times(problem.jacobian.split(d)))
            with self.health.timed("trials"):
                found = curves.at(d, 1.0)
            ratio = (loss - found.loss) / expected if expected > 0 else math.nan
            if ratio > 0:
                residuals.damping = next_damping(damping, ratio)
                return {"damping": damping, "ratio": ratio, "rollbacks": rollbacks}, found
            residuals.damping *= GROW
        return {"damping": damping, "ratio": ratio, "rollbacks": TRIES}, curves.origin

    # -- what both share

    def _paced(self, direction: Mapping[str, Tensor]) -> Tensor:
        """Times the learning rates, flat."""
        options = self._options()
        return torch.cat([d.flatten() * options[name]["lr"] for name, d in direction.items()])

    def _arrive(self, curves: Curves, point: Point) -> None:
        """Go there, and decay if that is a step."""
        curves.put(point.displacement)
        options = self._options()
        for name, p in curves.parameters.items():
            if point.part and options[name]["weight_decay"]:
                p.mul_(1 - options[name]["lr"] * options[name]["weight_decay"])

    def report(self) -> str:
        """How every parameter is preconditioned."""
        if self.residuals is None:
            return super().report()
        return "\n".join(
            f"{name}  exact Gauss-Newton" if p.requires_grad else f"{name}  not trained"
            for name, p in self.model.named_parameters()
        )
