"""Per-sample gradients ``{name: (N, *shape)}`` and norms (N,): one adapter per peer, and the reference."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from _rows import Method, Unsupported
from _rows import Named as Gradients
from torch import Tensor, nn

import curvature
from support.oracles import brute_force

one_by_one = brute_force.per_sample_gradients  # the reference
MAX_NORM = 1.0  # to which gradients are clipped
norms = lambda gradients: torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)


class Curvature(Method):
    """A function of ours."""

    def __init__(self, *setting: Any, function: Callable[..., Any]) -> None:
        super().__init__(*setting)
        self.function = function

    def run(self) -> Gradients | Tensor:
        return self.function(self.model, self.loss, self.x, self.y)


class Vmap(Method):
    """`torch.func`: vmap over grad over functional_call, the model made functional once, no chunks."""

    def __init__(self, model: nn.Module, loss: nn.Module, x: Tensor, y: Tensor) -> None:
        super().__init__(model, loss, x, y)
        self.values = {name: p.detach() for name, p in self.parameters.items()}
        self.call = torch.func.vmap(self.one(), in_dims=(None, 0, 0), randomness="different")

    def one(self) -> Callable[[Gradients, Tensor, Tensor], Gradients | Tensor]:
        def sample_loss(values: Gradients, x: Tensor, y: Tensor) -> Tensor:
            return self.loss(torch.func.functional_call(self.model, values, (x.unsqueeze(0),)), y.unsqueeze(0))

        return torch.func.grad(sample_loss)

    def run(self) -> Gradients | Tensor:
        return self.call(self.values, self.x, self.y)


class VmapNorms(Vmap):
    """The same with the norm taken inside the vmapped function."""

    def one(self) -> Callable[[Gradients, Tensor, Tensor], Gradients | Tensor]:
        gradient = super().one()
        return lambda *given: torch.stack([g.norm() for g in gradient(*given).values()]).norm()


class Opacus(Method):
    """`GradSampleModule`, wrapped once. It fills `.grad` besides, which cannot be turned off."""

    def __init__(self, model: nn.Module, loss: nn.Module, x: Tensor, y: Tensor) -> None:
        super().__init__(model, loss, x, y)
        self.wrapped = self.wrap()

    def wrap(self) -> nn.Module:
        from opacus.grad_sample import GradSampleModule

        return GradSampleModule(self.model, loss_reduction="mean")

    def run(self) -> Gradients | Tensor:
        self.wrapped.zero_grad(set_to_none=True)
        self.loss(self.wrapped(self.x), self.y).backward()
        return self.stored("grad_sample")

    def clear(self) -> None:
        self.wrapped.zero_grad(set_to_none=True)


class OpacusGhost(Opacus):
    """Ghost clipping: norms from activations and backprops for the layers it knows, from gradients for the others."""

    def wrap(self) -> nn.Module:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping

        return GradSampleModuleFastGradientClipping(self.model, loss_reduction="mean", use_ghost_clipping=True)

    def run(self) -> Gradients | Tensor:
        self.wrapped.zero_grad(set_to_none=True)
        self.loss(self.wrapped(self.x), self.y).backward()
        norms: Callable[[], Tensor] = self.wrapped.get_norm_sample  # type: ignore[assignment]
        return norms()


class OpacusClipped(Opacus):
    """Per-sample gradients by hooks, then `DPOptimizer` clips and adds them up."""

    def __init__(self, model: nn.Module, loss: nn.Module, x: Tensor, y: Tensor) -> None:
        from opacus.optimizers import DPOptimizer

        super().__init__(model, loss, x, y)
        inner = torch.optim.SGD(self.wrapped.parameters(), lr=0.1)
        count = self.x.shape[0]
        self.opt = DPOptimizer(inner, noise_multiplier=0.0, max_grad_norm=MAX_NORM, expected_batch_size=count)

    def run(self) -> Gradients | Tensor:
        self.clear()
        self.loss(self.wrapped(self.x), self.y).backward()
        self.opt.clip_and_accumulate()
        return self.stored("summed_grad")

    def clear(self) -> None:
        self.opt.zero_grad(set_to_none=True)


class OpacusGhostClipped(Opacus):
    """Ghost clipping: a backward pass for the norms, another of the weighted loss, as its `backward` makes them."""

    def wrap(self) -> nn.Module:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping

        return GradSampleModuleFastGradientClipping(self.model, max_grad_norm=MAX_NORM)

    def run(self) -> Gradients | Tensor:
        if not isinstance(self.loss, nn.CrossEntropyLoss):
            raise Unsupported("written for cross-entropy here")
        self.clear()
        terms = torch.nn.functional.cross_entropy(self.wrapped(self.x), self.y, reduction="none")
        losses, wrapped = terms.flatten(1).mean(1) if terms.ndim > 1 else terms, cast(Any, self.wrapped)
        losses.mean().backward(retain_graph=True)
        weights = wrapped.get_clipping_coef()
        self.clear()
        wrapped.disable_hooks()
        (weights * losses).sum().backward()
        wrapped.enable_hooks()
        return self.stored("grad")


class BackPACK(Method):
    """Base: the model extended once, a backward pass with an extension, what it stored at `attribute`.

    Extensions warn about layers that they do not know; `stored` finds the parameters without a result.
    """

    name: str
    attribute: str
    options: dict[str, int] = {}

    def __init__(self, model: nn.Module, loss: nn.Module, x: Tensor, y: Tensor) -> None:
        from backpack import extend

        super().__init__(model, loss, x, y)
        extend(self.model)
        self.extended_loss: nn.Module = extend(copy.deepcopy(loss))

    def value(self) -> Tensor:
        """What goes back."""
        return self.extended_loss(self.model(self.x), self.y)

    def run(self) -> Gradients | Tensor:
        from backpack import backpack, extensions

        with backpack(getattr(extensions, self.name)(**self.options)):
            self.value().backward()
        return self.stored(self.attribute)

    def clear(self) -> None:
        super().clear()
        for parameter in self.parameters.values():
            if hasattr(parameter, self.attribute):
                delattr(parameter, self.attribute)


class BackPACKGradients(BackPACK):
    """BackPACK divides by N under a mean loss, so N times the loss goes back."""

    name, attribute = "BatchGrad", "grad_batch"

    def value(self) -> Tensor:
        return super().value() * self.x.shape[0]


class BackPACKNorms(BackPACKGradients):
    """From squared norms per parameter."""

    name, attribute = "BatchL2Grad", "batch_l2"

    def run(self) -> Gradients | Tensor:
        return torch.stack(list(super().run().values())).sum(0).sqrt()


class ExpandedWeights(Method):
    """`torch.nn.utils._per_sample_grad.call_for_per_sample_grads`, which wraps the model anew for each call."""

    def run(self) -> Gradients | Tensor:
        from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

        self.loss(call_for_per_sample_grads(self.model, loss_reduction="mean")(self.x), self.y).backward()
        return self.stored("grad_sample")

    def clear(self) -> None:
        super().clear()
        for parameter in self.parameters.values():
            parameter.grad_sample = None  # type: ignore[attr-defined]


def then_norms(kind: type[Method]) -> type[Method]:
    """The same, then the norms of what it stored."""
    return type("Norms", (kind,), {"run": lambda self: norms(kind.run(self))})


def reference_clipped(gradients: Gradients) -> Gradients:
    """The sum of the samples' gradients, each clipped to `MAX_NORM`."""
    weights = (MAX_NORM / norms(gradients)).clamp(max=1)
    return {name: torch.tensordot(weights, g, 1) for name, g in gradients.items()}


Kinds = dict[str, Callable[..., Method]]
GRADIENTS: Kinds = {
    "curvature": partial(Curvature, function=curvature.per_sample_gradients),
    "vmap": Vmap,
    "Opacus": Opacus,
    "BackPACK": BackPACKGradients,
    "expanded weights": ExpandedWeights,
}
NORMS: Kinds = {
    "curvature": partial(Curvature, function=curvature.per_sample_norms),
    "vmap": VmapNorms,
    "Opacus": then_norms(Opacus),
    "Opacus ghost": OpacusGhost,
    "BackPACK": BackPACKNorms,
    "expanded weights": then_norms(ExpandedWeights),
}
CLIPPED: Kinds = {
    "curvature": partial(Curvature, function=partial(curvature.clipped_gradient, max_norm=MAX_NORM)),
    "Opacus": OpacusClipped,
    "Opacus ghost": OpacusGhostClipped,
}

warnings.filterwarnings("ignore", message="Full backward hook is firing", module="torch")
warnings.filterwarnings("ignore", message="Secure RNG turned off")
