"""The contestants: rivals with the grids that they are tuned over, and ours, which have none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from _problems import Problem
from torch import Tensor, nn

import optimizers

REST = 3e-3  # learning rate of AdamW for the parameters that SINGD has no rule for
EVERY = 10  # steps between the decompositions of SOAP, Shampoo and the empirical KFAC
MATRICES = (nn.Linear, nn.Conv2d)  # layers whose weight is a matrix; an embedding is not one of them
HIDDEN = (*MATRICES, nn.RNNBase, nn.MultiheadAttention)  # layers whose matrices Muon trains
Setting = dict[str, float]


def sgd(model: nn.Module, problem: Problem, lr: float, decay: float = 0.0) -> Any:
    return torch.optim.SGD(model.parameters(), lr, momentum=0.9, nesterov=True, weight_decay=decay)


def adamw(model: nn.Module, problem: Problem, lr: float, decay: float = 0.0) -> Any:
    return torch.optim.AdamW(model.parameters(), lr, weight_decay=decay)


class Together:
    """Several optimizers, each with its own parameters."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad()

    def step(self) -> None:
        for part in self.parts:
            part.step()


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal by Newton-Schulz iterations, as `torch.optim.Muon`, but in float32.

    There the iterations are in bfloat16, for which most processors have no fast product: a step would take many times
    as long. Kernels of convolutions count as matrices (outputs, all else). The length of a step is adjusted to AdamW's
    (`adjust_lr_fn="match_rms_adamw"`; arXiv:2502.16982), so that one learning rate serves both, as does `decay`.
    """

    def __init__(self, params: Sequence[Tensor], lr: float, momentum: float = 0.95, decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 1 - group["momentum"])
                direction = orthogonal(p.grad.lerp(mean, group["momentum"]).flatten(1))
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(direction.view_as(p), alpha=-0.2 * max(direction.shape) ** 0.5 * group["lr"])


def orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    """The matrix with its singular values brought near one: K. Jordan's quintic Newton-Schulz iteration."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp_min(1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.T if tall else x


class EmpiricalKFAC:
    """KFAC with the gradients of the training loss itself, as kfac-pytorch does it (arXiv:2007.00784).

    Running averages of the factors, from the identity, renewed at every step; eigendecompositions at every tenth; the
    gradients of Linear and Conv2d preconditioned in the eigenbasis, all shortened by one number where the predicted
    decrease exceeds `KL_CLIP`; then SGD with momentum, which also trains all other layers.
    """

    DECAY, KL_CLIP = 0.95, 0.001

    def __init__(self, model: nn.Module, lr: float, damping: float) -> None:
        self.lr, self.damping, self.steps = lr, damping, 0
        self.sgd = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
        self.parts = [self.sgd]
        self.layers = [layer for layer in model.modules() if isinstance(layer, MATRICES)]
        self.factors: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self.bases: dict[nn.Module, tuple[Tensor, Tensor, Tensor]] = {}
        for layer in self.layers:
            layer.register_forward_hook(self._listen)

    def zero_grad(self) -> None:
        self.sgd.zero_grad()

    def _listen(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if torch.is_grad_enabled() and layer.training:
            activation = inputs[0].detach()
            output.register_hook(lambda backprop: self._renew(layer, activation, backprop))

    def _renew(self, layer: nn.Module, activation: Tensor, backprop: Tensor) -> None:
        a, b, terms = _rows(layer, activation, backprop.detach())
        fresh = a.T @ (a / len(a)), b.T @ (b * terms)
        if layer not in self.factors:
            self.factors[layer] = tuple(torch.eye(len(factor), device=a.device) for factor in fresh)  # type: ignore
        for old, new in zip(self.factors[layer], fresh, strict=True):
            old.lerp_(new, 1 - self.DECAY)

    @torch.no_grad()
    def step(self) -> None:
        if self.steps % EVERY == 0:
            for layer, factors in self.factors.items():
                (va, qa), (vb, qb) = (torch.linalg.eigh(factor) for factor in factors)
                self.bases[layer] = qa, qb, 1 / (torch.outer(vb.clamp_min(0), va.clamp_min(0)) + self.damping)
        directions, predicted = {}, torch.zeros(())
        for layer, (qa, qb, inverse) in self.bases.items():
            gradient = _joined(layer)
            directions[layer] = qb @ ((qb.T @ gradient @ qa) * inverse) @ qa.T
            predicted = predicted.to(gradient) + (directions[layer] * gradient).sum() * self.lr**2
        scale = (self.KL_CLIP / predicted.abs().clamp_min(1e-30)).sqrt().clamp_max(1.0)
        for layer, direction in directions.items():
            layer.weight.grad.copy_((scale * direction[:, : layer.weight[0].numel()]).view_as(layer.weight))
            if layer.bias is not None:
                layer.bias.grad.copy_(scale * direction[:, -1])
        self.sgd.step()
        self.steps += 1


def _rows(layer: nn.Module, activation: Tensor, backprop: Tensor) -> tuple[Tensor, Tensor, int]:
    """Inputs (with a one for the bias) and backprops of all places as rows; how many terms the loss is a mean of."""
    if isinstance(layer, nn.Conv2d):
        terms = len(backprop)
        activation = F.unfold(activation, layer.kernel_size, layer.dilation, layer.padding, layer.stride).mT
        backprop = backprop.flatten(2).mT
    else:
        terms = backprop.numel() // backprop.shape[-1]
    a, b = activation.flatten(0, -2), backprop.flatten(0, -2)
    return F.pad(a, (0, 1), value=1.0) if layer.bias is not None else a, b, terms


def _joined(layer: nn.Module) -> Tensor:
    """The gradient of weight and bias as one matrix, (outputs, inputs + 1)."""
    weight = layer.weight.grad.flatten(1)
    return torch.cat([weight, layer.bias.grad[:, None]], 1) if layer.bias is not None else weight


def muon(model: nn.Module, problem: Problem, lr: float, decay: float = 0.0) -> Any:
    layers = [layer for layer in model.modules() if isinstance(layer, HIDDEN)]
    matrices = [p for layer in layers for p in layer.parameters(recurse=False) if p.ndim > 1]
    rest = others(model, matrices)
    return Together(Muon(matrices, lr, decay=decay), torch.optim.AdamW(rest, lr, weight_decay=decay))


def soap(model: nn.Module, problem: Problem, lr: float, decay: float = 0.0) -> Any:
    from pytorch_optimizer import SOAP

    return SOAP(model.parameters(), lr, weight_decay=decay, precondition_frequency=EVERY)


def shampoo(model: nn.Module, problem: Problem, lr: float) -> Any:
    from pytorch_optimizer import ScalableShampoo

    class Ridged(ScalableShampoo):
        """Its inverse roots by SVD have no floor, by Schur-Newton a ridge but take five times as long: SVD with one."""

        def step(self, closure: Any = None) -> Any:
            if (self.param_groups[0].get("step", 0) + 1) % EVERY == 0:
                for state in self.state.values():
                    for statistic in state["pre_conditioner"].statistics:
                        statistic.diagonal().add_(1e-6 * statistic.trace())
            return super().step(closure)

    # Of its variants this was the fastest: RMSProp's lengths of steps (3), and 0.95 rather than 0.999 for the averages.
    return Ridged(
        model.parameters(), lr, betas=(0.9, 0.95), moving_average_for_momentum=True, start_preconditioning_step=EVERY,
        preconditioning_compute_steps=EVERY, graft_type=3, use_svd=True,
    )  # fmt: skip


def singd(model: nn.Module, problem: Problem, lr: float, every: int) -> Any:
    from singd.optim.optimizer import SINGD

    known = [p for layer in model.modules() if isinstance(layer, MATRICES) for p in layer.parameters()]
    first = SINGD(
        model, params=known, lr=lr, T=every, lr_cov=0.1, normalize_lr_cov=True, loss_average=problem.terms
    )  # fmt: skip
    rest = others(model, known)
    return Together(first, torch.optim.AdamW(rest, REST, weight_decay=0.0)) if rest else first


def others(model: nn.Module, parameters: Sequence[Tensor]) -> list[nn.Parameter]:
    taken = {id(p) for p in parameters}
    return [p for p in model.parameters() if id(p) not in taken]


def empirical_kfac(model: nn.Module, problem: Problem, lr: float, damping: float) -> Any:
    return EmpiricalKFAC(model, lr, damping)


constant = lambda part: 1.0
cosine = lambda part: (1 + math.cos(math.pi * part)) / 2
linear = lambda part: 1 - part


@dataclass(frozen=True, eq=False)
class Entry:
    """A contestant.

    Attributes:
        name: on the command line and in files.
        label: in tables and figures.
        make: builds the optimizer, from the model, the problem and a setting.
        lrs: learning rates to begin with, in half decades; none for ours.
        axes: other settings, the usual value first; those after it are tried with the best learning rate alone.
        closure: `step` takes a function that computes the loss and its gradient.
        schedule: factor of the learning rate, by the share of the budget that is used.
    """

    name: str
    label: str
    make: Callable[..., Any]
    lrs: tuple[float, ...] = ()
    axes: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    closure: bool = False
    schedule: Callable[[float], float] = constant

    @property
    def family(self) -> str:
        """Its name without that of the schedule."""
        return self.name.split("_")[0]

    def under(self, schedule: Callable[[float], float], label: str) -> Entry:
        return replace(self, name=f"{self.name}_{label}", label=f"{self.label}, {label}", schedule=schedule)


RATES = (1e-3, 3e-3, 1e-2)
RIVALS = (
    Entry("sgd", "SGD, Nesterov 0.9", sgd, (1e-2, 3e-2, 1e-1)),
    Entry("adamw", "AdamW", adamw, RATES),
    Entry("muon", "Muon + AdamW", muon, RATES),
    Entry("soap", "SOAP", soap, RATES),
    Entry("shampoo", "Shampoo", shampoo, RATES),
    Entry("singd", "SINGD", singd, (1e-4, 3e-4, 1e-3), {"every": (10, 1)}),
    Entry("empirical", "empirical KFAC", empirical_kfac, (3e-2, 1e-1, 3e-1), {"damping": (1e-2, 1e-3, 1e-1)}),
)
OURS = (
    Entry("kfac", "KFAC", lambda model, problem: optimizers.KFAC(model)),
    Entry("adaptive", "KFAC, adaptive", lambda model, problem: optimizers.KFAC(model, adaptive=True), closure=True),
    Entry("ekfac", "EKFAC", lambda model, problem: optimizers.EKFAC(model)),
)
ENTRIES = {entry.name: entry for entry in (*RIVALS, *OURS)}
ANNEALED = {entry.name: entry for entry in (rival.under(cosine, "cosine") for rival in RIVALS[:4])}
