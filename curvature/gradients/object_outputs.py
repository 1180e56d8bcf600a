"""Each sample's own loss of an output that is no tensor, in the one pass that there was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.utils import _pytree as pytree

from curvature.gradients.batch import Batch
from curvature.gradients.data import kind_of
from curvature.recording import map_tensors


def losses_of_parts(batch: Batch, output: Any) -> Tensor:
    """The loss (N,) of every sample's part of the output: a container, dataclass or the like of tensors.

    Raises:
        ValueError: it is not known which part is a sample's.
    """
    dim, count = batch.dims[1], batch.count
    has_samples = lambda t: t.ndim > dim and t.shape[dim] > 0 and t.shape[dim] % count == 0
    for leaf in _leaves(output):
        what = "" if isinstance(leaf, Tensor | int | float | str | None) else f"holds {kind_of(leaf)}"
        if isinstance(leaf, Tensor) and leaf.requires_grad and not has_samples(leaf):
            what = f"holds one of shape {tuple(leaf.shape)}, without {count} samples along axis {dim}"
        if what:
            raise ValueError(
                f"model: its forward pass draws random numbers (dropout?), and its output, {kind_of(output)}, {what}, "
                "so that nobody knows which part of it was a sample's in this pass; return a tensor, or a tuple, dict "
                f"or dataclass of tensors with the samples along axis {dim}, or call model.eval()"
            )

    def loss_of(n: int) -> Tensor:
        def rows(t: Tensor) -> Tensor:
            each = t.shape[dim] // count
            return t.narrow(dim, n * each, each)

        return batch.loss(map_tensors(lambda t: rows(t) if has_samples(t) else t, output), batch.sample(n).y)

    return torch.stack([loss_of(n) for n in range(count)])


def _leaves(tree: Any) -> Iterator[Any]:
    """What `map_tensors` comes to, distributions whole: their shape is more than that of their tensors."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Mapping):
            inner = list(leaf.values())
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            inner = [getattr(leaf, own.name) for own in fields(leaf)]
        elif hasattr(leaf, "logits") and not isinstance(leaf, Distribution):
            inner = list(vars(leaf).values())
        else:
            yield leaf
            continue
        yield from _leaves(inner)
