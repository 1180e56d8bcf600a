"""Plans: how the parameters of a model are explained at one shape of its inputs, and whether a kept one applies."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from curvature.gradients.batch import Batch
from curvature.layers import Layout
from curvature.linalg import full_precision
from curvature.recording import ModelState, Tape, graph_signature, record_call


@dataclass
class Plan:
    """How the parameters of a model are explained at one shape of its inputs."""

    layouts: list[list[Layout]]  # of each use: one, or none where its output has no axis of samples
    general: set[str]  # parameters that take the general path
    loop: bool = False  # whether that path is the loop over samples


MOST_KINDS = 16  # of passes at one shape, whose plans are kept
Signature = tuple[Any, ...]
PLANS: WeakKeyDictionary[nn.Module, dict[tuple[Any, Signature], Plan]] = WeakKeyDictionary()


def signature_of(tape: Tape) -> Signature:
    """The graph, and functions, shapes and parameters of the uses in order; tapes of equal signature share a plan.

    If data may say where samples go, the graph is None, and where they are is open: the plan is confirmed each time.
    """
    return (tape.graph, *((use.function, use.shape, use.names) for use in tape.uses))


def kept_plan(model: nn.Module, key: Any, tape: Tape) -> Plan | None:
    """The plan that was learnt from such a pass; None without one, and where it has to be confirmed."""
    return None if tape.graph is None else PLANS.get(model, {}).get((key, signature_of(tape)))


def keep_plan(model: nn.Module, key: Any, signature: Signature, plan: Plan) -> None:
    """Keep it, and the last ones of other signatures: several kinds of passes may alternate."""
    plans = PLANS.setdefault(model, {})
    plans.pop((key, signature), None)
    plans[key, signature] = plan
    for oldest in [own for own in plans if own[0] == key][:-MOST_KINDS]:
        del plans[oldest]


def record(batch: Batch, start: ModelState | None = None) -> tuple[Tape, Any, Plan | None]:
    """The tape and the output of a forward pass, and the plan that applies; in full precision if one is to be learnt.

    Args:
        start: the state of the model, if that is known.

    Raises:
        ValueError: the output depends on no parameter.

    What is learnt compares passes that round differently in TF32. With a known plan, the settings in force hold.
    """
    start = start or ModelState(batch.model)
    kept = (signature for key, signature in PLANS.get(batch.model, ()) if key == batch.key)
    is_expected = any(graph is not None for graph, *_ in kept)
    with nullcontext() if is_expected else full_precision():
        tape, output = _recorded(batch)
    plan = kept_plan(batch.model, batch.key, tape)
    if plan is None and is_expected:
        start.restore()
        with full_precision():
            tape, output = _recorded(batch)
    tape.start = start
    if isinstance(output, Tensor) and not output.requires_grad:
        names = list(batch.parameters)
        few = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        raise ValueError(f"model: its output depends on none of the parameters {few}, as far as autograd knows")
    return tape, output, plan


def require_independent_samples(tape: Tape) -> None:
    """Raise ValueError where a module makes samples depend on each other."""
    if tape.mixing:
        raise ValueError(
            f"{', '.join(dict.fromkeys(tape.mixing))}: BatchNorm in training mode makes each sample's output depend "
            "on the others, so no sample has a gradient of its own; call model.eval() or use GroupNorm"
        )


def _recorded(batch: Batch) -> tuple[Tape, Any]:
    tape = Tape(batch.model, batch.parameters)
    output = batch.for_loss(record_call(tape, batch.model, batch.x))
    if isinstance(output, Tensor) and output.requires_grad:
        tape.graph = graph_signature(get_gradient_edge(output), batch.parameters.values())
    return tape, output
