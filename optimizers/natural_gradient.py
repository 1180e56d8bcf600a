"""The natural gradient without an approximation of the curvature, for small and medium networks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from curvature.arguments import check_flag
from curvature.losses import Injection, exact, isotropic
from curvature.preconditioners import FullCurvature
from optimizers.distributed.processes import Distributed
from optimizers.distributed.sharding import refuse_sharded
from optimizers.model_optimizer import shared_option
from optimizers.recording.backward_passes import LossRows
from optimizers.schedule import Schedule
from optimizers.second_order import SecondOrderOptimizer, checked_model
from optimizers.steps.adaptive import HandOverStep
from optimizers.steps.directions import Spring
from optimizers.steps.gauss_newton import GaussNewtonStep
from optimizers.steps.line_search import LineSearchStep
from optimizers.steps.rule import StepContext, StepRule
from optimizers.steps.trust_region import TrustRegionConstants, TrustRegionStep


class NaturalGradient(SecondOrderOptimizer):
    """Natural-gradient or Gauss-Newton steps of all parameters together, or layer by layer, solved for exactly.

    Meant for residuals, and for batches that are the whole data set or nearly so. In loops of small batches it has the
    noise of each in its curvature, and falls behind `KFAC` after some 50 steps: use `KFAC` there.

    In a training loop:

        opt = NaturalGradient(model, loss=nn.CrossEntropyLoss())
        for x, y in loader:
            opt.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); opt.step()

    With a closure that returns residuals r (M,) and calls no backward; the loss is then ``1/2 ||r||^2``:

        opt = NaturalGradient(model)
        def closure():
            return torch.cat([interior(model) / len(x) ** 0.5, boundary(model) / len(y) ** 0.5])
        for _ in range(60):
            loss = opt.step(closure)

    In a training loop, G is the curvature of the batch, from vectors backpropagated right after the forward pass as in
    `KFAC`; step size, trust region and `adaptive` are those of `KFAC`, too. The direction is ``(G + damping)^-1 g``.
    "woodbury" and "cg" keep the batch's activations, and its backprops for each vector, until the next batch.

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
        momentum: of the direction, 0 to 1: the step solves for what the last one leaves (SPRING, arXiv:2401.10190).
        weight_decay: decoupled, in the units of recipes for AdamW: ``p -= 1e-3 * lr * weight_decay * p`` at each step,
            1e-3 being AdamW's usual rate. So 0.01 or 0.1 shrinks parameters as much as there, and follows schedules.
        solver: "woodbury" solves in sample space where that is smaller: the Gram matrix of the rows from activations
            and backprops; "cg" by conjugate gradients, preconditioned by KFAC, from the last solution on. Residuals
            take "woodbury".
        layerwise: solve layer by layer, by the same solver, with the exact block of G for each weight and its bias
            (arXiv:2510.09378). Steps of layers do not know of each other then, as in `KFAC`; dampings of groups may
            differ, and None means 0.05 of the mean eigenvalue of each block.
        loss: the loss module, needed by injections other than `curvature.isotropic` and `curvature.empirical`.
        inject: the vectors to backpropagate: by default `curvature.exact()`, the Fisher or Gauss-Newton matrix of the
            batch, if the loss is given, else `curvature.isotropic()`, which has noise unless a sample has one output:
            `curvature.isotropic(k)` has none for k outputs. `curvature.sampled()` suits many outputs,
            `curvature.empirical()` is as for `KFAC`.
        adaptive: needs a closure. Of the loss: as for `KFAC`. Of residuals: no line search; the damping follows the
            reduction ratio (Levenberg-Marquardt), and a step that raises the loss is retried with more damping.
        line_search: needs a closure. Halve steps until the loss of the batch stops falling; with residuals, all steps
            but those of `adaptive` do so.
        factor_decay: decay of the Kronecker factors that precondition "cg".
        seed: of the random vectors; the global random state is not touched.
        distributed: which processes of torch.distributed train the model together, if there are several.
        step_rule: a `StepRule` that makes the steps on a loss instead of the built-in rule, one instance for each
            optimizer, and not with `adaptive` (docs/guides/step_rules.md).
        groups: parameter groups with an lr, momentum, damping or weight_decay of their own, as
            ``[{"params": biases, "weight_decay": 0.0}]``; all other parameters are in the first group.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range; names it.
    """

    def __init__(
        self, model: nn.Module, lr: float = 1.0, *, damping: float | None = None, momentum: float = 0.0,
        weight_decay: float = 0.0, solver: str = "woodbury", loss: Any = None, inject: Injection | None = None,
        layerwise: bool = False, adaptive: bool = False, line_search: bool = False, factor_decay: float = 0.9,
        seed: int = 0, distributed: Distributed | None = None, step_rule: StepRule | None = None,
        groups: Iterable[dict[str, Any]] = (),
    ) -> None:  # fmt: skip
        check_flag("line_search", line_search)
        check_flag("layerwise", layerwise)
        refuse_sharded(model, "NaturalGradient")
        for name, value in (("momentum", momentum), ("weight_decay", weight_decay)):
            if value is None:
                raise TypeError(f"{name}: expected a number, found None")
        if inject is None:
            inject = isotropic() if loss is None else exact()
        if step_rule is not None and line_search:
            raise ValueError("step_rule: line_search=True is a step rule, too; choose one of the two")
        if adaptive is True and line_search:
            raise ValueError("line_search: adaptive=True finds the step size itself; choose one of the two")
        check_flag("adaptive", adaptive)
        options = {"lr": lr, "damping": damping, "momentum": momentum, "weight_decay": weight_decay}
        arguments = {
            "solver": solver, "layerwise": layerwise, "loss": loss, "inject": inject, "adaptive": adaptive,
            "line_search": line_search, "factor_decay": factor_decay, "seed": seed, "distributed": distributed,
            "step_rule": step_rule,
        }  # fmt: skip
        model, config = checked_model(model, options | arguments)
        trust = TrustRegionStep(Spring(), TrustRegionConstants(even=0.0, least=0.01))  # directions are exact
        rule = HandOverStep(trust) if adaptive else LineSearchStep(Spring()) if line_search else trust
        is_sum = getattr(loss, "reduction", "mean") == "sum"
        super().__init__(
            model, options, groups, arguments, config=config, schedule=Schedule(1, 1),
            store=FullCurvature(model, solver, is_sum, layerwise), rule=step_rule or rule, backprops=LossRows,
        )  # fmt: skip

    def _context(self, closure: Callable[[], Any] | None) -> StepContext:
        """Refuse parameters that are solved for together and have not the same damping or momentum; decay by steps."""
        context = super()._context(closure)
        together = {"all parameters": context.options}
        if self.arguments["layerwise"]:
            layers = [[name for name in b.names if name in context.options] for b in self.store.blocks]
            together = {", ".join(names): {name: context.options[name] for name in names} for names in layers if names}
        for who, options in together.items():
            for name in ("damping", "momentum"):
                shared_option(options, name, who)
        if any(options["weight_decay"] is None for options in context.options.values()):  # of a group
            raise TypeError("weight_decay: expected a number, found None")
        return context

    def residual_step(self) -> GaussNewtonStep:
        solver = self.arguments["solver"]
        if self.arguments["loss"] is not None:
            raise ValueError("loss: the closure returned residuals r, whose loss is 1/2 ||r||^2; leave loss= out")
        if solver != "woodbury":
            raise ValueError(
                f'solver: residuals are solved for exactly, by "woodbury", found "{solver}"; KFAC takes the same '
                "closure where that is too much"
            )
        if self.arguments["layerwise"]:
            raise ValueError("layerwise: residuals are solved for all parameters together; KFAC takes layer by layer")
        return GaussNewtonStep(by_damping=self.arguments["adaptive"])

    def kind(self) -> dict[str, Any]:
        options = {name: self.arguments[name] for name in ("layerwise", "adaptive")}
        return {"curvature": self.arguments["solver"], **options, "step_rule": type(self.rule).__name__}
