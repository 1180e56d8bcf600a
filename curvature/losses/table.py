"""Per-sample losses: the loss of every sample alone, and the mass of each sample in the loss of a batch.

What is known of torch's losses is a row of `TORCH_LOSSES` for each; `resolve` makes what a user passes a callable. A
torch loss sums or averages *terms* (``reduction="none"`` returns them), each of which belongs to one sample. A mean
divides by the *mass* of its terms: their number or, with class indices, the total weight of the classes that are not
ignored. Every other callable is run on each sample alone.
"""

from __future__ import annotations

import copy
import math
import types
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvature.attempts import attempt
from curvature.losses import likelihoods
from curvature.losses.labels import naming_labels
from curvature.losses.likelihoods import LabelDistribution, Likelihood

Loss = Callable[[Any, Any], Tensor]
SETTINGS = str, float, int, bool, type(None)


def name_of(loss: Loss) -> str:
    return getattr(loss, "__qualname__", type(loss).__qualname__)


def reduction_of(loss: Loss) -> Literal["mean", "sum"]:
    """Whether the loss of a batch is the mean or the sum of those of its samples; ValueError where it is neither."""
    reduction = getattr(loss, "reduction", "mean")
    if reduction == "sum":
        return "sum"
    # "batchmean" is a mean of losses that are sums; an attribute of a class of the user's may mean anything
    is_batchmean = reduction == "batchmean" and isinstance(loss, nn.KLDivLoss)
    if reduction == "mean" or is_batchmean or type(loss) not in TORCH_LOSSES and reduction != "none":
        return "mean"
    raise ValueError(f"{name_of(loss)} has reduction={reduction!r}, which is no scalar loss: use 'mean' or 'sum'")


def resolve(loss: Loss) -> Loss:
    """The loss as a callable of (output, target) in the form that this package knows; TypeError if it is none."""
    if isinstance(loss, type) or not callable(loss):
        what = f"the class {loss.__name__}: pass {loss.__name__}()" if isinstance(loss, type) else type(loss).__name__
        raise TypeError(f"loss: expected a loss module or a callable(output, target), found {what}")
    if isinstance(loss, types.FunctionType) and loss in MODULES:
        return MODULES[loss]
    if type(loss) in TORCH_LOSSES and not _is_as_torch_made_it(loss):
        as_called: Any = partial(nn.Module.__call__, loss)
        as_called.reduction, as_called.__qualname__ = reduction_of(loss), name_of(loss)
        return as_called
    return GaussianNLLLoss(loss) if type(loss) is nn.GaussianNLLLoss else loss


def _is_as_torch_made_it(loss: Any) -> bool:
    """Whether a loss of torch has no hooks, and no function in place of its own among its attributes."""
    return not (loss._forward_hooks or loss._forward_pre_hooks or any(map(callable, vars(loss).values())))


def settings_of(loss: Any) -> tuple[tuple[str, Any], ...]:
    """The numbers, names and flags among its attributes."""
    return tuple(item for item in getattr(loss, "__dict__", {}).items() if isinstance(item[1], SETTINGS))


class GaussianNLLLoss(nn.Module):
    """Torch's loss of this name for an output that holds both heads: along dim 1 the means, then as many variances."""

    def __init__(self, loss: nn.GaussianNLLLoss) -> None:
        super().__init__()
        self.reduction, self.full, self.eps = loss.reduction, loss.full, loss.eps

    def forward(self, output: Any, target: Tensor) -> Tensor:
        """The loss at (N, 2d, ...), or a tuple (mean, variance); ValueError for other shapes, negative variances."""
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
            form = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(
                "GaussianNLLLoss takes an output (N, 2d, ...), whose dim 1 holds the means and then the variances, or "
                f"a tuple (mean, variance), each (N, d, ...); found {form}"
            )
        mean, variance = output.chunk(2, 1)
        with suppress(RuntimeError):  # vmap does not allow branching on values
            if (variance < 0).any():
                raise ValueError(
                    "GaussianNLLLoss: the variances have negative entries; softplus or exp makes them positive"
                )
        passing = self.eps + (variance - variance.detach())  # the gradient passes, as in torch
        return mean, torch.where(variance < self.eps, passing, variance)


def join_heads(loss: Loss, output: Any) -> Any:
    """Concatenate a tuple (mean, variance) for `GaussianNLLLoss` along dim 1; return any other output unchanged."""
    if not isinstance(loss, GaussianNLLLoss) or not isinstance(output, tuple | list) or len(output) != 2:
        return output
    mean, variance = output
    if mean.ndim < 2:
        raise ValueError(f"GaussianNLLLoss: the mean must have shape (N, d, ...), found {tuple(mean.shape)}")
    if variance.shape == mean.shape[:-1]:
        variance = variance.unsqueeze(-1)
    return torch.cat([mean, variance.expand_as(mean)], 1)


@dataclass(frozen=True)
class TorchLoss:
    """A row of the table. The target has the shape of the output or, if torch takes class indices, of the terms."""

    function: Callable[..., Tensor] | None  # the same as the module with default arguments
    classes: int | None = None  # the dim of the output that a term sums over; None: every entry is a term
    heads: bool = False  # whether a term uses an entry of each half of dim 1, a mean and its variance
    broadcasts: bool = False  # whether torch broadcasts output and target of different shapes
    # (loss, target) -> the mass of each term in a mean, in the shape of the terms; None: all are 1
    masses: Callable[[Any, Tensor], Tensor | None] | None = None
    likelihood: Callable[[Any, Tensor], Likelihood] | None = None  # (loss, output) -> that of terms of mass 1
    is_diagonal: bool = False  # whether the Hessian is known to be diagonal, though not by a likelihood
    # output -> (f, value): a term of mass 1 has this value if all of the output is f; None: all masses are 1
    probe: Callable[[Tensor], tuple[float, float]] | None = None
    weight: str = ""  # the attribute of the loss that makes the masses depend on the target
    stand_in: Callable[[Tensor], Tensor] | None = None  # output -> a substitute for a missing target
    labels: LabelDistribution | None = None  # of a label given the output, as posteriors predict it

    def shape_of_terms(self, output: Tensor) -> list[int]:
        """Shape of the output without the dim of classes, or of one head."""
        shape = list(output.shape)
        if self.classes is not None:
            del shape[self.classes]
        elif self.heads:
            shape[1:2] = [size // 2 for size in shape[1:2]]
        return shape

    def terms(self, loss: Any, output: Tensor, target: Tensor) -> Tensor:
        """The terms, which a mean divides by the sum of their masses."""
        alike = copy.copy(loss)
        alike.reduction = "none"
        with naming_labels(loss, output):
            terms: Tensor = alike.forward(output, target)
        expected = self.shape_of_terms(output)
        if list(terms.shape) != expected:
            raise ValueError(
                f"{name_of(loss)} has terms of shape {tuple(terms.shape)} where its output of shape "
                f"{tuple(output.shape)} has {tuple(expected)}: its weight must broadcast to the shape of the output"
            )
        return terms


def _class_masses(loss: Any, target: Tensor) -> Tensor | None:
    """With class indices the weight of the class, 0 if ignored. Terms with probabilities count 1."""
    if target.is_floating_point():
        return None
    weight: Tensor | None = loss.weight
    if weight is None:
        return target.ne(loss.ignore_index)
    ignored = target == loss.ignore_index
    return weight[target.masked_fill(ignored, 0).long()].masked_fill(ignored, 0)


def _poisson(loss: Any, output: Tensor) -> Likelihood:
    return likelihoods.Poisson(output) if loss.log_input else likelihoods.PoissonRate(output, loss.eps)


_entries = partial(TorchLoss, broadcasts=True)
TORCH_LOSSES: dict[type, TorchLoss] = {  # by exact type, since a subclass may compute something else
    nn.CrossEntropyLoss: TorchLoss(
        F.cross_entropy,
        classes=1,
        masses=_class_masses,
        likelihood=lambda _, output: likelihoods.Categorical(output),
        probe=lambda output: (0.0, math.log(output.shape[1])),
        weight="weight",
        labels=likelihoods.CategoricalLabel(),
    ),
    nn.NLLLoss: TorchLoss(
        F.nll_loss,
        classes=1,
        masses=_class_masses,
        likelihood=lambda _, output: likelihoods.LogProbabilities(output),
        probe=lambda _: (-1.0, 1.0),
        weight="weight",
    ),
    nn.BCEWithLogitsLoss: TorchLoss(
        F.binary_cross_entropy_with_logits,
        likelihood=lambda _, output: likelihoods.Bernoulli(output),
        probe=lambda _: (0.0, math.log(2)),
        weight="pos_weight",
        stand_in=torch.zeros_like,
        labels=likelihoods.BernoulliLabel(),
    ),
    nn.BCELoss: TorchLoss(
        F.binary_cross_entropy,
        likelihood=lambda _, output: likelihoods.BernoulliProbability(output),
        probe=lambda _: (0.5, math.log(2)),
        stand_in=torch.zeros_like,
    ),
    nn.MSELoss: _entries(
        F.mse_loss, likelihood=lambda _, output: likelihoods.Normal(output), labels=likelihoods.NormalLabel()
    ),
    nn.PoissonNLLLoss: _entries(F.poisson_nll_loss, likelihood=_poisson, labels=likelihoods.PoissonLabel()),
    GaussianNLLLoss: TorchLoss(
        None,
        heads=True,
        likelihood=lambda loss, output: likelihoods.NormalHeads(*loss.heads(output)),
        labels=likelihoods.NormalHeadsLabel(),
    ),
    nn.L1Loss: _entries(F.l1_loss, is_diagonal=True),
    nn.SmoothL1Loss: _entries(F.smooth_l1_loss, is_diagonal=True),
    nn.HuberLoss: _entries(F.huber_loss, is_diagonal=True),
    nn.KLDivLoss: _entries(F.kl_div, is_diagonal=True),
    nn.SoftMarginLoss: _entries(F.soft_margin_loss, is_diagonal=True),
    nn.MultiMarginLoss: TorchLoss(F.multi_margin_loss, classes=1),
    nn.MultiLabelMarginLoss: TorchLoss(F.multilabel_margin_loss, classes=1),
    nn.MultiLabelSoftMarginLoss: TorchLoss(F.multilabel_soft_margin_loss, classes=-1, broadcasts=True),
}
# The modules that equal these functions with default arguments.
MODULES: dict[Any, nn.Module] = {row.function: kind() for kind, row in TORCH_LOSSES.items() if row.function}
# Torch's functions of outputs of a model, with samples along the first axis.
LOSS_FUNCTIONS = {
    *MODULES, F.gaussian_nll_loss, F.hinge_embedding_loss, F.cosine_embedding_loss, F.margin_ranking_loss,
    F.triplet_margin_loss, F.triplet_margin_with_distance_loss,
}  # fmt: skip


def per_sample_losses(
    loss: Loss, output: Tensor, target: Any, count: int, output_dim: int = 0, target_dim: int = 0
) -> Tensor:
    """The loss of every sample alone (N,): l_n is ``loss`` called on a batch of that one sample.

    Differentiable in ``output``. If no term of a sample counts, nan with gradient zero, as torch's mean. The output has
    N = ``count`` samples along ``output_dim``, or m consecutive rows for each; so has every tensor of the target (which
    may be None, or a tuple, list or dict) along ``target_dim``, with its own m. Of a callable only the arguments are
    split into samples; ``weight`` and ``pos_weight`` of a torch loss are split with the output.
    """
    loss, mean, output_dim = _resolve(loss, output, target, count, output_dim, target_dim)
    row = TORCH_LOSSES.get(type(loss))
    if row is not None and isinstance(target, Tensor) and row.broadcasts and count > 1:
        own_target_dim = target_dim % target.ndim
        if output.ndim - output_dim != target.ndim - own_target_dim:
            raise ValueError(
                f"{name_of(loss)} compares output {tuple(output.shape)} and target {tuple(target.shape)} entry by "
                f"entry, which mixes the samples in their dims {output_dim} and {own_target_dim}: give both the same "
                "shape"
            )
    dim = dim_of_terms(loss, output, target, output_dim, target_dim)
    if row is None or dim is None:
        values = _sample_by_sample(loss, output, target, count, output_dim, target_dim)
        is_empty = _without_terms(loss, values, output, target)
        if is_empty is None:
            return values
        each = is_empty.repeat_interleave(output.shape[output_dim] // count)
        each = each.reshape(-1, *[1] * (output.ndim - output_dim - 1))
        counted = torch.where(each, output.detach(), output)  # which lets no gradient through, even nan
        return _sample_by_sample(loss, counted, target, count, output_dim, target_dim)

    terms = row.terms(loss, output, target)
    sums = _sum_by_sample(terms, count, dim)
    if not mean:
        return sums
    masses = row.masses(loss, target) if row.masses else None
    if masses is None:
        return sums / (terms.numel() // count)
    total = _sum_by_sample(masses, count, dim)
    is_empty = (total == 0) & (sums == 0)
    return torch.where(is_empty, math.nan, sums / torch.where(is_empty, 1, total))


def _without_terms(loss: Loss, values: Tensor, output: Tensor, target: Any) -> Tensor | None:
    """(N,): whose own loss is 0/0, since no term counts: nan, where the batch's is finite; None if there are none."""
    is_nan = values.detach().isnan()
    if not is_nan.any():
        return None
    with torch.no_grad():
        whole = loss(output.detach().clone(), map_target(torch.clone, target))
    return is_nan if require_scalar(loss, whole, "a batch").isfinite() else None


def sample_masses(
    loss: Loss, output: Tensor, target: Any, count: int, output_dim: int = 0, target_dim: int = 0
) -> Tensor:
    """The masses m_n of the samples in the loss of a batch, which is ``sum_n m_n l_n / sum_n m_n`` for a mean.

    m_n is the number of terms of sample n or, with class indices, the total weight of its classes that are not ignored;
    without a target, all count. It is 1 if the loss is a sum (that of the batch is then ``sum_n m_n l_n``), or averages
    over samples ("batchmean"). Those of a callable have to be found (`masses`). Shape (N,), at least float32.
    """
    loss, mean, output_dim = _resolve(loss, output, target, count, output_dim, target_dim)
    ones = torch.ones(count, dtype=torch.promote_types(output.dtype, torch.float32), device=output.device)
    row = TORCH_LOSSES.get(type(loss))
    if row is None or not mean or getattr(loss, "reduction", "mean") == "batchmean":
        return ones
    masses = row.masses(loss, target) if row.masses and isinstance(target, Tensor) else None
    if masses is not None:
        return _sum_by_sample(masses.to(ones), count, target_dim % target.ndim)
    if row.classes is not None and output_dim == row.classes % output.ndim:
        return ones
    return ones * (math.prod(row.shape_of_terms(output)) // count)


def term_masses(loss: Any, output: Tensor, target: Tensor, count: int) -> Tensor:
    """The masses of the terms in the samples' own losses, in the shape of the terms, samples first.

    Read from the loss at an output where each term is its mass times a known value, `TorchLoss.probe`.
    """
    row = TORCH_LOSSES[type(loss)]
    assert row.probe is not None
    at, value = row.probe(output)
    dtype = output.dtype if loss.weight is None else loss.weight.dtype
    flat = output.new_full((), at, dtype=dtype).expand(output.shape)
    if target.is_floating_point():
        target = target.to(dtype)
    terms = row.terms(loss, flat, target)
    sums = terms.reshape(count, -1).sum(1)
    # a mean divides by the total weight of terms that are not ignored; if that is zero, torch has 0/0, no curvature
    share = torch.where(sums == 0, 0, 1 / sample_masses(loss, flat, target, count).to(sums.dtype))
    masses = (terms.reshape(count, -1) * share[:, None]).reshape(terms.shape)
    return (masses / value if value else masses).to(output.dtype)


def dim_of_terms(loss: Loss, output: Tensor, target: Any, output_dim: int = 0, target_dim: int = 0) -> int | None:
    """The samples' dim of the terms, where torch makes the batch's loss of the same as each sample's; else try it."""
    row = TORCH_LOSSES.get(type(loss))
    # batchmean divides by the size of dim 0, not by a number of terms
    if row is None or not isinstance(target, Tensor) or getattr(loss, "reduction", "mean") == "batchmean":
        return None
    dim = output_dim = output_dim % output.ndim
    target_dim %= target.ndim
    if row.heads and dim == 1:
        return None
    if row.classes is not None:
        classes = row.classes % output.ndim
        if dim == classes:
            return None
        dim -= dim > classes
    if target.shape == output.shape and target_dim == output_dim and not row.heads:
        return dim
    return dim if list(target.shape) == row.shape_of_terms(output) and target_dim == dim else None


def is_entrywise(loss: Loss) -> bool:
    """Whether a torch loss treats all entries of output and target alike, so that their axes may be permuted."""
    row = TORCH_LOSSES.get(type(resolve(loss)))
    plain = getattr(loss, "weight", None) is getattr(loss, "pos_weight", None) is None
    return row is not None and row.classes is None and not row.heads and plain


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

    cut = [t.unflatten(dim, (count, -1)) for t, dim in zip(tensors, dims, strict=True)]
    # clones, because a loss may work in place
    batched, run = [t.clone() for t in cut], torch.func.vmap(alone, in_dims=tuple(dims), randomness="error")
    # what vmap does not support; an error of the loss itself recurs below
    values = attempt(lambda: run(*batched), f"{name_of(loss)}: one sample after the other, because vmap cannot")
    if values is not None:
        return values
    samples = zip(*(t.unbind(dim) for t, dim in zip(cut, dims, strict=True)), strict=True)
    try:
        return torch.stack([alone(*(t.clone() for t in sample)) for sample in samples])
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        takes_batch = lambda: require_scalar(loss, loss(output.detach().clone(), target), "the batch")
        if attempt(takes_batch, f"{name_of(loss)}: it takes neither the batch nor a sample") is None:
            raise error from None
        raise ValueError(
            f"{name_of(loss)}: it takes the batch, but not one of its samples as a batch of one: {error}. If it "
            "squeezes all axes of size one, squeeze(-1) leaves that of the samples alone"
        ) from error


def require_scalar(loss: Loss, value: Any, what: str) -> Tensor:
    if not isinstance(value, Tensor) or value.ndim:
        form = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise ValueError(f"{name_of(loss)} must return a scalar tensor for {what}, got {form}")
    return value


def map_target(function: Callable[[Tensor], Any], target: Any) -> Any:
    """Apply ``function`` to the tensors of a target, in order, and rebuild its containers."""
    if target is None:
        return None
    if isinstance(target, Tensor):
        return function(target)
    if isinstance(target, dict):
        return {key: map_target(function, value) for key, value in target.items()}
    if isinstance(target, tuple | list):
        parts = [map_target(function, value) for value in target]
        if isinstance(target, list):
            return parts
        return type(target)(*parts) if hasattr(target, "_fields") else tuple(parts)
    raise ValueError(
        f"y: a target must be a tensor, None, a tuple, list or dict of these, got {type(target).__name__}; pass "
        "torch.as_tensor(y) of numbers"
    )


def _resolve(
    loss: Loss, output: Tensor, target: Any, count: int, output_dim: int, target_dim: int
) -> tuple[Loss, bool, int]:
    """The resolved loss, whether it is a mean, and the samples' dim of the output counted from the front."""
    loss = resolve(loss)
    mean = reduction_of(loss) == "mean"
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    tensors = [("output", output, output_dim)]
    map_target(lambda t: tensors.append(("target", t, target_dim)), target)
    for what, tensor, dim in tensors:
        if not -tensor.ndim <= dim < tensor.ndim:
            raise ValueError(f"{what} of shape {tuple(tensor.shape)} has no dim {dim} to hold the {count} samples")
        size = tensor.shape[dim]
        if size == 0 or size % count:
            raise ValueError(f"{what} has size {size} along dim {dim}, which is not a multiple of the {count} samples")
    return loss, mean, output_dim % output.ndim


def _sum_by_sample(tensor: Tensor, count: int, dim: int) -> Tensor:
    """Sum (.., N*m, ..) to (N,)."""
    if tensor.shape == (count,):
        return tensor
    return tensor.movedim(dim, 0).reshape(count, -1).sum(1)
