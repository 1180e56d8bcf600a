"""Learning how a model's parameters are explained at one shape of its inputs, and checking what was learnt."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from curvature.gradients.batch import Batch
from curvature.gradients.fallback import general_gradients
from curvature.gradients.parameter_terms import terms_by_parameter
from curvature.gradients.plans import Plan, tape_signature
from curvature.gradients.sample_axes import find_layout
from curvature.linalg import noise_floor, rounding_tolerance
from curvature.recording import Tape
from curvature.terms import DenseGradients, Term, contractions, promote

log = logging.getLogger("curvature")
Alone = Callable[[int], dict[str, Tensor] | None]


def require_independent_samples(tape: Tape) -> None:
    """Raise ValueError where a module makes samples depend on each other."""
    if tape.mixing:
        raise ValueError(
            f"{', '.join(dict.fromkeys(tape.mixing))}: BatchNorm in training mode makes each sample's output depend "
            "on the others, so no sample has a gradient of its own; call model.eval() or use GroupNorm"
        )


def learn_and_verify(
    tape: Tape, losses: Tensor, alone: Alone, edge: GradientEdge | None = None
) -> tuple[dict[str, list[Term]], Plan, bool]:
    """The first call at a shape: find the layouts, check the result in two ways, send what fails the general way.

    Args:
        losses: (N,), one for each sample.
        alone: the plain gradients of sample n, not by the tape; None where they are not to be had.
        edge: where the losses begin to go back, if it is not known to them.

    Returns the terms, the plan, and whether the batch left no doubt about it (a sample without gradient does).
    """
    generator = torch.Generator().manual_seed(0)
    weights = (0.5 + torch.rand(len(losses), generator=generator, dtype=torch.float64, device="cpu")).to(losses)
    outputs = [losses if edge is None else edge]
    backprops = tape.gradients(outputs, [torch.ones_like(losses)])
    parameters = {name: node.tensor for name, node in tape.parameters.items()}
    both = tape.gradients(outputs, [weights], also=list(parameters.values()))
    weighted, whole = both[: len(tape.uses)], both[len(tape.uses) :]
    layouts, certain, floor = [], True, noise_floor(weighted)
    for b, bw in zip(backprops, weighted, strict=True):
        layout, only = ([], True) if b is None or bw is None else find_layout(b, bw, weights, floor)
        layouts.append(layout)
        certain = certain and only
    terms, failed = terms_by_parameter(tape, backprops, layouts, set())
    terms = {name: [promote(t, parameters[name].dtype) for t in parts] for name, parts in terms.items()}
    low = max((torch.finfo(b.dtype).eps for b in backprops if b is not None), default=0.0) ** 0.5
    uneven = {n for u in tape.uses if u.rule and u.call and u.rule.counts_over_batch(u.call) for n in u.names}
    floor = noise_floor(whole)
    for (name, p), g in zip(parameters.items(), whole, strict=True):
        expected = torch.zeros_like(p) if g is None else g
        if name in terms and name not in uneven and not _sums_to(terms[name], weights, expected, floor, low):
            failed.add(name)
    n = int(losses.detach().abs().nan_to_num(0.0, 0.0, 0.0).argmax())  # a sample that counts
    expected_rows = alone(n)
    if expected_rows is not None:
        rows = {
            name: contractions.gradients([t.samples(slice(n, n + 1)) for t in parts])[0]
            for name, parts in terms.items()
            if parts
        }
        failed |= set(differences(rows, expected_rows, low))
    _note_general(tape, failed)
    kept = {name: parts for name, parts in terms.items() if name not in failed}
    return kept, Plan(tape_signature(tape), layouts, failed), certain


def single_sample_reference(batch: Batch, random: bool) -> Alone:
    """The plain gradients of one sample; None where the model does not run on a single one."""

    def alone(n: int) -> dict[str, Tensor] | None:
        try:
            return None if random else batch.alone(n).gradients()
        except Exception as error:
            log.info("not compared with sample %d alone: %s", n, error)
            return None

    return alone


def _sums_to(terms: list[Term], weights: Tensor, whole: Tensor, floor: float, low: float) -> bool:
    """Whether the weighted sum of the samples' gradients is what autograd gives for the weighted sum of losses."""
    if not terms:
        return bool(whole.norm() <= floor)
    weights = weights.to(whole.dtype)
    scale = (contractions.norms_squared(terms) * weights.square()).sum().sqrt()
    difference = (contractions.weighted_sum(terms, weights) - whole).norm()
    return bool(difference <= max(rounding_tolerance(whole), low) * scale + floor)


def differences(found: dict[str, Tensor], expected: dict[str, Tensor], low: float = 0.0) -> list[str]:
    """Names whose gradients differ by more than the rounding of one kernel for one sample and another for many.

    `low` is the root of the coarsest rounding inside the model, under autocast.
    """
    floor = noise_floor(expected.values())
    return [
        name
        for name, g in found.items()
        if not (g - expected[name]).norm()
        <= 10 * max(torch.finfo(g.dtype).eps ** 0.5, low) * expected[name].norm() + floor
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
    log.warning("no per-sample rule explains %s; computed exactly all the same, which is slower", names)


def general_path_terms(batch: Batch, plan: Plan, names: set[str], random: bool) -> dict[str, list[Term]]:
    """The parameters of these names, checked against a sample alone; `plan` keeps which way was right."""
    found, plan.loop = general_gradients(batch, names, plan.loop)
    if not plan.loop and not random:
        alone = batch.alone(batch.count - 1).gradients()
        if differences({k: g[-1] for k, g in found.items()}, alone):
            found, plan.loop = general_gradients(batch, names, loop=True)
    return {name: [DenseGradients(g)] for name, g in found.items()}
