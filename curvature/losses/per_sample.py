"""Per-sample losses: the terms of a loss, how it averages or sums them, and the loss of every sample alone.

Only this module knows reductions, class weights, ``ignore_index``, ``label_smoothing`` and ``pos_weight``.

A torch loss sums or averages *terms* (``reduction="none"`` returns them), each of which belongs to one sample. A mean
divides by the *mass* of its terms: their number or, with class indices, the total weight of the classes that are not
ignored. A ``_Reduction`` describes each torch loss; every other callable is run on each sample alone.

`resolve` turns what a user passes into a callable of (output, target). Call only what it returns.
"""

import copy
import functools
import logging
import math
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[Any, Any], Tensor]

_log = logging.getLogger("curvature")


def reduction_of(loss: Loss) -> Literal["mean", "sum"]:
    """Whether the loss of a batch is the mean or the sum of the losses of its samples.

    Args:
        loss: a torch loss module or a callable; without an attribute ``reduction`` it counts as a mean.
            ``KLDivLoss(reduction="batchmean")`` is a mean (of losses that are sums).

    Raises:
        ValueError: any other reduction, such as ``"none"``.
    """
    reduction = getattr(loss, "reduction", "mean")
    if reduction == "batchmean" and isinstance(loss, nn.KLDivLoss):
        return "mean"
    if reduction == "mean" or reduction == "sum":
        return "mean" if reduction == "mean" else "sum"
    raise ValueError(f"{name_of(loss)} has reduction={reduction!r}, which is no scalar loss: use 'mean' or 'sum'")


def resolve(loss: Loss) -> Loss:
    """The loss as a callable of (output, target) in the form that this package knows.

    A function of ``torch.nn.functional`` becomes its module; torch's ``GaussianNLLLoss``, which takes three arguments,
    becomes `GaussianNLLLoss` of this module. Every other loss is returned unchanged.
    """
    if isinstance(loss, types.FunctionType):
        return _FUNCTIONS.get(loss, loss)
    return GaussianNLLLoss(loss) if type(loss) is nn.GaussianNLLLoss else loss


class GaussianNLLLoss(nn.Module):
    """Torch's loss of this name for an output that holds both heads: along dim 1 the means, then as many variances.

    The target has the shape of the means. As in torch, variances below ``eps`` count as ``eps``, and pass the gradient
    at ``eps``.
    """

    def __init__(self, loss: nn.GaussianNLLLoss) -> None:
        super().__init__()
        self.reduction, self.full, self.eps = loss.reduction, loss.full, loss.eps

    def forward(self, output: Any, target: Tensor) -> Tensor:
        """The loss at ``output`` of shape (N, 2d, ...), or a tuple (mean, variance).

        Raises:
            ValueError: the output does not consist of two heads, the target does not have the shape of the means, or a
                variance is negative.
        """
        mean, variance = self.heads(output)
        if target.shape != mean.shape:
            raise ValueError(f"GaussianNLLLoss: target {tuple(target.shape)}, but the means are {tuple(mean.shape)}")
        terms = 0.5 * (variance.log() + (mean - target).square() / variance)
        if self.full:
            terms = terms + 0.5 * math.log(2 * math.pi)
        return terms if self.reduction == "none" else terms.mean() if self.reduction == "mean" else terms.sum()

    def heads(self, output: Any) -> tuple[Tensor, Tensor]:
        """Mean and variance, the latter at least ``eps``; errors as for `forward`."""
        output = join_heads(self, output)
        if not isinstance(output, Tensor) or output.ndim < 2 or output.shape[1] % 2:
            found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(
                "GaussianNLLLoss takes an output (N, 2d, ...), whose dim 1 holds the means and then the variances, or "
                f"a tuple (mean, variance), each (N, d, ...); found {found}"
            )
        mean, variance = output.chunk(2, 1)
        try:
            negative = bool((variance < 0).any())
        except RuntimeError:  # vmap does not allow branching on values
            negative = False
        if negative:
            raise ValueError(
                "GaussianNLLLoss: the variances have negative entries; softplus or exp makes them positive"
            )
        passing = self.eps + (variance - variance.detach())  # the gradient passes, as in torch
        return mean, torch.where(variance < self.eps, passing, variance)


def join_heads(loss: Loss, output: Any) -> Any:
    """Concatenate a tuple (mean, variance) for `GaussianNLLLoss` along dim 1; return any other output unchanged.

    A variance that torch would broadcast to the mean is expanded first.
    """
    if not isinstance(loss, GaussianNLLLoss) or not isinstance(output, tuple | list) or len(output) != 2:
        return output
    mean, variance = output
    if mean.ndim < 2:
        raise ValueError(f"GaussianNLLLoss: the mean must have shape (N, d, ...), found {tuple(mean.shape)}")
    if variance.shape == mean.shape[:-1]:
        variance = variance.unsqueeze(-1)
    return torch.cat([mean, variance.expand_as(mean)], 1)


def per_sample_losses(
    loss: Loss, output: Tensor, target: Any, count: int, output_dim: int = 0, target_dim: int = 0
) -> Tensor:
    """The loss of every sample alone: l_n is ``loss`` called on a batch of that one sample.

    Differentiable in ``output``. If all of a sample is ignored, nan with gradient zero, as torch's mean.

    Args:
        loss: a torch loss module, or any callable ``loss(output, target) -> scalar``. Only the arguments are split into
            samples: what differs between samples must come with ``target``, except ``weight`` and ``pos_weight`` of a
            torch loss, which broadcast against the output and are split with it.
        output: of size N, or N*m for m consecutive rows per sample, along ``output_dim``; otherwise of any shape.
        target: likewise along ``target_dim``, with its own m; None; or a tuple or dict of these.
        count: N, the number of samples.
        output_dim: the dim of ``output`` that holds the samples.
        target_dim: the dim of every tensor in ``target`` that holds the samples.

    Returns:
        Shape (N,), in the unit of ``loss``, on the device of the output.

    Raises:
        ValueError: a size is not a multiple of N, the target cannot be split, the loss would broadcast shapes across
            samples, it returns no scalar, or its ``reduction`` is neither a mean nor a sum.
    """
    loss = resolve(loss)
    mean = reduction_of(loss) == "mean"
    output_dim = _sample_dim("output", output, count, output_dim)
    map_target(lambda t: _sample_dim("target", t, count, target_dim), target)

    rule = REDUCTIONS.get(type(loss))
    if rule is None or not isinstance(target, Tensor):
        return _sample_by_sample(loss, output, target, count, output_dim, target_dim)
    target_dim %= target.ndim
    if rule.broadcasts and count > 1:
        _refuse_mixing(loss, output, target, output_dim, target_dim)
    dim = rule.dim_of_terms(output, target, output_dim, target_dim)
    if dim is None or getattr(loss, "reduction", "mean") == "batchmean":
        # batchmean divides by the size of dim 0, not by a number of terms
        return _sample_by_sample(loss, output, target, count, output_dim, target_dim)

    terms, mass = _terms(loss, rule, output, target)
    sums = _sum_by_sample(terms, count, dim)
    if not mean:
        return sums
    return sums / (terms.numel() // count if mass is None else _sum_by_sample(mass, count, dim))


def sample_masses(
    loss: Loss, output: Tensor, target: Any, count: int, output_dim: int = 0, target_dim: int = 0
) -> Tensor:
    """The masses m_n of the samples in the loss of a batch, which is ``sum_n m_n l_n / sum_n m_n`` for a mean.

    m_n is the number of terms of sample n or, with class indices, the total weight of its classes that are not ignored.
    It is 1 if the loss is a sum (the loss of the batch is then ``sum_n m_n l_n``), and for
    ``KLDivLoss(reduction="batchmean")``, which averages over samples. Those of a callable have to be found (`masses`).

    Args:
        loss, output, ..., target_dim: as for `per_sample_losses`. Without a target, all terms count 1.

    Returns:
        Shape (N,), in the dtype of ``output``, at least float32.

    Raises:
        ValueError: invalid sizes or reduction, as for `per_sample_losses`.
    """
    loss = resolve(loss)
    mean = reduction_of(loss) == "mean"
    output_dim = _sample_dim("output", output, count, output_dim)
    map_target(lambda t: _sample_dim("target", t, count, target_dim), target)
    masses = torch.ones(count, dtype=torch.promote_types(output.dtype, torch.float32), device=output.device)
    rule = REDUCTIONS.get(type(loss))
    if rule is None or not mean or getattr(loss, "reduction", "mean") == "batchmean":
        return masses
    mass = rule.mass(loss, target) if rule.mass and isinstance(target, Tensor) else None
    if mass is not None:
        return _sum_by_sample(mass.to(masses), count, target_dim % target.ndim)
    if rule.summed is not None and output_dim == rule.summed % output.ndim:
        return masses
    return masses * (math.prod(rule.shape_of_terms(output)) // count)


def is_in_closed_form(loss: Loss, output: Tensor, target: Any, output_dim: int = 0, target_dim: int = 0) -> bool:
    """Whether torch itself makes the loss of the batch from the same terms as that of each sample.

    False is no refusal: the loss has to be tried. Arguments as for `per_sample_losses`.
    """
    loss = resolve(loss)
    rule = REDUCTIONS.get(type(loss))
    if rule is None or not isinstance(target, Tensor) or getattr(loss, "reduction", "mean") == "batchmean":
        return False
    return rule.dim_of_terms(output, target, output_dim % output.ndim, target_dim % target.ndim) is not None


def is_entrywise(loss: Loss) -> bool:
    """Whether a torch loss treats all entries of output and target alike, so that their axes may be permuted."""
    rule = REDUCTIONS.get(type(resolve(loss)))
    plain = getattr(loss, "weight", None) is getattr(loss, "pos_weight", None) is None
    return type(rule) is _Reduction and rule.summed is None and plain


@dataclass(frozen=True)
class _Reduction:
    """How the terms of a torch loss relate to the entries of its output.

    Attributes:
        summed: the dim of the output that a term sums over (the classes); None: every entry is a term. The target has
            the shape of the output or, if torch takes class indices, that of the terms.
        broadcasts: whether torch broadcasts output and target of different shapes.
        mass: ``mass(loss, target)``: the mass of each term in a mean, in the shape of the terms. None: all are 1.
    """

    summed: int | None
    broadcasts: bool = False
    mass: Callable[[Any, Tensor], Tensor | None] | None = None

    def shape_of_terms(self, output: Tensor) -> list[int]:
        """Shape of the output without the summed dim."""
        shape = list(output.shape)
        if self.summed is not None:
            del shape[self.summed]
        return shape

    def dim_of_terms(self, output: Tensor, target: Tensor, output_dim: int, target_dim: int) -> int | None:
        """The dim of the terms that holds the samples; None if these shapes are not covered."""
        dim = output_dim
        if self.summed is not None:
            summed = self.summed % output.ndim
            if output_dim == summed:
                return None
            dim -= output_dim > summed
        if target.shape == output.shape and target_dim == output_dim:
            return dim
        if list(target.shape) == self.shape_of_terms(output) and target_dim == dim:
            return dim
        return None


class _HeadsReduction(_Reduction):
    """One term per mean, in the first half of dim 1, and its variance, in the second half."""

    def shape_of_terms(self, output: Tensor) -> list[int]:
        shape = list(output.shape)
        shape[1:2] = [size // 2 for size in shape[1:2]]
        return shape

    def dim_of_terms(self, output: Tensor, target: Tensor, output_dim: int, target_dim: int) -> int | None:
        fits = output_dim != 1 and list(target.shape) == self.shape_of_terms(output)
        return output_dim if fits and target_dim == output_dim else None


def _class_mass(loss: Any, target: Tensor) -> Tensor | None:
    """Mass of terms with class indices: the weight of the class, 0 if ignored. Terms with probabilities count 1."""
    if target.is_floating_point():
        return None
    weight: Tensor | None = loss.weight
    if weight is None:
        return target.ne(loss.ignore_index)
    ignored = target == loss.ignore_index
    return weight[target.masked_fill(ignored, 0).long()].masked_fill(ignored, 0)


# By exact type, since a subclass may compute something else.
_ENTRYWISE = _Reduction(None, broadcasts=True)
REDUCTIONS: dict[type, _Reduction] = {
    nn.CrossEntropyLoss: _Reduction(1, mass=_class_mass),
    nn.NLLLoss: _Reduction(1, mass=_class_mass),
    nn.MultiMarginLoss: _Reduction(1),
    nn.MultiLabelMarginLoss: _Reduction(1),
    nn.MultiLabelSoftMarginLoss: _Reduction(-1, broadcasts=True),
    nn.BCELoss: _Reduction(None),
    nn.BCEWithLogitsLoss: _Reduction(None),
    nn.MSELoss: _ENTRYWISE,
    nn.L1Loss: _ENTRYWISE,
    nn.SmoothL1Loss: _ENTRYWISE,
    nn.HuberLoss: _ENTRYWISE,
    nn.PoissonNLLLoss: _ENTRYWISE,
    nn.KLDivLoss: _ENTRYWISE,
    nn.SoftMarginLoss: _ENTRYWISE,
    GaussianNLLLoss: _HeadsReduction(None),
}
# The modules that equal these functions with default arguments.
_FUNCTIONS: dict[Any, nn.Module] = {
    F.cross_entropy: nn.CrossEntropyLoss(),
    F.nll_loss: nn.NLLLoss(),
    F.multi_margin_loss: nn.MultiMarginLoss(),
    F.multilabel_margin_loss: nn.MultiLabelMarginLoss(),
    F.multilabel_soft_margin_loss: nn.MultiLabelSoftMarginLoss(),
    F.binary_cross_entropy: nn.BCELoss(),
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss(),
    F.mse_loss: nn.MSELoss(),
    F.l1_loss: nn.L1Loss(),
    F.smooth_l1_loss: nn.SmoothL1Loss(),
    F.huber_loss: nn.HuberLoss(),
    F.poisson_nll_loss: nn.PoissonNLLLoss(),
    F.kl_div: nn.KLDivLoss(),
    F.soft_margin_loss: nn.SoftMarginLoss(),
}


def _terms(loss: Any, rule: _Reduction, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
    """The terms of a torch loss and their masses (None: all 1). A mean is the quotient of the two sums."""
    unreduced = copy.copy(loss)
    unreduced.reduction = "none"
    terms = unreduced.forward(output, target)
    expected = rule.shape_of_terms(output)
    if list(terms.shape) != expected:
        raise ValueError(
            f"{name_of(loss)} has terms of shape {tuple(terms.shape)} where its output of shape {tuple(output.shape)} "
            f"has {tuple(expected)}: its weight must broadcast to the shape of the output"
        )
    return terms, rule.mass(loss, target) if rule.mass else None


def _refuse_mixing(loss: Loss, output: Tensor, target: Tensor, output_dim: int, target_dim: int) -> None:
    if output.ndim - output_dim != target.ndim - target_dim:
        raise ValueError(
            f"{name_of(loss)} compares output {tuple(output.shape)} and target {tuple(target.shape)} entry by entry, "
            f"which mixes the samples in their dims {output_dim} and {target_dim}: give both the same shape"
        )


def _sample_by_sample(loss: Loss, output: Tensor, target: Any, count: int, output_dim: int, target_dim: int) -> Tensor:
    """Run any callable on every sample alone, by ``vmap`` or, if that fails, in a loop."""
    leaves: list[Tensor] = []
    map_target(leaves.append, target)
    tensors = [output, *leaves]
    dims = [output_dim, *(target_dim % leaf.ndim for leaf in leaves)]

    def alone(piece: Tensor, *pieces: Tensor) -> Tensor:
        rest = iter(pieces)
        value = loss(piece, map_target(lambda _: next(rest), target))
        return require_scalar(loss, value, "a batch of one sample").to(piece.device)  # it may be where the target is

    cut = [t.unflatten(dim, (count, t.shape[dim] // count)) for t, dim in zip(tensors, dims, strict=True)]
    # clones, because a loss may work in place
    try:
        batched = [t.clone() for t in cut]
        values = torch.func.vmap(alone, in_dims=tuple(dims), randomness="different")(*batched)
        assert isinstance(values, Tensor)
        return values
    except Exception:  # anything that vmap does not support; an error of the loss itself recurs below
        _log_loop(name_of(loss))
    samples = zip(*(t.unbind(dim) for t, dim in zip(cut, dims, strict=True)), strict=True)
    return torch.stack([alone(*(t.clone() for t in sample)) for sample in samples])


def require_scalar(loss: Loss, value: Any, what: str) -> Tensor:
    if not isinstance(value, Tensor) or value.ndim:
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{name_of(loss)} must return a scalar tensor for {what}, got {found}")
    return value


@functools.cache
def _log_loop(name: str) -> None:
    """Log once per kind of loss that it runs in a loop; call this while handling the reason."""
    _log.info("%s: one sample after the other, because vmap cannot: %s", name, sys.exc_info()[1])


def map_target(function: Callable[[Tensor], Any], target: Any) -> Any:
    """Apply ``function`` to the tensors of a target, in order, and rebuild its containers."""
    if target is None:
        return None
    if isinstance(target, Tensor):
        return function(target)
    if isinstance(target, dict):
        return {key: map_target(function, value) for key, value in target.items()}
    if isinstance(target, tuple):
        parts = [map_target(function, value) for value in target]
        return type(target)(*parts) if hasattr(target, "_fields") else tuple(parts)
    raise ValueError(f"a target must be a tensor, None, a tuple or a dict of these, got {type(target).__name__}")


def _sample_dim(what: str, tensor: Tensor, count: int, dim: int) -> int:
    """Check that ``dim`` holds N samples of at least one row each, and return it counted from the front."""
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    if not -tensor.ndim <= dim < tensor.ndim:
        raise ValueError(f"{what} of shape {tuple(tensor.shape)} has no dim {dim} to hold the {count} samples")
    size = tensor.shape[dim]
    if size == 0 or size % count:
        raise ValueError(f"{what} has size {size} along dim {dim}, which is not a multiple of the {count} samples")
    return dim % tensor.ndim


def _sum_by_sample(tensor: Tensor, count: int, dim: int) -> Tensor:
    """Sum (.., N*m, ..) to (N,)."""
    if tensor.shape == (count,):
        return tensor
    return tensor.movedim(dim, 0).reshape(count, -1).sum(1)


def name_of(loss: Loss) -> str:
    return getattr(loss, "__qualname__", type(loss).__qualname__)
