"""Curvature of a loss at the model's output: products with it, roots of it, and gradients at sampled labels.

For sample n, H is a curvature of the per-sample loss l_n at its rows of the output. l_n is a sum of *terms* times their
*masses* (1, or 1/T in a mean of T terms; class weights, ignored places, soft targets that do not sum to 1),
and a term of mass 1 has the H of its likelihood (`likelihoods`): a ``_Kind`` names it for each torch loss.
For every other loss, H is the Hessian, by differentiating twice.

A root is a function eps -> S eps with ``S S^T = H``, S square, applied to every sample; a product is u -> H u.
Arguments and results have shape (k, *output.shape).

Outputs are float32 or float64 without graph. Dim 0 holds N samples of one row each or, with ``count`` = N, N*m rows, m
consecutive ones per sample; dim 1 holds the classes.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from curvature.linalg import symmetric_eigh
from curvature.losses import likelihoods
from curvature.losses.likelihoods import Likelihood
from curvature.losses.output_batch import unit_vectors
from curvature.losses.per_sample import (
    GaussianNLLLoss,
    Loss,
    name_of,
    per_sample_losses,
    reduction_of,
    resolve,
    sample_masses,
)

LinearMap = Callable[[Tensor], Tensor]  # (k, *output.shape) to the same
Draw = Callable[[int, torch.Generator], Tensor]
Columns = tuple[int, Callable[[int, int], Tensor]]  # number of vectors; (start, stop) -> vectors start..stop
COLUMNS_PER_CHUNK = 64  # columns of H at a time


@dataclass(frozen=True)
class OutputCurvature:
    """H at one output.

    Attributes:
        product: builds the graph for products and returns u -> H u.
        root: eps -> S eps; None if only a decomposition of H gives it.
        columns: the columns of a root of H, as few as possible; None if there is no `root`.
        diagonal: of H, in the shape of the output; None if it needs a product for every entry.
    """

    product: Callable[[], LinearMap]
    root: LinearMap | None = None
    columns: Columns | None = None
    diagonal: Callable[[], Tensor] | None = None


def fisher_information(loss: Loss, output: Tensor, target: Any = None, count: int | None = None) -> OutputCurvature:
    """The expected Hessian of l_n if the loss is a negative log-likelihood, else its Hessian.

    Args:
        loss: a torch loss module, a function of the same name, or a twice differentiable callable
            ``loss(output, target) -> scalar``.
        output: shape (N, ...), or (N*m, ...) with ``count`` = N.
        target: as ``loss`` takes it. A likelihood needs it only for weights that depend on it.
        count: N; by default the size of dim 0.

    Raises:
        ValueError: the target is needed but missing, shapes do not fit, a mass is negative, or the loss is neither a
            sum nor a mean.
    """
    loss, kind = _resolve(loss)
    if kind is None or kind.likelihood is None:
        return _by_differentiating(loss, kind, output, target, count)
    masses = term_masses(loss, output, target, count=count)
    return _of_likelihood(kind.likelihood(loss, output), masses, output, count)


def hessian(loss: Loss, output: Tensor, target: Any = None, count: int | None = None) -> OutputCurvature:
    """The Hessian of l_n. Arguments and errors as for `fisher_information`."""
    loss, kind = _resolve(loss)
    if kind is not None and kind.likelihood is not None:
        masses = term_masses(loss, output, target, count=count)
        unit = kind.likelihood(loss, output)
        if unit.is_hessian:
            return _of_likelihood(unit, masses, output, count)
    return _by_differentiating(loss, kind, output, target, count)


def hessian_root(loss: Loss, output: Tensor, target: Any = None, count: int | None = None) -> LinearMap:
    """Return eps -> S eps with ``S S^T`` the `fisher_information` of every sample. Arguments and errors as there.

    Raises:
        ValueError: the target is needed but missing, or the Hessian of a sample is not positive semi-definite. A
            non-finite Hessian gives nan for its sample.
    """
    if target is None and _resolve(loss)[1] is None:
        raise _missing_target(loss)
    curvature = fisher_information(loss, output, target, count)
    return curvature.root or _root_by_eigh(loss, curvature.product(), output, count or len(output))


def hessian_product(loss: Loss, output: Tensor, target: Any, count: int) -> LinearMap:
    """Return u -> H u with H the Hessian of l_n, by differentiating l_n twice; zero if l_n is linear.

    The graph is built once, here; each call needs memory for its k vectors.

    Args:
        loss, output, target, count: as for `curvature.losses.per_sample_losses`, with samples along dim 0 of both.

    Raises:
        ValueError: the loss is not differentiable in the output; or as for `per_sample_losses`.
        RuntimeError: in a product, if torch cannot differentiate the loss twice.
    """
    point = output.detach().requires_grad_()
    with torch.enable_grad():
        losses = per_sample_losses(loss, point, target, count)
        if not losses.requires_grad:
            raise ValueError(f"{name_of(loss)} is not differentiable in the output")
        # l_n depends on its own rows alone, so one backward pass serves all samples
        (slope,) = torch.autograd.grad(losses.sum(), point, create_graph=True, materialize_grads=True)
    if not slope.requires_grad:  # linear
        return torch.zeros_like
    derive = functools.partial(torch.autograd.grad, slope, point, retain_graph=True, materialize_grads=True)

    def product(u: Tensor) -> Tensor:
        if len(u) > 1:
            try:
                return derive(u, is_grads_batched=True)[0]
            except RuntimeError:  # vmap does not support some function; an error of the loss itself recurs below
                pass
        try:
            return torch.stack([derive(one)[0] for one in u])
        except RuntimeError as error:
            raise RuntimeError(f"{name_of(loss)} cannot be differentiated twice: {error}") from error

    return product


def label_gradient_sampler(loss: Loss, output: Tensor, target: Any = None, count: int | None = None) -> Draw:
    """Return (k, generator) -> k gradients at labels drawn independently from the likelihood, (k, *output.shape).

    Each term contributes the gradient of its negative log-likelihood at its own label, times the root of its mass. The
    second moment is the `fisher_information`.

    Args:
        loss, output, target, count: as for `fisher_information`; nothing is differentiated.

    Raises:
        ValueError: the loss is no known negative log-likelihood, or its weights need the target.
    """
    unit, scale = _drawn_from(loss, output, target, count)
    return lambda k, generator: scale * unit.draw(k, generator)


def label_gradient_root(
    loss: Loss, output: Tensor, target: Any, count: int, k: int, generator: torch.Generator
) -> LinearMap:
    """Return eps -> S eps with S S^T the sum of outer products of k `label_gradient_sampler` draws, each term alone.

    The labels are drawn here, classes by how often they occur, so that the cost does not grow with k. Products of
    different terms of a sample are left out: their mean is zero.
    """
    unit, scale = _drawn_from(loss, output, target, count)
    root = unit.drawn_root(k, generator)
    return lambda eps: scale * root(eps)


def _drawn_from(loss: Loss, output: Tensor, target: Any, count: int | None) -> tuple[Likelihood, Tensor]:
    """The likelihood, and the roots of the terms' masses."""
    loss, kind = _resolve(loss)
    if kind is None or kind.likelihood is None:
        known = ", ".join(t.__name__ for t, row in _KINDS.items() if row.likelihood is not None)
        raise ValueError(
            f"sampled() draws labels from the likelihood of the loss, and {name_of(loss)} has none that is known here; "
            f"these have one: {known}. Use exact(), propagated() or isotropic() instead"
        )
    return kind.likelihood(loss, output), term_masses(loss, output, target, count=count).sqrt()


def term_masses(
    loss: Loss, output: Tensor, target: Any = None, strict: bool = True, count: int | None = None
) -> Tensor:
    """The mass of each term of the output in l_n.

    1 if the loss is a sum, 1/T if it is a mean over T terms per sample; with class indices, the weight of the class (0
    if ignored) over the sum of these; times ``pos_weight``, ``weight`` and the sum of a soft target. A callable counts
    as one term per sample.

    Args:
        loss, output, target, count: as for `fisher_information`. Without a target no place is ignored.
        strict: whether weights that depend on a missing target are an error; otherwise they count 1.

    Returns:
        Shape of the output, with size 1 along a dim of classes.

    Raises:
        ValueError: weights need the target, a mass is negative, shapes do not fit.
    """
    loss, kind = _resolve(loss)
    if kind is None:
        return torch.ones_like(output)
    count = count or len(output)
    if kind.classes and output.ndim < 2:
        raise ValueError(f"{name_of(loss)} takes outputs of shape (N, C, ...), got {tuple(output.shape)}")
    if target is None:
        for name in kind.weights if strict else ():
            if getattr(loss, name) is not None:
                raise ValueError(f"{name_of(loss)} has {name}=, which needs targets: pass target=")
        target = kind.stand_in(output) if kind.stand_in else None
    masses = torch.ones_like(output[:, :1] if kind.classes else output)
    if target is not None and kind.probe is not None:
        return _probed_masses(loss, kind.probe(output), output, target, count).reshape(masses.shape)
    terms = masses[:, : output.shape[1] // 2] if kind.heads else masses
    if target is not None and not kind.classes:
        _require_broadcast(loss, terms, target)
    # batchmean sums within a sample
    return masses / (terms.numel() // count) if getattr(loss, "reduction", "mean") == "mean" else masses


@dataclass(frozen=True)
class _LossKind:
    """A torch loss whose terms are entries of the output, or vectors of classes.

    Attributes:
        likelihood: (loss, output) -> the likelihood of terms of mass 1. None: none is known; the Hessian is diagonal.
        classes: whether a term uses all of dim 1, the classes, instead of one entry.
        heads: whether a term uses an entry of each half of dim 1.
        probe: output -> (f, value): a term of mass 1 has this value if all of the output is f. None: all masses are 1.
        weights: attributes of the loss that make the masses depend on the target.
        stand_in: output -> a substitute for a missing target.
    """

    likelihood: Callable[[Any, Tensor], Likelihood] | None = None
    classes: bool = False
    heads: bool = False
    probe: Callable[[Tensor], tuple[float, float]] | None = None
    weights: tuple[str, ...] = ()
    stand_in: Callable[[Tensor], Tensor] | None = None


def _poisson(loss: Any, output: Tensor) -> Likelihood:
    return likelihoods.Poisson(output) if loss.log_input else likelihoods.PoissonRate(output, loss.eps)


# By exact type, since a subclass may compute something else.
_ENTRYWISE = _LossKind()
_KINDS: dict[type, _LossKind] = {
    nn.CrossEntropyLoss: _LossKind(
        lambda _, output: likelihoods.Categorical(output),
        classes=True,
        probe=lambda output: (0.0, math.log(output.shape[1])),
        weights=("weight",),
    ),
    nn.NLLLoss: _LossKind(
        lambda _, output: likelihoods.LogProbabilities(output),
        classes=True,
        probe=lambda _: (-1.0, 1.0),
        weights=("weight",),
    ),
    nn.BCEWithLogitsLoss: _LossKind(
        lambda _, output: likelihoods.Bernoulli(output),
        probe=lambda _: (0.0, math.log(2)),
        weights=("pos_weight",),
        stand_in=torch.zeros_like,
    ),
    nn.BCELoss: _LossKind(
        lambda _, output: likelihoods.BernoulliProbability(output),
        probe=lambda _: (0.5, math.log(2)),
        stand_in=torch.zeros_like,
    ),
    nn.MSELoss: _LossKind(lambda _, output: likelihoods.Normal(output)),
    nn.PoissonNLLLoss: _LossKind(_poisson),
    GaussianNLLLoss: _LossKind(lambda loss, output: likelihoods.NormalHeads(*loss.heads(output)), heads=True),
    nn.L1Loss: _ENTRYWISE,
    nn.SmoothL1Loss: _ENTRYWISE,
    nn.HuberLoss: _ENTRYWISE,
    nn.KLDivLoss: _ENTRYWISE,
    nn.SoftMarginLoss: _ENTRYWISE,
}


def _resolve(loss: Loss) -> tuple[Any, _LossKind | None]:
    """The resolved loss and its kind, None for any other callable."""
    loss = resolve(loss)
    reduction_of(loss)  # refuses "none"
    return loss, _KINDS.get(type(loss))


def _of_likelihood(unit: Likelihood, masses: Tensor, output: Tensor, count: int | None) -> OutputCurvature:
    scale = masses.sqrt()
    return OutputCurvature(
        product=lambda: lambda u: unit.product(u).mul_(masses),
        root=lambda eps: scale * unit.root(eps),
        columns=_columns(lambda eps: scale * unit.thin_root(eps), output, count, unit.spares_last_class),
        diagonal=lambda: masses * unit.diagonal(),
    )


def _columns(root: LinearMap, output: Tensor, count: int | None, spares_last_class: bool = False) -> Columns:
    """The columns of a root, but for those of the last class if it spares them."""
    count = count or len(output)
    size = output.numel() // count
    each = output[0].numel()  # entries of a row, of which the last class has the last ones
    kept = each - each // output.shape[1] if spares_last_class and output.shape[1] > 1 else each

    def columns(start: int, stop: int) -> Tensor:
        position = torch.arange(start, stop, device=output.device)
        return root(unit_vectors(output, count, position // kept * each + position % kept))

    return size // each * kept, columns


def _by_differentiating(
    loss: Loss, kind: _LossKind | None, output: Tensor, target: Any, count: int | None
) -> OutputCurvature:
    """Differentiate twice; if H is known to be diagonal, give its root, too."""
    if target is None and kind is not None:
        raise _missing_target(loss)
    product = functools.partial(hessian_product, loss, output, target, count or len(output))
    if kind is not _ENTRYWISE:
        return OutputCurvature(product)
    curves = product()(torch.ones_like(output)[None])[0]
    _require_semidefinite(loss, curves)
    scale = curves.clamp(min=0).sqrt()
    root = lambda eps: scale * eps
    return OutputCurvature(lambda: lambda u: curves * u, root, _columns(root, output, count))


def _probed_masses(loss: Any, probe: tuple[float, float], output: Tensor, target: Tensor, count: int) -> Tensor:
    """Read the masses from the loss, at an output where each term is its mass times a known value."""
    at, value = probe
    dtype = output.dtype if loss.weight is None else loss.weight.dtype
    flat = output.new_full((), at, dtype=dtype).expand(output.shape)
    if target.is_floating_point():
        target = target.to(dtype)
    unreduced = copy.copy(loss)
    unreduced.reduction = "none"
    terms = unreduced.forward(flat, target)
    sums = terms.reshape(count, -1).sum(1)
    # a mean divides by the total weight of terms that are not ignored; if that is zero, torch has 0/0 and no curvature
    share = torch.where(sums == 0, 0, 1 / sample_masses(loss, flat, target, count).to(sums.dtype))
    masses = (terms.reshape(count, -1) * share[:, None]).reshape(terms.shape)
    if loss.weight is not None or target.is_floating_point():
        _require_semidefinite(loss, masses)
    return (masses / value if value else masses).to(output.dtype)


def _root_by_eigh(loss: Loss, product: LinearMap, output: Tensor, count: int) -> LinearMap:
    """A root of H by eigendecomposition, D x D for every sample, with D the entries of its output."""
    size = output.numel() // count
    columns = [
        product(unit_vectors(output, count, entries))
        for entries in torch.arange(size, device=output.device).split(COLUMNS_PER_CHUNK)
    ]
    matrix = torch.cat(columns).reshape(size, count, size).movedim(0, 1)
    finite = matrix.isfinite().all(2).all(1)[:, None, None]
    values, vectors = symmetric_eigh(torch.where(finite, matrix, 0))
    _require_semidefinite(loss, values, size)
    root = torch.where(finite, vectors * values.clamp(min=0).sqrt()[:, None, :], math.nan)
    return lambda eps: torch.einsum("nij,knj->kni", root, eps.reshape(len(eps), count, size)).reshape(eps.shape)


def _require_semidefinite(loss: Loss, values: Tensor, factor: int = 1) -> None:
    """Refuse values that are negative beyond ``factor`` times the rounding error of the largest."""
    finite = values.nan_to_num(0.0, 0.0)
    least = finite.amin()
    if least < -100 * factor * torch.finfo(values.dtype).eps * finite.abs().amax():
        raise ValueError(
            f"{name_of(loss)} is not convex in the output: its Hessian there is not positive semi-definite (found "
            f"{least.item():.3g}), so it has no root. Use isotropic(), or a convex loss"
        )


def _require_broadcast(loss: Loss, terms: Tensor, target: Any) -> None:
    """Refuse a target that would broadcast the output to more terms than it has entries."""
    if not isinstance(target, Tensor):
        return
    sizes = zip(reversed(target.shape), reversed(terms.shape), strict=False)
    if target.ndim > terms.ndim or any(size not in (1, full) for size, full in sizes):
        raise ValueError(
            f"{name_of(loss)} compares output {tuple(terms.shape)} and target {tuple(target.shape)} entry by entry: "
            "give both the same shape"
        )


def _missing_target(loss: Loss) -> ValueError:
    return ValueError(
        f"the Hessian of {name_of(loss)} depends on the target, which is missing: pass target= (in an optimizer, "
        "choose isotropic(), which needs none)"
    )
