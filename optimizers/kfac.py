"""KFAC and EKFAC in place of SGD: the training loop stays unchanged, or passes a closure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from torch import nn

from curvature.arguments import check_flag, check_whole
from curvature.losses import Injection, isotropic
from curvature.preconditioners import BlockDiagonalCurvature
from curvature.structures import Choice, Choices
from optimizers.distributed.processes import Distributed
from optimizers.distributed.sharding import refuse_sharded
from optimizers.recording.backward_passes import LayerBackprops
from optimizers.schedule import Schedule
from optimizers.second_order import SecondOrderOptimizer, checked_model
from optimizers.steps.adaptive import HandOverStep
from optimizers.steps.directions import Momentum
from optimizers.steps.residuals import SubspaceStep
from optimizers.steps.rule import StepRule
from optimizers.steps.trust_region import TrustRegionStep

ADAPTIVE_INTERVAL = 3  # steps between renewals and between inversions with `adaptive`, whose steps are few and long
ADAPTIVE_VECTORS = 2  # backpropagated at a renewal with `adaptive`


class KFAC(SecondOrderOptimizer):
    """Natural-gradient descent with Kronecker-factored curvature (arXiv:1503.05671; shared weights: arXiv:2311.00636).

    In a training loop:

        opt = KFAC(model)
        for x, y in loader:
            opt.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); opt.step()

    Or, with step size, momentum and damping from an exact model of each batch, as long as batches are large enough:

        opt = KFAC(model, adaptive=True)
        for x, y in loader:
            def closure():
                opt.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); return loss
            opt.step(closure)

    At steps that update the curvature, KFAC backpropagates vectors from the model's output after the forward pass.
    It trains every parameter that requires a gradient: those without Kronecker factors by a diagonal of the same
    curvature; `report()` says which and why.

    Without `adaptive` the displacement is ``-step * (M + damping)^-1 m`` with m the debiased running mean of the
    gradients. Isotropic curvature does not know the scale of the loss, so the step size adapts: it grows while the
    gradient still points along the last displacement and shrinks when it points back, inside a trust region on the
    predicted change of the outputs and on the length of each layer's step. Neither the units of the outputs nor those
    of the loss matter.

    With `adaptive` the layers' directions and the last displacement span the exact damped quadratic model of the loss
    of the batch, and its minimum is the step (arXiv:1503.05671, sections 6.4 to 7, there with one direction for all
    layers). Damping follows the reduction ratio (Levenberg-Marquardt); a step that raises the loss or makes it not
    finite is rolled back and retried with more damping. Once the next batch confirms less than half of the progress on
    the last one, the steps are those without `adaptive` from then on: the log, `report()` and ``stats()["plain_from"]``
    say so. On full batches that never happens.

    A closure that returns residuals r (M,) in place of a loss means ``1/2 ||r||^2``, as for `NaturalGradient`; it may
    differentiate the model, and calls no ``backward``:

        def closure():
            return torch.cat([interior(model) / len(x) ** 0.5, boundary(model) / len(y) ** 0.5])

    Each step then computes the Kronecker factors of each layer and piece of ``J^T J`` (`residual_blocks`;
    arXiv:2405.15603), and minimizes the exact quadratic model over their layerwise directions and the last
    displacements. It never takes a step that raises the loss. `damping` is then added to ``J^T J``, in
    residual^2 / parameter^2 (None: Levenberg-Marquardt); `momentum` only says whether the last displacements are used
    (zero: no); `adaptive`, `step_rule` and the arguments on factors and their updates have no effect.

    Args:
        model: the module that the training loop calls.
        lr: multiplies the step, without unit; for schedulers, with a peak of 1 or above. Below one, the step size
            adapts proportionally slower.
        damping: added to the curvature, in units of loss / parameter^2 for a loss of ``1/2 ||f||^2`` (as in
            `curvature.isotropic`). None: factored, ``0.05 + 3 d / n`` of the mean eigenvalue of each Kronecker
            factor of d rows, n being the number of rows that its running mean rests on.
        momentum: decay of the running mean of the gradients, 0 to 1; `adaptive` steps find their own. None: it grows,
            ``1 - 1 / (10 + t / 20)`` at step t and at most 0.967, and the step follows nine tenths of that mean and a
            tenth of the present gradient.
        weight_decay: decoupled. None: parameters of two or more dimensions shrink by a fifth of what their layer moves,
            relative to its norm (not in `adaptive` steps, and not on residuals). A number: ``p -= 1e-3 * lr *
            weight_decay * p`` at each step, which is AdamW's decay at a rate of 1e-3; 0 turns it off.
        loss: the loss module; only injections other than `isotropic` need it.
        inject: the vectors to backpropagate (default `curvature.isotropic()`); `curvature.empirical()` takes the
            backprops of the training loop's own backward pass, for a loss that is a mean over samples, or a sum if
            `loss` says so by ``reduction="sum"``. Weights of samples or classes count squared there.
        sharing: "expand" or "reduce", for weights used at several positions of a sample.
        structure: another structure for some layers: "diagonal", "dense", "kronecker", "eigen", or a class of your own
            (`curvature.Structure`), by the name of a module or parameter, as ``{"head": "diagonal"}``; see
            `curvature.kfac`. A dense block of p parameters takes p^2 numbers and p^3 operations.
        block_size: of the Kronecker factors with more rows than that (of a bias aside), only diagonal blocks of that
            size are kept: four of them for the 4 d outputs of a transformer's MLP with ``block_size=d``. They are
            inverted in a fraction of the time. None: factors are whole. Those of more than 2,048 rows are sketches
            in either case.
        adaptive: find step size, momentum and damping; `step` then needs a closure.
        factor_decay: decay of the running averages of the factors, per update.
        factor_every: steps from one update of the factors to the next, fewer at first: one more every ten steps. None:
            one more every three steps up to four (unless one step changes the factors by half of their size), then
            every ten steps up to ten, and up to fifty where an update changes them by less than a tenth; with
            `adaptive` 3.
        decompose_every: steps from one inversion of a block to the next, at steps that update the factors, and fewer at
            first. None: once the factors of the block have changed by a tenth, or by more where a block is large; with
            `adaptive` 3.
        seed: of the random vectors; the global random state is not touched.
        distributed: how the processes of torch.distributed share the work, if there are several.
        step_rule: a `StepRule` that makes the steps on a loss instead of the built-in rule, one instance for each
            optimizer, and not with `adaptive` (docs/guides/step_rules.md).
        groups: parameter groups with an lr, momentum, damping or weight_decay of their own, as
            ``[{"params": biases, "weight_decay": 0.0}]``; all other parameters are in the first group.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range; names it.
    """

    structure: ClassVar[str] = "kronecker"

    def __init__(
        self, model: nn.Module, lr: float = 1.0, *, damping: float | None = None, momentum: float | None = None,
        weight_decay: float | None = None, loss: Any = None, inject: Injection | None = None, sharing: str = "expand",
        structure: Mapping[str, Choice] | None = None, block_size: int | None = None, adaptive: bool = False,
        factor_decay: float = 0.9,
        factor_every: int | None = None, decompose_every: int | None = None,
        seed: int = 0, distributed: Distributed | None = None, step_rule: StepRule | None = None,
        groups: Iterable[dict[str, Any]] = (),
    ) -> None:  # fmt: skip
        check_flag("adaptive", adaptive)
        if block_size is not None:
            check_whole("block_size", block_size, 1, 10**9)
        if adaptive:
            refuse_sharded(model, "adaptive")
        options = {"lr": lr, "damping": damping, "momentum": momentum, "weight_decay": weight_decay}
        plain = factor_every, decompose_every
        intervals = [ADAPTIVE_INTERVAL if adaptive and x is None else x for x in plain]
        arguments = {
            "loss": loss, "inject": isotropic(ADAPTIVE_VECTORS if adaptive else 1) if inject is None else inject,
            "sharing": sharing, "structure": structure, "block_size": block_size, "adaptive": adaptive,
            "factor_decay": factor_decay, "factor_every": intervals[0], "decompose_every": intervals[1],
            "seed": seed, "distributed": distributed, "step_rule": step_rule,
        }  # fmt: skip
        model, config = checked_model(model, options | arguments)
        self.choices = Choices(structure, dict(model.named_parameters()), ("kronecker", "eigen"))
        rule = TrustRegionStep(Momentum())
        super().__init__(
            model, options, groups, arguments, config=config, schedule=Schedule(intervals[0], intervals[1]),
            store=BlockDiagonalCurvature(sharing, self.structure, block_size, self.choices),
            rule=step_rule or (HandOverStep(rule, plain) if adaptive else rule), backprops=LayerBackprops,
        )  # fmt: skip

    def residual_step(self) -> SubspaceStep:
        if self.structure != "kronecker":
            raise ValueError("EKFAC: the closure returned residuals, which KFAC and NaturalGradient take")
        inject, sharing = self.arguments["inject"], self.arguments["sharing"]
        if self.arguments["loss"] is not None:
            raise ValueError("loss: the closure returned residuals r, whose loss is 1/2 ||r||^2; leave loss= out")
        if not inject.is_isotropic:
            raise ValueError(f"inject: nothing is sent back but the residuals themselves, found {inject!r}")
        if self.arguments["structure"]:
            raise ValueError("structure: residuals have Kronecker factors in all layers; leave it out")
        if self.arguments["block_size"] is not None:
            raise ValueError("block_size: factors of residuals are inverted whole; leave it out")
        if sharing != "expand":
            raise ValueError(f'sharing: expected "expand" for residuals, found {sharing!r}')
        return SubspaceStep()

    def kind(self) -> dict[str, Any]:
        options = {name: self.arguments[name] for name in ("adaptive", "sharing", "block_size")}
        structure = {"curvature": self.structure, "structure": self.choices.by_name()}
        return structure | options | {"step_rule": type(self.rule).__name__}


class EKFAC(KFAC):
    """`KFAC` with the curvature rescaled in the eigenbasis of its factors (arXiv:1806.03884).

    Mean squares of the per-sample gradients in the eigenbasis replace the eigenvalues of each layer, without building
    those gradients; they are carried over when the basis changes. Before the second renewal there are none, and
    eigenvalues are those of the factors. For a layer with several positions per sample, at least 16 evenly spaced
    samples of the batch stand for all. A layer with more than 512 rows in a side (with `block_size`: in a diagonal
    block) is treated as in `KFAC`, since its eigenbasis would cost several times the rest of a step; `report()` says
    where. Arguments as for `KFAC`.
    """

    structure = "eigen"
