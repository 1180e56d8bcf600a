"""What a loss makes of the parameters itself, beside the output of the model: a penalty, a learnt temperature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from curvature.gradients import Batch
from curvature.losses import is_torch_loss, name_of
from curvature.recording import graph_leaves, map_tensors

ROWS = (
    "loss: {} reads {} itself (a penalty?), and empirical() sends back from the output of the model alone; leave that "
    "out of the loss, or take the rows of per_sample_gradients, which have it"
)
BATCHES = (
    "loss: {} reads {} itself, so that how several batches make up the loss of all data cannot be told. Give all data "
    "as one batch"
)


def require_none(batch: Batch, output: Tensor) -> None:
    """Raise ValueError if the gradients of the samples do not all go through the output."""
    read, value = _read_by_loss(batch, output)
    if read and any(bool(g.any()) for g in _gradients(value, list(read.values()))):
        raise ValueError(ROWS.format(name_of(batch.loss), ", ".join(read)))


def without_penalty(batch: Batch, output: Tensor) -> Tensor:
    """The loss of a batch of a sum over several, less what it adds to each batch, and not to each sample."""
    value = batch.loss_of(output)
    read, own = _read_by_loss(batch, output)
    if not read:
        return value
    _, dim, target_dim = batch.dims
    both = replace(batch, y=map_tensors(lambda t: torch.cat([t, t], target_dim), batch.y))
    unknown = ValueError(BATCHES.format(name_of(batch.loss), ", ".join(read)))
    try:
        _, of_both = _read_by_loss(both, torch.cat([output, output], dim))
    except Exception as error:  # whatever a loss raises that takes no other number of samples
        raise unknown from error
    once, again = (_derivatives(x, list(read.values())) for x in (own, of_both))
    if _near(again, 2 * once):
        return value
    if not _near(again, once):
        raise unknown
    return value - own


def _read_by_loss(batch: Batch, output: Tensor) -> tuple[dict[str, nn.Parameter], Tensor]:
    """The parameters that the loss reads by itself, and the loss as a function of these alone."""
    if is_torch_loss(batch.loss):
        return {}, output.new_zeros(())
    with torch.enable_grad():
        value = batch.loss_of(output.detach().clone())
    reached = set(map(id, graph_leaves(value))) if value.requires_grad else set()
    return {name: p for name, p in batch.parameters.items() if id(p) in reached}, value


def _gradients(value: Tensor, parameters: Sequence[Tensor], create_graph: bool = False) -> Sequence[Tensor]:
    return torch.autograd.grad(value, parameters, create_graph=create_graph, retain_graph=True, materialize_grads=True)


def _derivatives(value: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """First derivatives, and second ones along a random direction."""
    generator = torch.Generator().manual_seed(0)
    first = _gradients(value, parameters, create_graph=True)
    drawn = [torch.randn(g.shape, generator=generator, device="cpu").to(g) for g in first]
    along = torch.stack([(g * v).sum().to(first[0]) for g, v in zip(first, drawn, strict=True)]).sum()
    second = _gradients(along, parameters) if along.requires_grad else ()
    return torch.cat([g.detach().flatten().to(first[0]) for g in (*first, *second)])


def _near(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).norm() <= 10 * torch.finfo(found.dtype).eps ** 0.5 * expected.norm())
