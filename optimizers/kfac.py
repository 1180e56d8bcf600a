"""KFAC and EKFAC in place of SGD: the training loop stays as it is, or passes a closure."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from curvature import Injection, isotropic
from curvature.preconditioners import BlockDiagonalCurvature
from optimizers.arguments import check_flag
from optimizers.distributed.processes import Distributed
from optimizers.distributed.sharding import refuse_sharded
from optimizers.recording.loss_backprops import LayerBackprops
from optimizers.second_order import SecondOrderOptimizer, checked_model
from optimizers.steps.adaptive import AdaptiveStep
from optimizers.steps.descent import MomentumDescent
from optimizers.steps.residuals import SubspaceSolver
from optimizers.steps.rule import StepRule
from optimizers.steps.trust_region import TrustRegionStep

PLAIN_INTERVALS = 10, 10  # steps between renewals of the factors, and between inversions of a block
ADAPTIVE_INTERVALS = 3, 3  # the same, where few and long steps are taken
ADAPTIVE_VECTORS = 2  # sent back at a renewal, then


class KFAC(SecondOrderOptimizer):
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

    structure: ClassVar[str] = "kronecker"
    why_replicated: ClassVar[str] = ""

    def __init__(
        self, model: nn.Module, lr: float = 1.0, *, damping: float | None = None, momentum: float = 0.9,
        weight_decay: float = 0.0, loss: Any = None, inject: Injection | None = None, sharing: str = "expand",
        adaptive: bool = False, factor_decay: float = 0.9, factor_every: int | None = None,
        decompose_every: int | None = None, max_overhead: float | None = None, seed: int = 0,
        distributed: Distributed | None = None, step_rule: StepRule | None = None,
    ) -> None:  # fmt: skip
        check_flag("adaptive", adaptive)
        if adaptive:
            refuse_sharded(model, "adaptive")
        options = {"lr": lr, "damping": damping, "momentum": momentum, "weight_decay": weight_decay}
        intervals = ADAPTIVE_INTERVALS if adaptive else PLAIN_INTERVALS
        arguments = {
            "loss": loss, "inject": isotropic(ADAPTIVE_VECTORS if adaptive else 1) if inject is None else inject,
            "sharing": sharing, "adaptive": adaptive,
            "factor_decay": factor_decay, "factor_every": intervals[0] if factor_every is None else factor_every,
            "decompose_every": intervals[1] if decompose_every is None else decompose_every,
            "max_overhead": max_overhead, "seed": seed, "distributed": distributed, "step_rule": step_rule,
        }  # fmt: skip
        own, config = checked_model(type(self).__name__, model, options | arguments, self.why_replicated)
        super().__init__(
            own, options, arguments, config=config, store=BlockDiagonalCurvature(sharing, self.structure),
            rule=step_rule or (AdaptiveStep() if adaptive else TrustRegionStep(MomentumDescent())),
            backprops=LayerBackprops,
        )  # fmt: skip

    def residual_solver(self) -> SubspaceSolver:
        if self.structure != "kronecker":
            raise ValueError("EKFAC: the closure returned residuals, which KFAC and NaturalGradient take")
        inject, sharing = self.arguments["inject"], self.arguments["sharing"]
        if self.arguments["loss"] is not None:
            raise ValueError("loss: the closure returned residuals r, whose loss is 1/2 ||r||^2; leave loss= out")
        if not isinstance(inject, type(isotropic())):
            raise ValueError(f"inject: nothing is sent back but the residuals themselves, found {inject!r}")
        if sharing != "expand":
            raise ValueError(f'sharing: expected "expand" for residuals, found {sharing!r}')
        return SubspaceSolver()

    def kind(self) -> dict[str, Any]:
        own = {"adaptive": self.arguments["adaptive"], "sharing": self.arguments["sharing"]}
        return {"curvature": self.structure, **own}


class EKFAC(KFAC):
    """`KFAC` with the curvature rescaled in the eigenbasis of its factors (arXiv:1806.03884).

    The eigenvalues of each layer are replaced by the mean squares of its per-sample gradients in the eigenbasis, which
    are never built; they are carried over when the basis turns. A layer with a side of more than 2,048 rows has no
    whole eigenbasis and is as in `KFAC`, which `report()` says. Arguments as for `KFAC`.
    """

    structure = "eigen"
    why_replicated = "measures in the eigenbasis of every layer on every process"
