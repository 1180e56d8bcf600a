"""Where vectors are sent back from: what a model returned, or what the losses inside it are made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution

from curvature.recording import Tape
from optimizers.recording.loss_graph import Reading, Source, Unknown, read_loss

SUBSTITUTE = (
    "the model returned no tensor but its loss, made by no loss function of torch: curvature by empirical(), for a "
    "loss that is a mean over the batch"
)


@dataclass(frozen=True)
class ModelOutputs:
    """Tensors (count, ...), samples first, and the target of each, where it is known."""

    tensors: Sequence[Tensor]
    sources: Sequence[Tensor]  # to which the loop's backward pass comes: what `tensors` are views of, or the losses
    targets: Sequence[Any]
    count: int
    # where the model returned no more than its losses: their gradients at `tensors`, how they are made of these, and
    # their absolute value
    gradients: Sequence[Tensor] = ()
    readings: Sequence[Reading] = ()
    scale: Tensor | None = None


@torch.enable_grad()
def find_outputs(tape: Tape, output: Any) -> ModelOutputs:
    """The tensors that a model returned; of one that returns only its losses, what these are made of.

    That is what loss functions of torch have received, or else what sums and means were taken of. A model that returned
    None and called no loss function has no tensors. A count of zero means that nothing goes back.
    """
    # of an object of the user's what it holds, if that is all there is
    returned = list(differentiable(output)) or list(differentiable(getattr(output, "__dict__", None)))
    own = [x for x in returned if x.ndim]
    if own:
        return ModelOutputs([*map(regular, own)], own, [None] * len(own), len(own[0]))
    pairs: list[tuple[Tensor, Any]] = []  # what loss functions were given that may be differentiated, and the target
    for _, args, kwargs in tape.losses:
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point() and x.ndim]
        pairs += [(x, target) for x in given if x.requires_grad]
    if not pairs and returned:
        return _of_losses(tape, returned)
    if not pairs:
        return ModelOutputs([], [], [], (tape.samples or 1) if output is None else 0)
    counts = {len(x) for x, _ in pairs}
    count = tape.samples or 0
    if not count or any(rows % count for rows in counts):
        count = len(pairs[0][0])
    tensors = [samples_first(x, count) for x, _ in pairs]
    targets = [samples_first(y, count) for _, y in pairs]
    return ModelOutputs(tensors, [x for x, _ in pairs], targets, count)


def _of_losses(tape: Tape, losses: Sequence[Tensor]) -> ModelOutputs:
    """What losses () that no loss function has made are the means of; the losses themselves, if that is not known."""
    count = tape.samples or 1
    terms = loss_terms(tape, losses)
    if not terms and tape.samples == 1:  # outputs of one sample that the model has squeezed
        return ModelOutputs([*map(regular, losses)], losses, [None] * len(losses), 1)
    gradients: Sequence[Tensor] = [torch.ones_like(x) for x in losses]
    if terms:
        gradients = torch.autograd.grad(losses, terms, retain_graph=True)
    rows = lambda x: samples_first(x, count) if x.ndim else regular(x)
    scale = torch.stack([x.detach().float().abs() for x in losses]).sum()
    known = [None] * len(gradients)
    roots = [x.grad_fn for x in losses]
    readings = [read_loss(Source.of(x), roots) for x in terms] or [Unknown("it is no sum or mean")] * len(losses)
    tensors, gradients = [*map(rows, terms or losses)], [*map(rows, gradients)]
    return ModelOutputs(tensors, losses, known, count, gradients, readings, scale)


def regular(x: Tensor) -> Tensor:
    """A complex tensor as pairs of real numbers, a sparse one with its zeros, a number with an axis for its sample."""
    x = torch.atleast_1d(x.to_dense() if x.is_sparse else x)
    return torch.view_as_real(x) if x.is_complex() else x


def differentiable(output: Any) -> Iterator[Tensor]:
    """The logits, or every tensor of a sequence, mapping, dataclass or distribution, that may be differentiated."""
    output = getattr(output, "logits", output)
    if isinstance(output, Tensor):
        if output.requires_grad:
            yield output
        return
    if isinstance(output, Distribution):
        output = vars(output)
    elif is_dataclass(output) and not isinstance(output, Mapping):
        output = [getattr(output, field.name) for field in fields(output)]
    values = output.values() if isinstance(output, Mapping) else output
    for value in values if isinstance(output, Mapping | tuple | list) else ():
        yield from differentiable(value)


def samples_first(x: Any, count: int) -> Any:
    """(count * m, ...) as (count, ..., m): tokens, say, that were put along the axis of the samples for the loss."""
    if not isinstance(x, Tensor) or not x.ndim or len(x) == count or len(x) % count:
        return x
    return x.unflatten(0, (count, -1)).movedim(1, -1)


def loss_terms(tape: Tape, losses: Sequence[Tensor]) -> list[Tensor]:
    """What sums and means over data made the losses, but for penalties and scalar functions; empty if not known."""
    terms = {x.grad_fn: terms for terms, x in tape.reductions}
    without_data = {node.tensor.grad_fn for use in tape.uses for node in use.results}
    found: dict[Any, Tensor] = {}
    todo: list[Any] = [(x.grad_fn, 0) for x in losses]
    seen = set()
    while todo:
        node, number = todo.pop()
        if node in terms:
            found[node] = terms[node]
        elif node is not None and node not in seen and node not in without_data and not hasattr(node, "variable"):
            if node._input_metadata[number].shape:
                return []
            seen.add(node)
            todo += node.next_functions
    return list(found.values())
