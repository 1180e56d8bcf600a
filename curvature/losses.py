"""What a loss is made of: its terms, how it averages or adds them, and the loss of every sample alone.

The one place that knows reductions, class weights, ``ignore_index``, ``label_smoothing`` and ``pos_weight``.

A torch loss sums or averages *terms* (``reduction="none"`` returns them), each of which belongs to one sample. A mean
divides by the *mass* of the terms it averages: their number or, with class indices, the weights of the classes that are
not ignored. A ``_Rule`` says so once for each torch loss; every other callable is run on each sample alone.
"""

import copy
import functools
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

Loss = Callable[[Any, Any], Tensor]

_log = logging.getLogger("curvature")


def reduction_of(loss: Loss) -> Literal["mean", "sum"]:
    """Say whether the loss of a batch is the mean or the sum of the losses of its samples.

    Args:
        loss: a torch loss module, or a callable; one without an attribute ``reduction`` counts as a mean.
            ``KLDivLoss(reduction="batchmean")`` is a mean (of losses that are sums).

    Raises:
        ValueError: for any other reduction, ``"none"`` among them.
    """
    reduction = getattr(loss, "reduction", "mean")
    if reduction == "batchmean" and isinstance(loss, nn.KLDivLoss):
        return "mean"
    if reduction == "mean" or reduction == "sum":
        return "mean" if reduction == "mean" else "sum"
    raise ValueError(f"{_name(loss)} has reduction={reduction!r}, which is no scalar loss: use 'mean' or 'sum'")


def per_sample_losses(
    loss: Loss, output: Tensor, target: Any, count: int, output_dim: int = 0, target_dim: int = 0
) -> Tensor:
    """Compute the loss of every sample alone: l_n is ``loss`` called on a batch of that one sample.

    Differentiable in ``output``. Where torch's own mean is 0/0 (a sample whose places are all ignored) the value is nan
    and the gradient zero, as in torch.

    Args:
        loss: a torch loss module, or any callable ``loss(output, target) -> scalar``. Only the arguments are cut into
            samples: what differs from sample to sample must come with ``target``, except the ``weight`` and
            ``pos_weight`` of a torch loss, which broadcast against the output and are cut with it.
        output: size N, or N*m for m consecutive rows per sample, along ``output_dim``; any other shape.
        target: likewise along ``target_dim``, with an m of its own; None; or a tuple or dict of these.
        count: N, the number of samples.
        output_dim: the dim of ``output`` that holds the samples.
        target_dim: the dim of every tensor in ``target`` that holds the samples.

    Returns:
        Shape (N,), in the unit of ``loss``.

    Raises:
        ValueError: sizes that are not multiples of N, a target that cannot be cut, shapes that the loss would broadcast
            across samples, a loss that returns no scalar, a ``reduction`` that is neither a mean nor a sum.
    """
    mean = reduction_of(loss) == "mean"
    output_dim = _sample_dim("output", output, count, output_dim)
    _map_tensors(lambda t: _sample_dim("target", t, count, target_dim), target)

    rule = _RULES.get(type(loss))
    if rule is None or not isinstance(target, Tensor):
        return _one_by_one(loss, output, target, count, output_dim, target_dim)
    target_dim %= target.ndim
    if rule.broadcasts and count > 1:
        _refuse_mixing(loss, output, target, output_dim, target_dim)
    dim = rule.dim_of_terms(output, target, output_dim, target_dim)
    if dim is None or getattr(loss, "reduction", "mean") == "batchmean":
        # batchmean divides by the size of dim 0, which is no count of terms
        return _one_by_one(loss, output, target, count, output_dim, target_dim)

    terms, mass = _terms(loss, rule, output, target)
    sums = _sum_by_sample(terms, count, dim)
    if not mean:
        return sums
    return sums / (terms.numel() // count if mass is None else _sum_by_sample(mass, count, dim))


@dataclass(frozen=True)
class _Rule:
    """How the terms of a torch loss lie in its output.

    Attributes:
        summed: the dim of the output that one term uses up (the classes); None: every entry is a term. The target has
            the shape of the output or, where torch takes class indices, that of the terms.
        broadcasts: whether torch broadcasts output and target of different shapes.
        mass: ``mass(loss, target)``, shape of the terms: what each counts for in a mean. None, or a None returned: 1.
    """

    summed: int | None
    broadcasts: bool = False
    mass: Callable[[Any, Tensor], Tensor | None] | None = None

    def shape_of_terms(self, output: Tensor) -> list[int]:
        """Shape of the terms: that of the output without the dim summed."""
        shape = list(output.shape)
        if self.summed is not None:
            del shape[self.summed]
        return shape

    def dim_of_terms(self, output: Tensor, target: Tensor, output_dim: int, target_dim: int) -> int | None:
        """Return the dim of the terms that holds the samples; None where the rule does not speak for these shapes."""
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


def _class_mass(loss: Any, target: Tensor) -> Tensor | None:
    """Mass of the terms of class indices: the weight of the class, 0 where ignored. Probabilities count 1."""
    if target.is_floating_point():
        return None
    weight: Tensor | None = loss.weight
    if weight is None:
        return target.ne(loss.ignore_index)
    ignored = target == loss.ignore_index
    return weight[target.masked_fill(ignored, 0).long()].masked_fill(ignored, 0)


# By exact type: a subclass may compute something else.
_ENTRIES = _Rule(None, broadcasts=True)
_RULES: dict[type, _Rule] = {
    nn.CrossEntropyLoss: _Rule(1, mass=_class_mass),
    nn.NLLLoss: _Rule(1, mass=_class_mass),
    nn.MultiMarginLoss: _Rule(1),
    nn.MultiLabelMarginLoss: _Rule(1),
    nn.MultiLabelSoftMarginLoss: _Rule(-1, broadcasts=True),
    nn.BCELoss: _Rule(None),
    nn.BCEWithLogitsLoss: _Rule(None),
    nn.MSELoss: _ENTRIES,
    nn.L1Loss: _ENTRIES,
    nn.SmoothL1Loss: _ENTRIES,
    nn.HuberLoss: _ENTRIES,
    nn.PoissonNLLLoss: _ENTRIES,
    nn.KLDivLoss: _ENTRIES,
    nn.SoftMarginLoss: _ENTRIES,
}


def _terms(loss: Any, rule: _Rule, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the terms of a torch loss, and their masses (None: all 1): a mean is the quotient of the two sums."""
    unreduced = copy.copy(loss)
    unreduced.reduction = "none"
    terms = unreduced.forward(output, target)
    expected = rule.shape_of_terms(output)
    if list(terms.shape) != expected:
        raise ValueError(
            f"{_name(loss)} has terms of shape {tuple(terms.shape)} where its output of shape {tuple(output.shape)} "
            f"has {tuple(expected)}: its weight must broadcast to the shape of the output"
        )
    return terms, rule.mass(loss, target) if rule.mass else None


def _refuse_mixing(loss: Loss, output: Tensor, target: Tensor, output_dim: int, target_dim: int) -> None:
    if output.ndim - output_dim != target.ndim - target_dim:
        raise ValueError(
            f"{_name(loss)} compares output {tuple(output.shape)} and target {tuple(target.shape)} entry by entry, "
            f"which mixes the samples in their dims {output_dim} and {target_dim}: give both the same shape"
        )


def _one_by_one(loss: Loss, output: Tensor, target: Any, count: int, output_dim: int, target_dim: int) -> Tensor:
    """Run any callable on every sample alone: at once by ``vmap`` or, where that cannot, one after the other."""
    leaves: list[Tensor] = []
    _map_tensors(leaves.append, target)
    tensors = [output, *leaves]
    dims = [output_dim, *(target_dim % leaf.ndim for leaf in leaves)]

    def alone(piece: Tensor, *pieces: Tensor) -> Tensor:
        rest = iter(pieces)
        value = loss(piece, _map_tensors(lambda _: next(rest), target))
        if not isinstance(value, Tensor) or value.ndim:
            found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{_name(loss)} must return a scalar tensor for a batch of one sample, got {found}")
        return value

    cut = [t.unflatten(dim, (count, t.shape[dim] // count)) for t, dim in zip(tensors, dims, strict=True)]
    # copies, because a loss may work in place
    try:
        batched = [t.clone() for t in cut]
        values = torch.func.vmap(alone, in_dims=tuple(dims), randomness="different")(*batched)
        assert isinstance(values, Tensor)
        return values
    except Exception:  # whatever a callable does that vmap cannot follow; an error of its own comes back below
        _note_loop(_name(loss))
    samples = zip(*(t.unbind(dim) for t, dim in zip(cut, dims, strict=True)), strict=True)
    return torch.stack([alone(*(t.clone() for t in sample)) for sample in samples])


@functools.cache
def _note_loop(name: str) -> None:
    """Log, once for each kind of loss, that it runs in a loop; called while the reason is being handled."""
    _log.info("%s: one sample after the other, because vmap cannot: %s", name, sys.exc_info()[1])


def _map_tensors(function: Callable[[Tensor], Any], target: Any) -> Any:
    """Apply ``function`` to the tensors of a target, in order, and keep the containers."""
    if target is None:
        return None
    if isinstance(target, Tensor):
        return function(target)
    if isinstance(target, dict):
        return {key: _map_tensors(function, value) for key, value in target.items()}
    if isinstance(target, tuple):
        parts = [_map_tensors(function, value) for value in target]
        return type(target)(*parts) if hasattr(target, "_fields") else tuple(parts)
    raise ValueError(f"a target must be a tensor, None, a tuple or a dict of these, got {type(target).__name__}")


def _sample_dim(what: str, tensor: Tensor, count: int, dim: int) -> int:
    """Return ``dim`` counted from the front, once it is known to hold N samples of at least one row each."""
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


def _name(loss: Loss) -> str:
    return getattr(loss, "__qualname__", type(loss).__qualname__)
