"""How a model's parameters are explained at one shape of its inputs: known from earlier, or learnt and verified now.

The one place where per-sample gradients, matrices and Jacobians decide between a plan that they have, learning one, and
the general path.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from curvature.gradients.batch import Batch
from curvature.gradients.parameter_terms import Terms, terms_by_parameter
from curvature.gradients.sample_axes import find_layouts, reproduce
from curvature.gradients.verification import Reference, failures, note_general
from curvature.layers import Layout
from curvature.linalg import full_precision, to_device
from curvature.recording import ModelState, Tape, capture_on, graph_signature, stream_backprops, tensors_in
from curvature.terms import DenseGradients, Term, promote


@dataclass
class Plan:
    """How the parameters of a model are explained at one shape of its inputs."""

    signature: list[Any]
    layouts: list[list[Layout]]  # of each use: one, or none where its output has no axis of samples
    general: set[str]  # parameters that take the general path
    loop: bool = False  # whether that path is the loop over samples
    before: Plan | None = None  # the one whose place it has taken, of another graph: two kinds of passes may alternate

    def fitting(self, tape: Tape) -> Plan | None:
        """This plan, or the one before it, if it is of the signature of the tape."""
        signature = tape_signature(tape)
        return next((plan for plan in (self, self.before) if plan and plan.signature == signature), None)


Contraction = Callable[[list[Term]], Any]
WAITING_BYTES = 1 << 22  # of backprops that wait to be contracted
Learnt = tuple[Terms, Plan, bool]
PLANS: WeakKeyDictionary[nn.Module, dict[Any, Plan]] = WeakKeyDictionary()


def plan_key(batch: Batch) -> tuple[Any, ...]:
    """All that the plan for a batch may depend on."""
    shapes = tuple((tuple(t.shape), t.dtype, t.device) for t in tensors_in(batch.x))
    training = tuple(module.training for module in batch.model.modules())
    return (shapes, batch.count, batch.takes_logits, batch.dims, training, tuple(batch.parameters))


def tape_signature(tape: Tape) -> list[Any]:
    """The graph, and functions, shapes and parameters of the uses in order; tapes of equal signature share a plan.

    If data may say where samples go, the graph is None, and where they are is open: the plan is confirmed each time.
    """
    return [tape.graph, *((use.function, use.shape, use.names) for use in tape.uses)]


def record(batch: Batch) -> tuple[Tape, Any]:
    """The tape and the output of a forward pass, in full precision if the plan is to be learnt from it.

    Raises:
        ValueError: the output depends on no parameter.

    What is learnt compares passes that round differently in TF32. Once the plan is known, the settings in force hold.
    """
    model, state = batch.model, ModelState(batch.model)
    plan = PLANS.get(model, {}).get(plan_key(batch))
    is_known = plan is not None and (not plan.signature or plan.signature[0] is not None)
    with nullcontext() if is_known else full_precision():
        tape, output = _recorded(batch)
    no_longer_fits = plan is not None and plan.signature and (tape.graph is None or plan.fitting(tape) is None)
    if is_known and no_longer_fits:
        state.restore()
        with full_precision():
            tape, output = _recorded(batch)
    tape.start = state
    if isinstance(output, Tensor) and not output.requires_grad:
        names = list(batch.parameters)
        few = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise ValueError(f"model: its output depends on none of the parameters {few}, as far as autograd knows")
    return tape, output


def _recorded(batch: Batch) -> tuple[Tape, Any]:
    with capture_on(Tape(batch.model, batch.parameters), batch.model) as tape:
        output = batch.output()
    if isinstance(output, Tensor) and output.requires_grad:
        tape.graph = graph_signature(get_gradient_edge(output), batch.parameters.values())
    return tape, output


def find_plan(
    model: nn.Module, key: Any, tape: Tape, learn: Callable[[Plan | None], Learnt]
) -> tuple[Plan, Terms | None]:
    """The plan kept for this model and key, if it fits the tape; else the one that `learn` returns.

    A plan that was learnt is kept unless its batch left a doubt.

    Args:
        learn: `learn_and_verify`, of the kept plan if only its data can say whether that fits.

    Returns:
        The plan, and the terms where it was learnt or confirmed now.
    """
    plans = PLANS.setdefault(model, {})
    latest = plans.get(key)
    plan = None if latest is None else latest.fitting(tape)
    if plan is not None and tape.graph is not None:
        return plan, None
    terms, found, certain = learn(plan)
    if certain and found is not plan:
        plans[key], found.before = found, latest
        if latest is not None:
            latest.before = None
    return found, terms


@full_precision()
def learn_and_verify(
    tape: Tape, losses: Tensor, reference: Reference, edge: GradientEdge | None = None, known: Plan | None = None
) -> Learnt:
    """Find the axis of samples at every use, then check the terms that follow from it in two ways.

    Parameters that fail a check take the general path. The host waits for each of these two steps once; or once in
    all to confirm a known plan.

    Args:
        losses: (N,), one for each sample.
        reference: plain gradients of sample n, computed without the tape; None where there are none.
        edge: where the backward pass of the losses begins, if their own graph does not say it.
        known: a plan that was learnt at this signature. If samples are where it says, nothing else is checked again.

    Returns:
        The terms of all other parameters, the plan, and whether the batch left no doubt about it (a sample without
        gradient does).
    """
    generator = torch.Generator().manual_seed(0)
    drawn = 0.5 + torch.rand(len(losses), generator=generator, dtype=torch.float64, device="cpu")
    weights = to_device(drawn.to(losses.dtype), losses.device)
    outputs = [losses if edge is None else edge]
    backprops = tape.gradients(outputs, [torch.ones_like(losses)])
    if known is not None and reproduce(known.layouts, backprops, tape.gradients(outputs, [weights]), weights):
        return _explain(tape, backprops, known, known.general)[0], known, True
    parameters = [node.tensor for node in tape.parameters.values()]
    both = tape.gradients(outputs, [weights], also=parameters)
    weighted, sums = both[: len(tape.uses)], both[len(tape.uses) :]
    layouts, certain = find_layouts(backprops, weighted, weights)
    terms, failed = _explain(tape, backprops, Plan([], layouts, set()), set())
    failed |= failures(tape, terms, losses, weights, sums, backprops, reference)
    note_general(tape, failed)
    kept = {name: own for name, own in terms.items() if name not in failed}
    return kept, Plan(tape_signature(tape), layouts, failed), certain


def per_sample_terms(
    model: nn.Module, key: Any, tape: Tape, losses: Tensor, reference: Reference,
    general: Callable[[Plan, set[str]], Terms], edge: GradientEdge | None = None, contract: Contraction = list,
) -> dict[str, Any]:  # fmt: skip
    """What `contract` makes of the gradient of each of `losses` (N,) with respect to every parameter, given as terms.

    Args:
        general: the general path for the parameters of these names.
        contract: with a known plan it is called while the backward pass goes on, and backprops are freed after it.
        key, reference, edge: as for `find_plan` and `learn_and_verify`.
    """
    plan, terms = find_plan(model, key, tape, lambda known: learn_and_verify(tape, losses, reference, edge, known))
    if terms is None:
        found, failed = _contract_arriving(tape, losses if edge is None else edge, losses, plan, contract)
    else:
        found, failed = {name: contract(own) for name, own in terms.items() if own}, plan.general
    if failed:
        found |= {name: contract(own) for name, own in general(plan, failed).items()}
    shapes = {name: (len(losses), *node.tensor.shape) for name, node in tape.parameters.items()}
    zeros = lambda name: DenseGradients(tape.parameters[name].tensor.detach().new_zeros(shapes[name]))
    return {name: found[name] if name in found else contract([zeros(name)]) for name in shapes}


def _contract_arriving(
    tape: Tape, output: Any, losses: Tensor, plan: Plan, contract: Contraction
) -> tuple[dict[str, Any], set[str]]:
    """What `contract` makes of each parameter's terms as its backprops arrive, and the parameters without terms."""
    found: dict[str, Any] = {}
    failed: set[str] = set()

    def take(backprops: list[Tensor | None], names: frozenset[str]) -> None:
        others = tape.parameters.keys() - names
        terms, missing = _explain(tape, backprops, plan, plan.general | others)
        failed.update(missing & names)
        found.update({name: contract(own) for name, own in terms.items() if own})

    stream_backprops(tape, [output], [torch.ones_like(losses)], take, WAITING_BYTES)
    return found, failed


def _explain(tape: Tape, backprops: list[Tensor | None], plan: Plan, skip: set[str]) -> tuple[Terms, set[str]]:
    """`terms_by_parameter`, in the precision of the parameters at least."""
    terms, failed = terms_by_parameter(tape, backprops, plan.layouts, skip)
    dtypes = {name: tape.parameters[name].tensor.dtype for name in terms}
    return {name: [promote(t, dtypes[name]) for t in own] for name, own in terms.items()}, failed
