"""What is known of torch's losses: a row of `TORCH_LOSSES` for each. `resolve` makes what a user passes a callable.

A torch loss sums or averages *terms* (``reduction="none"`` returns them), each of which belongs to one sample. A mean
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

from curvature.losses import label_distributions, likelihoods
from curvature.losses.label_distributions import LabelDistribution
from curvature.losses.likelihoods import Likelihood
from curvature.losses.own_state import from_its_state

Loss = Callable[[Any, Any], Tensor]


def name_of(loss: Loss) -> str:
    return getattr(loss, "__qualname__", type(loss).__qualname__)


def reduction_of(loss: Loss) -> Literal["mean", "sum"]:
    """Whether the loss of a batch is the mean or the sum of those of its samples; ValueError where it is neither."""
    reduction = getattr(loss, "reduction", "mean")
    if reduction == "sum":
        return "sum"
    # "batchmean" is a mean of losses that are sums; an attribute of a class of the user's may mean anything
    is_batchmean = reduction == "batchmean" and isinstance(loss, nn.KLDivLoss)
    if reduction == "mean" or is_batchmean or not is_torch_loss(loss) and reduction != "none":
        return "mean"
    raise ValueError(f"{name_of(loss)} has reduction={reduction!r}, which is no scalar loss: use 'mean' or 'sum'")


def resolve(loss: Loss) -> Loss:
    """The loss as a callable of (output, target) in the form that this package knows."""
    if isinstance(loss, types.FunctionType) and loss in MODULES:
        return MODULES[loss]
    if type(loss) is nn.GaussianNLLLoss:
        return GaussianNLLLoss(loss)
    return loss if is_torch_loss(loss) else from_its_state(loss)


def is_torch_loss(loss: Loss) -> bool:
    return type(loss) in TORCH_LOSSES


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
            found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise ValueError(
                "GaussianNLLLoss takes an output (N, 2d, ...), whose dim 1 holds the means and then the variances, or "
                f"a tuple (mean, variance), each (N, d, ...); found {found}"
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
        labels=label_distributions.Categorical(),
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
        labels=label_distributions.Bernoulli(),
    ),
    nn.BCELoss: TorchLoss(
        F.binary_cross_entropy,
        likelihood=lambda _, output: likelihoods.BernoulliProbability(output),
        probe=lambda _: (0.5, math.log(2)),
        stand_in=torch.zeros_like,
    ),
    nn.MSELoss: _entries(
        F.mse_loss, likelihood=lambda _, output: likelihoods.Normal(output), labels=label_distributions.Normal()
    ),
    nn.PoissonNLLLoss: _entries(F.poisson_nll_loss, likelihood=_poisson, labels=label_distributions.Poisson()),
    GaussianNLLLoss: TorchLoss(
        None,
        heads=True,
        likelihood=lambda loss, output: likelihoods.NormalHeads(*loss.heads(output)),
        labels=label_distributions.NormalHeads(),
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
