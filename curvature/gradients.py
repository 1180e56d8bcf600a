"""Per-sample gradients, their norms and inner products, from activations and backprops."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from curvature import contractions
from curvature.batch import Batch, Loss, preserved
from curvature.capture import Tape, capture
from curvature.contractions import Dense, Term
from curvature.general import general_gradients
from curvature.structure import PLANS, Plan, explained, find_layout, key_of, noise, rounding, signature_of

log = logging.getLogger("curvature")


def per_sample_gradients(
    model: nn.Module, loss: Loss, x: Any, y: Any, *, sample_dim: int | tuple[int, int, int] = 0
) -> dict[str, Tensor]:
    """Gradient of each sample's own loss with respect to every parameter.

    Row n equals the gradient of ``loss`` on a batch that holds sample n alone, whatever the reduction. With a mean over
    one term per sample the rows average to ``.grad``.

    Args:
        model: any module; its parameters that do not require a gradient are left out.
        loss: a torch loss module or a callable ``loss(output, target) -> scalar``.
        x: a tensor, a tuple of positional or a dict of keyword arguments.
        y: the target, as the loss takes it: N, or N * m rows.
        sample_dim: the axis of the samples; or one each for input, output and target.

    Returns:
        ``{name: (N, *parameter.shape)}`` in the order of ``named_parameters()``, in units of loss / parameter.

    Raises:
        ValueError: samples are not independent (BatchNorm in training mode, named), the loss has no scalar reduction,
            nothing requires a gradient, or sizes disagree.
        TypeError: an argument of the wrong kind.

    Nothing of the model's is changed: no ``.grad``, buffer, mode, hook or random state. The first call on a model at a
    shape of its inputs checks itself; parameters that the layer rules do not explain go through ``torch.func.vmap``
    over the model (logged once).
    """
    terms = _terms(Batch.of(model, loss, x, y, sample_dim))
    return {name: contractions.gradients(parts) for name, parts in terms.items()}


def per_sample_norms(
    model: nn.Module, loss: Loss, x: Any, y: Any, *, sample_dim: int | tuple[int, int, int] = 0
) -> Tensor:
    """Norm (N,) of each sample's gradient over all parameters together.

    Arguments and errors as for `per_sample_gradients`. The gradients are built, a bounded number of samples at a time,
    only where the inner products of activations and of backprops would cost more.
    """
    terms = _terms(Batch.of(model, loss, x, y, sample_dim))
    return torch.stack([contractions.norms_squared(parts) for parts in terms.values()]).sum(0).sqrt()


def per_sample_gram(
    model: nn.Module, loss: Loss, x: Any, y: Any, *, sample_dim: int | tuple[int, int, int] = 0
) -> Tensor:
    """Inner products (N, N) of the samples' gradients over all parameters together (the empirical tangent kernel of
    the loss). Arguments and errors as for `per_sample_gradients`.
    """
    terms = _terms(Batch.of(model, loss, x, y, sample_dim))
    return torch.stack([contractions.gram(parts) for parts in terms.values()]).sum(0)


def check_gradients(
    model: nn.Module, loss: Loss, x: Any, y: Any, *, sample_dim: int | tuple[int, int, int] = 0
) -> None:
    """Compare `per_sample_gradients` with plain backward passes of single samples.

    Every sample is run alone, so this costs N forward and backward passes. Arguments as for `per_sample_gradients`.

    Raises:
        RuntimeError: a gradient differs; names the parameter, the sample and both norms.
        ValueError: the forward pass draws random numbers, so that there is nothing to compare with.
    """
    batch = Batch.of(model, loss, x, y, sample_dim)
    if _is_random(batch):
        raise ValueError("model: the forward pass draws random numbers (dropout?); check it in evaluation mode")
    found = per_sample_gradients(model, loss, x, y, sample_dim=sample_dim)
    for n in range(batch.count):
        with preserved(batch):
            alone = batch.alone(n).gradients()
        for name in _differences({k: g[n] for k, g in found.items()}, alone):
            raise RuntimeError(
                f"{name}: the gradient of sample {n} has norm {found[name][n].norm():.10g}, "
                f"run alone {alone[name].norm():.10g}; their difference {(found[name][n] - alone[name]).norm():.3g}"
            )


def _is_random(batch: Batch) -> bool:
    """Whether a forward pass moves the random state of the CPU or of the model's device."""
    with preserved(batch) as was_random, torch.no_grad():
        batch.output()
        return was_random()


def _terms(batch: Batch) -> dict[str, list[Term]]:
    """The per-sample gradients of every parameter as terms, in the order of the parameters."""
    with preserved(batch) as was_random:
        with capture(batch.model) as tape:
            output = batch.output()
        random = was_random()
        _refuse_mixing(tape)
        if batch.count == 1:
            return _single(batch, output)
        plans = PLANS.setdefault(batch.model, {})
        key = key_of(batch)
        plan = plans.get(key)
        terms: dict[str, list[Term]] = {}
        if not isinstance(output, Tensor):
            plan = plan or Plan([], [], set(batch.parameters))
            plans[key] = plan
        elif plan is not None and plan.signature == signature_of(tape):
            losses = batch.losses(output)
            backprops = tape.gradients([losses], [torch.ones_like(losses)])
            terms, failed = explained(tape, backprops, plan.layouts, plan.general)
            plan = Plan(plan.signature, plan.layouts, failed, plan.loop)
        else:
            terms, plan, certain = _studied(batch, tape, batch.losses(output), random)
            if certain:
                plans[key] = plan
        if plan.general:
            terms |= _by_general_path(batch, plan, random)
        return {
            name: terms.get(name) or [Dense(p.detach().new_zeros(batch.count, *p.shape))]
            for name, p in batch.parameters.items()
        }


def _refuse_mixing(tape: Tape) -> None:
    if tape.mixing:
        raise ValueError(
            f"{', '.join(dict.fromkeys(tape.mixing))}: BatchNorm in training mode makes each sample's output depend "
            "on the others, so no sample has a gradient of its own; call model.eval() or use GroupNorm"
        )


def _single(batch: Batch, output: Any) -> dict[str, list[Term]]:
    """One sample: its gradient is the plain one."""
    parameters = batch.parameters
    value = batch.loss(output, batch.y)
    found = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
    return {
        k: [Dense((torch.zeros_like(p) if g is None else g)[None])]
        for (k, p), g in zip(parameters.items(), found, strict=True)
    }


def _studied(batch: Batch, tape: Tape, losses: Tensor, random: bool) -> tuple[dict[str, list[Term]], Plan, bool]:
    """The first call at a shape: find the layouts, check the result in two ways, send what fails the general way.

    Returns the terms, the plan, and whether the batch left no doubt about it (a sample without gradient does).
    """
    generator = torch.Generator().manual_seed(0)
    weights = (0.5 + torch.rand(batch.count, generator=generator, dtype=torch.float64)).to(losses)
    backprops = tape.gradients([losses], [torch.ones_like(losses)])
    parameters = batch.parameters
    both = tape.gradients([losses], [weights], also=list(parameters.values()))
    weighted, whole = both[: len(tape.uses)], both[len(tape.uses) :]
    layouts, certain, floor = [], True, noise(weighted)
    for b, bw in zip(backprops, weighted, strict=True):
        layout, only = ([], True) if b is None or bw is None else find_layout(b, bw, weights, floor)
        layouts.append(layout)
        certain = certain and only
    terms, failed = explained(tape, backprops, layouts, set())
    uneven = {n for u in tape.uses if u.rule and u.call and u.rule.counts_over_batch(u.call) for n in u.names}
    floor = noise(whole)
    for (name, p), g in zip(parameters.items(), whole, strict=True):
        expected = torch.zeros_like(p) if g is None else g
        if name in terms and name not in uneven and not _sums_to(terms[name], weights, expected, floor):
            failed.add(name)
    n = int(losses.detach().abs().nan_to_num(0.0, 0.0, 0.0).argmax())  # a sample that counts
    alone = None if random else _alone(batch, n)
    if alone is not None:
        rows = {
            name: contractions.gradients([t.samples(slice(n, n + 1)) for t in parts])[0]
            for name, parts in terms.items()
            if parts
        }
        failed |= set(_differences(rows, alone))
    _note_general(tape, failed)
    kept = {name: parts for name, parts in terms.items() if name not in failed}
    return kept, Plan(signature_of(tape), layouts, failed), certain


def _alone(batch: Batch, n: int) -> dict[str, Tensor] | None:
    """The plain gradients of one sample; None where the model does not run on a single one."""
    try:
        return batch.alone(n).gradients()
    except Exception as error:
        log.info("not compared with sample %d alone: %s", n, error)
        return None


def _sums_to(terms: list[Term], weights: Tensor, whole: Tensor, floor: float) -> bool:
    """Whether the weighted sum of the samples' gradients is what autograd gives for the weighted sum of losses."""
    if not terms:
        return bool(whole.norm() <= floor)
    scale = (contractions.norms_squared(terms) * weights.square()).sum().sqrt()
    difference = (contractions.weighted_sum(terms, weights) - whole).norm()
    return bool(difference <= rounding(whole) * scale + floor)


def _differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names whose gradients differ by more than the rounding of one kernel for one sample and another for many."""
    floor = noise(expected.values())
    return [
        name
        for name, g in found.items()
        if not (g - expected[name]).norm() <= 10 * torch.finfo(g.dtype).eps ** 0.5 * expected[name].norm() + floor
    ]


def _note_general(tape: Tape, failed: set[str]) -> None:
    readers = {
        name: sorted({getattr(u.function, "__name__", str(u.function)) for u in tape.uses if name in u.names})
        for name in sorted(failed)
    }
    if readers:
        _say(", ".join(f"{name} (read by {', '.join(found) or 'nothing recorded'})" for name, found in readers.items()))


@cache
def _say(names: str) -> None:
    """Once for the same parameters."""
    log.warning("no per-sample rule explains %s; computed exactly by vmap over the whole model, which is slower", names)


def _by_general_path(batch: Batch, plan: Plan, random: bool) -> dict[str, list[Term]]:
    """The parameters without rules, checked once against a sample alone."""
    found, plan.loop = general_gradients(batch, plan.general, plan.loop)
    if not plan.loop and not random:
        alone = batch.alone(batch.count - 1).gradients()
        if _differences({k: g[-1] for k, g in found.items()}, alone):
            found, plan.loop = general_gradients(batch, plan.general, loop=True)
    return {name: [Dense(g)] for name, g in found.items()}
