"""Roots of a loss's Hessian at the output of the model, and labels drawn from the likelihood that the loss stands for.

For sample n, H is the Hessian of the per-sample loss l_n with respect to ``output[n]``. l_n is a sum of *terms* times
their *masses* (1, or 1/T in a mean of T terms; class weights, ignored places, targets that add up to another mass than
1). Each term has the Hessian of one unit of mass: ``diag(p) - p p^T`` over the classes for cross-entropy, ``p (1 - p)``
for binary cross-entropy, 2 for a square, ``exp(f)`` for Poisson. A ``_Kind`` says so once for each torch loss. Every
other loss has its Hessian by differentiating twice: entry by entry where it is known to be diagonal, else whole.

A root here is a function eps -> S eps with ``S S^T = H``, S square, applied to every sample: ``eps`` and the result
have shape (k, *output.shape). Root of the categorical: Martens, Sutskever & Swersky 2012, arXiv:1206.6464. Sampled
labels: Martens & Grosse 2015, arXiv:1503.05671.

Outputs here are float32 or float64 without graph, their dim 0 holds the samples; the classes are dim 1.
"""

from __future__ import annotations

import copy
import functools
import math
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvature.losses import Loss, per_sample_losses, reduction_of

Root = Callable[[Tensor], Tensor]
Draw = Callable[[int, torch.Generator], Tensor]


def hessian_root(loss: Loss, output: Tensor, target: Any = None) -> Root:
    """Return eps -> S eps with ``S S^T`` the Hessian of l_n at ``output[n]``, for every sample n.

    Args:
        loss: a torch loss module, or a callable ``loss(output, target) -> scalar``, twice differentiable.
        output: shape (N, ...).
        target: as ``loss`` takes it. Cross-entropy, binary cross-entropy with logits, MSE and Poisson (of the log rate)
            need none, unless they have weights that depend on it.

    Raises:
        ValueError: the target is needed and missing; or the Hessian of a sample is not positive semi-definite. One that
            is not finite gives nan for its sample.
    """
    loss, kind = _resolve(loss)
    if kind is not None and kind.root is not None:
        scale = term_masses(loss, output, target).sqrt()
        unit = kind.root(output)
        return lambda eps: scale * unit(eps)
    if target is None:
        raise ValueError(
            f"the Hessian of {_name(loss)} depends on the target, which is missing: pass target= (in an optimizer, "
            "choose isotropic(), which needs none)"
        )
    if kind is not None:
        (curves,) = _second_derivatives(loss, output, target, diagonal=True)
        _require_semidefinite(loss, curves)
        scale = curves.clamp(min=0).sqrt()
        return lambda eps: scale * eps
    matrix = _dense_root(loss, output, target)
    return lambda eps: torch.einsum("nij,knj->kni", matrix, eps.reshape(*eps.shape[:2], -1)).reshape(eps.shape)


def likelihood(loss: Loss, output: Tensor, target: Any = None) -> Draw:
    """Return (k, generator) -> k gradients at labels drawn from the likelihood, independent of each other.

    A gradient is that of each term's negative log-likelihood at its own drawn label, times the root of the term's mass:
    its second moment is the Hessian of l_n, shape (k, *output.shape).

    Args:
        loss, output, target: as for `hessian_root`; nothing is differentiated.

    Raises:
        ValueError: the loss is the negative logarithm of no known likelihood; or its weights need the target.
    """
    loss, kind = _resolve(loss)
    if kind is None or kind.draw is None:
        known = ", ".join(t.__name__ for t, row in _KINDS.items() if row.draw is not None)
        raise ValueError(
            f"sampled() draws labels from the likelihood of the loss, and {_name(loss)} has none that is known here; "
            f"these have one: {known} (of the log rate). Use exact(), propagated() or isotropic() instead"
        )
    scale = term_masses(loss, output, target).sqrt()
    unit = kind.draw(output)
    return lambda k, generator: scale * unit(k, generator)


def term_masses(loss: Loss, output: Tensor, target: Any = None, strict: bool = True) -> Tensor:
    """Say what the term at each place of the output counts for in l_n.

    1 where the loss adds; 1/T where it is a mean over T terms per sample; with class indices the weight of the class,
    0 where ignored, over the sum of these; times ``pos_weight``, ``weight`` and the sum of a soft target. A callable
    counts as one term per sample.

    Args:
        loss, output, target: as for `hessian_root`. Without a target no place is ignored.
        strict: whether weights that depend on a missing target are an error; else they count 1.

    Returns:
        Shape of the output, with size 1 along the dim of the classes, if any.

    Raises:
        ValueError: weights need the target, a mass is negative, shapes do not fit.
    """
    loss, kind = _resolve(loss)
    if kind is None:
        return torch.ones_like(output)
    if kind.classes and output.ndim < 2:
        raise ValueError(f"{_name(loss)} takes outputs of shape (N, C, ...), got {tuple(output.shape)}")
    if target is None:
        for name in kind.weights if strict else ():
            if getattr(loss, name) is not None:
                raise ValueError(f"{_name(loss)} has {name}=, which needs targets: pass target=")
        target = kind.stand_in(output) if kind.stand_in else None
    masses = torch.ones_like(output[:, :1] if kind.classes else output)
    if target is None or kind.probe is None:
        if target is not None and not kind.classes:
            _require_broadcast(loss, output, target)
        # batchmean adds within a sample
        return masses / masses[0].numel() if getattr(loss, "reduction", "mean") == "mean" else masses
    return _probed_masses(loss, kind.probe(output), output, target).reshape(masses.shape)


@dataclass(frozen=True)
class _Kind:
    """A torch loss whose terms are entries of the output, or whole columns of classes; its Hessian for unit mass.

    Attributes:
        classes: whether a term takes a whole dim 1, of classes, and not one entry.
        root: output -> root of the Hessian of terms of mass 1. None: diagonal, and found by differentiating.
        draw: output -> gradients of terms of mass 1 at drawn labels. None: no likelihood.
        probe: output -> (f, value): a term of mass 1 has this value where all of the output is f. None: all masses 1.
        weights: attributes of the loss that make the masses depend on the target.
        stand_in: output -> a target that serves where none is given.
        needs: an attribute of the loss without which ``root`` and ``draw`` do not hold.
    """

    classes: bool = False
    root: Callable[[Tensor], Root] | None = None
    draw: Callable[[Tensor], Draw] | None = None
    probe: Callable[[Tensor], tuple[float, float]] | None = None
    weights: tuple[str, ...] = ()
    stand_in: Callable[[Tensor], Tensor] | None = None
    needs: str = ""


def _probed_masses(loss: Any, probe: tuple[float, float], output: Tensor, target: Tensor) -> Tensor:
    """Read the masses off the loss itself: its terms where each is its mass times a known value. Shape of the terms."""
    at, value = probe
    dtype = output.dtype if loss.weight is None else loss.weight.dtype
    flat = torch.full_like(output, at, dtype=dtype)
    if target.is_floating_point():
        target = target.to(dtype)
    unreduced = copy.copy(loss)
    unreduced.reduction = "none"
    terms = unreduced.forward(flat, target)
    sums = terms.flatten(1).sum(1) if terms.ndim > 1 else terms
    # a mean divides by what is weighed and not ignored; where that is nothing, torch has 0/0 and no curvature
    share = torch.where(sums == 0, 0, per_sample_losses(loss, flat, target, len(flat)) / sums)
    masses = terms * share.reshape(-1, *[1] * (terms.ndim - 1))
    _require_semidefinite(loss, masses)
    return (masses / value if value else masses).to(output.dtype)


def _categorical_root(output: Tensor) -> Root:
    p = output.softmax(1)
    r = p.sqrt()

    def root(eps: Tensor) -> Tensor:
        mixed = r * eps
        return mixed - p * mixed.sum(2, keepdim=True)

    return root


def _categorical_draw(output: Tensor) -> Draw:
    logp = output.log_softmax(1)
    p = logp.exp()

    def draw(k: int, generator: torch.Generator) -> Tensor:
        # the first to arrive at rates p is distributed as p; unlike multinomial, nan goes through and stops no device
        times = output.new_empty(k, *output.shape).exponential_(generator=generator)
        label = (logp - times.log()).argmax(2, keepdim=True)
        return p.expand_as(times).scatter_add(2, label, -torch.ones_like(times[:, :, :1]))

    return draw


def _bernoulli_root(output: Tensor) -> Root:
    scale = (output.sigmoid() * (-output).sigmoid()).sqrt()
    return lambda eps: scale * eps


def _bernoulli_draw(output: Tensor) -> Draw:
    p = output.sigmoid()
    return lambda k, generator: p - (_rand(torch.rand, k, output, generator) < p).to(p.dtype)


def _normal_root(output: Tensor) -> Root:
    return lambda eps: math.sqrt(2) * eps


def _normal_draw(output: Tensor) -> Draw:
    return lambda k, generator: math.sqrt(2) * _rand(torch.randn, k, output, generator)


def _poisson_root(output: Tensor) -> Root:
    scale = (output / 2).exp()
    return lambda eps: scale * eps


def _poisson_draw(output: Tensor) -> Draw:
    rate = output.exp()
    finite = rate.nan_to_num(0.0, 0.0, 0.0)  # torch.poisson stops a device at nan; the difference keeps it
    return lambda k, generator: rate - torch.poisson(finite.expand(k, *rate.shape), generator=generator)


def _rand(make: Callable[..., Tensor], k: int, output: Tensor, generator: torch.Generator) -> Tensor:
    return make(k, *output.shape, generator=generator, dtype=output.dtype, device=output.device)


# By exact type: a subclass may compute something else.
_ENTRIES = _Kind()
_KINDS: dict[type, _Kind] = {
    nn.CrossEntropyLoss: _Kind(
        True, _categorical_root, _categorical_draw, lambda output: (0.0, math.log(output.shape[1])), ("weight",)
    ),
    nn.BCEWithLogitsLoss: _Kind(
        False, _bernoulli_root, _bernoulli_draw, lambda _: (0.0, math.log(2)), ("pos_weight",), torch.zeros_like
    ),
    nn.MSELoss: _Kind(False, _normal_root, _normal_draw),
    nn.PoissonNLLLoss: _Kind(False, _poisson_root, _poisson_draw, needs="log_input"),
    nn.NLLLoss: _Kind(True, probe=lambda _: (-1.0, 1.0)),  # linear
    nn.BCELoss: _ENTRIES,
    nn.L1Loss: _ENTRIES,
    nn.SmoothL1Loss: _ENTRIES,
    nn.HuberLoss: _ENTRIES,
    nn.KLDivLoss: _ENTRIES,
    nn.SoftMarginLoss: _ENTRIES,
}
_FUNCTIONS: dict[Any, nn.Module] = {
    F.cross_entropy: nn.CrossEntropyLoss(),
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss(),
    F.mse_loss: nn.MSELoss(),
    F.poisson_nll_loss: nn.PoissonNLLLoss(),
}


def _resolve(loss: Loss) -> tuple[Any, _Kind | None]:
    """The loss, a function of torch as its module, and its kind: None for any other callable."""
    if isinstance(loss, types.FunctionType):
        loss = _FUNCTIONS.get(loss, loss)
    reduction_of(loss)  # refuses "none"
    kind = _KINDS.get(type(loss))
    if kind is not None and kind.needs and not getattr(loss, kind.needs):
        kind = replace(kind, root=None, draw=None)
    return loss, kind


def _second_derivatives(loss: Loss, output: Tensor, target: Any, diagonal: bool) -> list[Tensor]:
    """Rows of the Hessian of every l_n, each of the shape of the output; or the one row of its sums, its diagonal."""
    point = output.detach().requires_grad_()
    with torch.enable_grad():
        losses = per_sample_losses(loss, point, target, len(point))
        if not losses.requires_grad:
            raise ValueError(f"{_name(loss)} is not differentiable in the output")
        # l_n depends on output[n] alone, so one backward pass serves all samples
        (slope,) = torch.autograd.grad(losses.sum(), point, create_graph=True, materialize_grads=True)
        entries = [slope] if diagonal else slope.reshape(len(slope), -1).unbind(1)
        if not slope.requires_grad:  # linear
            return [torch.zeros_like(output) for _ in entries]
        derive = functools.partial(torch.autograd.grad, inputs=point, retain_graph=True, materialize_grads=True)
        return [derive(entry.sum())[0].detach() for entry in entries]


def _dense_root(loss: Loss, output: Tensor, target: Any) -> Tensor:
    """Root (N, D, D) of the Hessian of every l_n, D the size of one sample's output."""
    rows = _second_derivatives(loss, output, target, diagonal=False)
    hessian = torch.stack(rows, 1).reshape(len(output), len(rows), len(rows))
    finite = hessian.isfinite().all(2).all(1)[:, None, None]
    values, vectors = torch.linalg.eigh(torch.where(finite, (hessian + hessian.mT) / 2, 0))
    _require_semidefinite(loss, values, values.shape[1])
    return torch.where(finite, vectors * values.clamp(min=0).sqrt()[:, None, :], math.nan)


def _require_semidefinite(loss: Loss, values: Tensor, factor: int = 1) -> None:
    """Refuse values that are negative by more than ``factor`` times the rounding errors of the largest."""
    finite = values.nan_to_num(0.0, 0.0)
    least = finite.amin()
    if least < -100 * factor * torch.finfo(values.dtype).eps * finite.abs().amax():
        raise ValueError(
            f"{_name(loss)} is not convex in the output: its Hessian there is not positive semi-definite (found "
            f"{least.item():.3g}), so it has no root. Use isotropic(), or a convex loss"
        )


def _require_broadcast(loss: Loss, output: Tensor, target: Any) -> None:
    """Refuse a target larger than the output, of which the loss would make more terms than the output has entries."""
    if isinstance(target, Tensor) and torch.broadcast_shapes(output.shape, target.shape) != output.shape:
        raise ValueError(
            f"{_name(loss)} compares output {tuple(output.shape)} and target {tuple(target.shape)} entry by entry: "
            "give both the same shape"
        )


def _name(loss: Loss) -> str:
    return getattr(loss, "__qualname__", type(loss).__qualname__)
