"""The curvature of the summed loss in each structure, and the posterior that it makes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from curvature.gradients import Batch, Jacobian, either_form
from curvature.linalg import widen, widest
from curvature.losses import TORCH_LOSSES, ClassLabel, LabelDistribution, Loss, name_of, reduction_of, resolve
from curvature.matrices import DataSource, RecordedBatch, fisher, fisher_diagonal, kfac
from curvature.operators import BlockDiagonal, Diagonal, SampleSpace, Space, flat_parameters
from curvature.recording import trained_parameters, unwrap_compiled
from curvature.uses.posteriors.posterior import Confidence, DataFit, LaplacePosterior, require_no_draws
from curvature.uses.posteriors.precision import LayeredCurvature, module_of, noise_of

Build = Callable[[nn.Module, Loss, Any, Space], BlockDiagonal]  # of the parameters of a space


def _dense(model: nn.Module, loss: Loss, data: Any, space: Space) -> BlockDiagonal:
    """By the rows of few samples in the widest precision."""
    # squares of rows lose half of their digits, below which priors are once a model is trained
    matrix = fisher(model, loss, data, parameters=space.names).compact()
    if isinstance(matrix, SampleSpace) and isinstance(matrix.rows, Jacobian):
        wide = replace(space, dtype=widest(space.device.type))
        matrix = SampleSpace(wide, matrix.rows.promoted(wide.dtype), matrix.scale)
    return BlockDiagonal(matrix.space, [matrix])


def _diagonal(model: nn.Module, loss: Loss, data: Any, space: Space) -> BlockDiagonal:
    diagonal = fisher_diagonal(model, loss, data, parameters=space.names)
    return BlockDiagonal(space, [Diagonal(space.subspace([name]), d.flatten()) for name, d in diagonal.items()])


_kfac: Build = lambda model, loss, data, space: kfac(model, loss, data, parameters=space.names)
MOST_SAMPLES, PARTS = 128, 8  # of the first batch, by which a prior for classes is chosen: in so many parts
MOST_OUTPUTS = 4096  # of each
BUILDS: dict[str, Build] = {"kfac": _kfac, "diagonal": _diagonal, "dense": _dense, "last_layer": _dense}


@either_form
def laplace(
    model: nn.Module,
    loss: Loss,
    data: Any,
    structure: str = "kfac",
    *,
    prior: float | Tensor | Mapping[str, float] | None = None,
    noise: float | None = None,
) -> LaplacePosterior:
    """The Laplace posterior ``N(theta, Sigma)`` of a trained model's parameters (MacKay 1992; arXiv:2106.14806).

    ``Sigma^-1 = factor * G + prior``: G is the Gauss-Newton matrix (the Fisher matrix of these likelihoods) of the loss
    summed over the data, whatever its reduction is, so that its size grows with the data; prior is the precision of a
    normal prior around zero, a damping in units of that sum. The factor is 1, and ``1 / (2 noise^2)`` for
    ``nn.MSELoss``, which stands for labels ``y = f + noise * e``, e standard normal. Training with the mean over M
    terms (samples for ``CrossEntropyLoss``, entries for the others) and ``weight_decay`` (which `torch.optim.SGD` adds
    to the gradient) corresponds to the prior ``factor * M * weight_decay``.

    Args:
        model: any module whose samples are independent, without dropout in training mode; parameters that do not
            require a gradient are left out of the posterior, and stay fixed.
        loss: ``CrossEntropyLoss``, ``BCEWithLogitsLoss``, ``MSELoss``, ``PoissonNLLLoss`` of log-rates,
            ``GaussianNLLLoss`` (mean and variance heads), or the functions of the same names. Class weights, ignored
            labels and the like count as in the loss.
        data: one pair ``(x, y)``, or an iterable of pairs that can be gone over twice (a DataLoader).
        structure: of G: "kfac" (Kronecker factors by layer), "diagonal", "dense" (exact: P^2 numbers, or the rows and
            M^2 numbers for samples times outputs M < P), or "last_layer" (dense over the parameters of the last module
            that the forward pass reads parameters of; all others stay fixed).
        prior: precision, in 1 / parameter^2: a number, or one for each layer (a tensor, or by ``posterior.layers``). By
            default 1; for classes the least by which the log loss of up to 128 samples of the first batch rises by no
            more than 4e-5 of that of guesses. A warning is logged where a given prior halves the mean confidence.
        noise: standard deviation of the labels around the output, in their units; only for ``MSELoss``, by default 1.

    Raises:
        ValueError: the loss has no likelihood here, the structure is unknown, prior or noise are not positive, there
            are no data or an empty batch, samples are not independent, the forward pass draws random numbers, or no
            prior is given for thousands of outputs.
        TypeError: an argument of the wrong kind.
    """
    summed, labels = labels_of(loss)
    if structure not in list(BUILDS):
        raise ValueError(f"structure: expected one of {', '.join(BUILDS)}, found {structure!r}")
    if noise is not None and not labels.has_noise:
        raise ValueError(f"noise: {type(summed).__name__} has its own; only MSELoss takes one")
    model = unwrap_compiled(model)
    space = Space.of(trained_parameters(model))
    sigma = noise_of(1.0 if noise is None else noise, space.device)
    fit, last = survey(model, summed, labels, data)
    names = space.names
    if structure == "last_layer":
        modules = {module_of(name) for name in last}
        names = tuple(name for name in names if module_of(name) in modules)
        if not names:
            raise ValueError("structure: no function is seen to read parameters (vmap?), so which layer is the last?")
    curvature = LayeredCurvature(BUILDS[structure](model, summed, data, space.subspace(names)))
    home, mean = curvature.space.device, flat_parameters(curvature.space, model).detach()
    fit = replace(fit, total=fit.total.to(home), count=fit.count.to(home))
    given = curvature.prior(1.0 if prior is None else prior)
    posterior = LaplacePosterior(model, fit, curvature, mean, given, sigma.to(home))
    return judged(posterior, is_given=prior is not None)


def judged(posterior: LaplacePosterior, is_given: bool) -> LaplacePosterior:
    """With a default prior, or a warning about one that was given."""
    if is_given:
        posterior.warn_if_unsure()
        return posterior
    sure = posterior.fit.sure
    if sure is not None:
        return posterior.with_cautious_prior(sure)
    if isinstance(posterior.fit.labels, ClassLabel):
        raise ValueError(f"prior: samples have {MOST_OUTPUTS} outputs or more, too many to choose one; pass prior=...")
    return posterior


def labels_of(loss: Loss) -> tuple[Any, LabelDistribution]:
    """The loss as a sum without constants, and the distribution of labels behind it."""
    if not callable(loss):
        raise TypeError(f"loss: expected a loss module, found {type(loss).__name__}")
    resolved: Any = resolve(loss)
    reduction_of(resolved)
    row = TORCH_LOSSES.get(type(resolved))
    labels = None if row is None else row.labels
    if labels is None or (isinstance(resolved, nn.PoissonNLLLoss) and not resolved.log_input):
        names = ", ".join(kind.__name__ for kind, row in TORCH_LOSSES.items() if row.labels is not None)
        raise ValueError(
            f"loss: a posterior needs a likelihood of the labels, and {name_of(resolved)} has none here; these have "
            f"one: {names} (PoissonNLLLoss with log_input=True), and the functions of the same names"
        )
    summed = copy.copy(resolved)
    summed.reduction = "sum"
    if hasattr(summed, "full"):
        summed.full = False
    return summed, labels.of(summed)


def survey(model: nn.Module, summed: Loss, labels: LabelDistribution, data: Any) -> tuple[DataFit, frozenset[str]]:
    """How likely the data are, and the parameters of the last function that reads any."""
    sums: list[Tensor] = []
    counts: list[Tensor] = []
    names: frozenset[str] = frozenset()
    sure: Confidence | None = None

    def visit(run: RecordedBatch) -> None:
        nonlocal names, sure
        require_no_draws(run)
        output = run.output.detach()
        if not sums and isinstance(labels, ClassLabel):
            sure = confidence_of(labels, run.batch, output)
        sums.append(widen(run.batch.loss_of(output)))
        counts.append(widen(labels.count(output, run.batch.y)))
        names = next((use.names for use in reversed(run.tape.uses) if use.names), names)

    DataSource(model, summed, data).each(visit)
    return DataFit(summed, labels, torch.stack(sums).sum(), torch.stack(counts).sum(), sure), names


def confidence_of(labels: ClassLabel, batch: Batch, output: Tensor) -> Confidence | None:
    """Of some samples, evenly spaced; None where each has so many outputs that their covariance is out of reach."""
    outputs = output.numel() // batch.count
    count = min(batch.count, MOST_SAMPLES, MOST_OUTPUTS**2 // outputs**2)
    if not count:
        return None
    size = count if count == batch.count else max(1, count // PARTS)
    starts = range(0, batch.count - size + 1, max(1, (batch.count - size) // (PARTS - 1)))[:PARTS]
    parts = [batch.part(slice(start, start + size)) for start in starts]
    f = torch.cat([output[start : start + size] for start in starts])
    mean = float(labels.confidence(f, torch.zeros_like(f)))
    return Confidence(labels, [(part.x, part.y) for part in parts], mean, 1 / labels.classes(output))
