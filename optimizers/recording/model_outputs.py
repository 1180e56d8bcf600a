"""Where vectors are sent back from: what a model returned, or what the loss functions inside it have received."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from curvature import Tape

SUBSTITUTE = (
    "the model returned no tensor but its loss, made by no loss function of torch: curvature by empirical(), from "
    "the training loop's own backward pass, for a loss that is a mean over the batch"
)


@dataclass(frozen=True)
class ModelOutputs:
    """Tensors (count, ...), samples first, and the target of each, where it is known.

    `sources` are what they are views of, in the graph of the loss; `scale` is that of the loss, where there are none.
    """

    tensors: Sequence[Tensor]
    sources: Sequence[Tensor]
    targets: Sequence[Any]
    count: int
    scale: Tensor | None = None


def find_outputs(tape: Tape, output: Any) -> ModelOutputs:
    """The tensors that a model returned; of one that returns only its loss, what its loss functions have received.

    Without such a function there are no tensors, and only the training loop knows what goes back; a count of zero means
    that nothing does.
    """
    returned = list(differentiable(output))
    own = [x for x in returned if x.ndim]
    if own:
        return ModelOutputs(own, own, [None] * len(own), len(own[0]))
    pairs = list(_received(tape))
    if not pairs:
        sizes = torch.stack([x.detach().float().abs() for x in returned]).sum() if returned else None
        return ModelOutputs([], [], [], (tape.samples or 1) if returned or output is None else 0, sizes)
    counts = {len(x) for x, _ in pairs}
    count = tape.samples or 0
    if not count or any(rows % count for rows in counts):
        count = len(pairs[0][0])
    tensors = [samples_first(x, count) for x, _ in pairs]
    targets = [samples_first(y, count) for _, y in pairs]
    return ModelOutputs(tensors, [x for x, _ in pairs], targets, count)


def differentiable(output: Any) -> Iterator[Tensor]:
    """The logits, or every tensor of a sequence, mapping or dataclass, that may be differentiated."""
    output = getattr(output, "logits", output)
    if isinstance(output, Tensor):
        if output.is_floating_point() and output.requires_grad:
            yield output
        return
    if is_dataclass(output) and not isinstance(output, Mapping):
        output = [getattr(output, field.name) for field in fields(output)]
    values = output.values() if isinstance(output, Mapping) else output
    for value in values if isinstance(output, Mapping | tuple | list) else ():
        yield from differentiable(value)


def _received(tape: Tape) -> Iterator[tuple[Tensor, Any]]:
    """What the loss functions were given: tensors that may be differentiated, with the target."""
    for _, args, kwargs in tape.losses:
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        for x in (*args, *kwargs.values()):
            if isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad and x.ndim:
                yield x, target


def samples_first(x: Any, count: int) -> Any:
    """(count * m, ...) as (count, ..., m): tokens, say, that were put along the axis of the samples for the loss."""
    if not isinstance(x, Tensor) or not x.ndim or len(x) == count or len(x) % count:
        return x
    return x.unflatten(0, (count, -1)).movedim(1, -1)
