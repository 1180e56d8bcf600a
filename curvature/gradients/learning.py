"""What a new shape needs: where the samples are at every use, and whether the terms that follow from it are right.

The axis of samples is found by experiment (`sample_axes`). Terms are checked against autograd in two ways: by their
weighted sum, and by one sample run alone. A parameter that fails a check takes the general path.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from curvature.gradients.batch import Batch
from curvature.gradients.derived_weights import Terms
from curvature.gradients.parameter_terms import Backprops, precise_terms
from curvature.gradients.plans import PLANS, Plan, keep_plan, signature_of
from curvature.gradients.sample_axes import are_coarse, find_layouts, follow, reproduce
from curvature.linalg import full_precision, noise_floor, rounding_tolerance, to_device, to_host
from curvature.recording import Tape, warn_once
from curvature.terms import Term, contractions

log = logging.getLogger("curvature")
# the plain gradients of sample n, an index (1,), or None where there are none
Reference = Callable[[Tensor], dict[str, Tensor] | None]


@full_precision()
def learn(
    model: nn.Module, key: Any, tape: Tape, losses: Tensor, reference: Reference, edge: GradientEdge | None = None
) -> tuple[Plan, list[Tensor | None]]:
    """The plan for a tape, and the backprops of the losses: a kept plan that these confirm, or a new one.

    A new plan is kept unless its batch left a doubt (a sample without gradient does). The host waits once to confirm;
    to learn, once for the axes and once for the checks.

    Args:
        losses: (N,), one for each sample.
        reference: plain gradients of sample n, computed without the tape; None where there are none.
        edge: where the backward pass of the losses begins, if their own graph does not say it.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = 0.5 + torch.rand(len(losses), generator=generator, dtype=torch.float64, device="cpu")
    weights = to_device(drawn.to(losses.dtype), losses.device)
    outputs = [losses if edge is None else edge]
    backprops = [b if b is None or b.numel() else None for b in tape.gradients(outputs, [torch.ones_like(losses)])]
    signature = signature_of(tape)
    plan = PLANS.get(model, {}).get((key, signature))
    send = lambda weights: tape.gradients(outputs, [to_device(weights.to(losses.dtype), losses.device)])
    in_order = lambda layouts: follow(layouts, backprops, len(losses), send)
    if plan is not None:
        is_coarse = are_coarse(backprops)
        if all(in_order(plan.layouts)) if is_coarse else reproduce(plan.layouts, backprops, send(weights), weights):
            return plan, backprops
    parameters = [node.tensor for node in tape.parameters.values()]
    both = tape.gradients(outputs, [weights], also=parameters)
    weighted, sums = both[: len(tape.uses)], both[len(tape.uses) :]
    layouts, are_certain = find_layouts(backprops, weighted, weights)
    if are_coarse(backprops):
        layouts = [own if good else [] for own, good in zip(layouts, in_order(layouts), strict=True)]
    terms, failed = precise_terms(tape, backprops, layouts, set())
    failed |= failures(tape, terms, losses, weights, sums, backprops, reference)
    _log_general(tape, failed)
    plan = Plan(layouts, failed)
    if are_certain:
        keep_plan(model, key, signature, plan)
    return plan, backprops


def single_sample_reference(batch: Batch, one_pass: bool) -> Reference:
    """The plain gradients of sample n run alone; None where another pass would
    be of another function (`is_of_one_pass`), or for one that does not run on one sample."""

    def reference(n: Tensor) -> dict[str, Tensor] | None:
        try:
            return None if one_pass else batch.sample(int(n)).gradients()
        except Exception as error:
            log.info("not compared with sample %d alone: %s", n, error)
            return None

    return reference


def failures(
    tape: Tape, terms: Terms, losses: Tensor, weights: Tensor, sums: Sequence[Tensor | None],
    backprops: Backprops, reference: Reference,
) -> set[str]:  # fmt: skip
    """Names of the parameters whose terms are wrong; the host waits once, unless one is."""
    low = max((torch.finfo(b.dtype).eps for b in backprops if b is not None), default=0.0) ** 0.5
    uneven = {n for u in tape.uses if u.rule and u.call and u.rule.counts_over_batch(u.call) for n in u.names}
    floor = noise_floor(sums)
    summed = {
        name: torch.zeros_like(node.tensor) if g is None else g
        for (name, node), g in zip(tape.parameters.items(), sums, strict=True)
        if name in terms and name not in uneven
    }
    sums_to = lambda name, norms: _sums_to(terms[name], weights, summed[name], floor, low, norms)
    flags = [sums_to(name, contractions.least_norms_squared) for name in summed]
    n = losses.detach().abs().nan_to_num(0.0, 0.0, 0.0).argmax()[None]  # a sample that counts
    alone = reference(n)
    rows: dict[str, Tensor] = {}
    if alone is not None:
        one = {name: [t.samples(n.to(t.device)) for t in own] for name, own in terms.items() if own}
        rows = {name: contractions.gradients(own)[0] for name, own in one.items()}
        flags += agreements(rows, alone, low)
    good = to_host(flags)
    failed = {name for name, flag in zip(rows, good[len(summed) :], strict=True) if not flag}
    doubtful = [name for name, flag in zip(summed, good, strict=False) if not flag]
    failed |= {name for name in doubtful if not sums_to(name, contractions.norms_squared)}
    if low > torch.finfo(torch.float32).eps ** 0.5:  # half precision hides that an axis is wrong for the others, too
        failed |= {name for use in tape.uses if failed.intersection(use.names) for name in use.names}
    return failed


def _sums_to(
    terms: list[Term], weights: Tensor, expected: Tensor, floor: Tensor, low: float,
    norms_squared: Callable[[list[Term]], Tensor],
) -> Tensor:  # fmt: skip
    """Whether the weighted sum of the samples' gradients is what autograd gives for the weighted sum of losses, ()."""
    floor = floor.to(expected.norm())
    if not terms:  # what no function reads that torch shows
        return expected.norm() == 0
    weights = weights.to(floor)
    scale = (norms_squared(terms) * weights.square()).sum().sqrt()
    difference = (contractions.weighted_sum(terms, weights) - expected).norm()
    return difference <= max(rounding_tolerance(expected), low) * scale + floor


def differences(rows: dict[str, Tensor], expected: dict[str, Tensor], low: float = 0.0) -> list[str]:
    """Names whose gradients differ by more than rounding; kernels for one sample and for many round differently.

    `low` is the root of the coarsest rounding inside the model, under autocast.
    """
    return [name for name, same in zip(rows, to_host(agreements(rows, expected, low)), strict=True) if not same]


def agreements(rows: dict[str, Tensor], expected: dict[str, Tensor], low: float) -> list[Tensor]:
    """For each name a flag (): whether rounding explains what the gradients differ by."""
    floor = noise_floor(expected.values())
    return [
        (g - expected[name]).norm()
        <= 10 * max(torch.finfo(g.dtype).eps ** 0.5, low) * expected[name].norm() + floor.to(g.real)
        for name, g in rows.items()
    ]


def _log_general(tape: Tape, failed: set[str]) -> None:
    """Log which parameters take the general path, and what reads them; once for the same parameters."""
    readers = {
        name: sorted({getattr(u.function, "__name__", str(u.function)) for u in tape.uses if name in u.names})
        for name in sorted(failed)
    }
    unseen = "an autograd.Function or the like"  # what torch does not let a mode see
    names = ", ".join(f"{name} (used in {', '.join(functions) or unseen})" for name, functions in readers.items())
    if names:
        warn_once("no layer rule gives per-sample gradients of %s: computed exactly, but more slowly", names)
