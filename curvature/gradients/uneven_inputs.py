"""Inputs that are no tensors with an axis of samples: bags of words with offsets, and packed sequences."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils import _pytree as pytree

from curvature.recording import map_tensors, tensors_in


def offsets_of(model: nn.Module, x: Any) -> Tensor | None:
    """The offsets, if x is ``(values, offsets, ...)`` as `nn.EmbeddingBag` takes it; else None.

    Values (L,) and offsets are integers, the offsets from 0 upwards to L at most. If there are as many of both, the
    model has to have such a layer.
    """
    leaves = tensors_in(x)
    if packed_in(x) or len(leaves) < 2 or any(t.ndim != 1 or t.is_floating_point() for t in leaves[:2]):
        return None
    values, offsets = leaves[:2]
    if len(values) == len(offsets) and not any(isinstance(module, nn.EmbeddingBag) for module in model.modules()):
        return None
    ends = offsets.tolist()
    return offsets if ends and ends[0] == 0 and sorted(ends) == ends and ends[-1] <= len(values) else None


def number_of_bags(offsets: Tensor, y: Any) -> int:
    """One for each offset, but for the last if there is no target for it (`include_last_offset`)."""
    return len(offsets) - any(len(t) == len(offsets) - 1 for t in tensors_in(y) if t.ndim)


def some_bags(x: Any, offsets: Tensor, some: slice, count: int) -> Any:
    """The bags of these samples."""
    size = len(tensors_in(x)[0])
    ends = [*offsets.tolist(), size]
    start, stop = ends[some.start], ends[some.stop]

    def part(t: Tensor) -> Tensor:
        if t is offsets:
            return t[some.start : some.stop + len(offsets) - count] - start
        if t.ndim == 1 and len(t) == size:
            return t[start:stop]
        return t[some] if t.ndim and len(t) == count else t

    return map_tensors(part, x)


def packed_in(x: Any) -> list[PackedSequence]:
    """The packed sequences among the arguments."""
    return [leaf for leaf in pytree.tree_leaves(x, is_leaf=_is_packed) if _is_packed(leaf)]


def some_sequences(x: Any, some: slice) -> Any:
    """The arguments with these sequences of every packed sequence, in the order before packing."""

    def part(leaf: Any) -> Any:
        if not _is_packed(leaf):
            return leaf
        rows, lengths = pad_packed_sequence(leaf, batch_first=True)
        lengths = lengths[some]
        return pack_padded_sequence(rows[some, : int(lengths.max())], lengths, batch_first=True, enforce_sorted=False)

    return pytree.tree_map(part, x, is_leaf=_is_packed)


def _is_packed(leaf: Any) -> bool:
    return isinstance(leaf, PackedSequence)
