"""Inputs that are no tensors with an axis of samples: bags of words with offsets, and packed sequences."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from curvature.recording import call_model, map_tensors, preserve_state, tensors_in


def offsets_of(model: nn.Module, x: Any) -> Tensor | None:
    """The offsets, if x is ``(values, offsets, ...)`` as `nn.EmbeddingBag` takes it; else None.

    Values (L,) and offsets are integers, the offsets from 0 upwards to L at most. Identifiers may look the same, so a
    forward pass shows whether they reach an embedding bag as its offsets.
    """
    leaves = tensors_in(x)
    if packed_in(x) or len(leaves) < 2 or any(t.ndim != 1 or t.is_floating_point() for t in leaves[:2]):
        return None
    values, offsets = leaves[:2]
    ends = offsets.tolist()
    if not ends or ends[0] != 0 or sorted(ends) != ends or ends[-1] > len(values):
        return None
    with preserve_state(model), torch.no_grad(), _OffsetsSought(offsets) as sought:
        call_model(model, x)
    return offsets if sought.are_found else None


class _OffsetsSought(TorchFunctionMode):
    """Follows a tensor through torch functions: does it arrive, unchanged, at an embedding bag as its offsets?"""

    def __init__(self, offsets: Tensor) -> None:
        super().__init__()
        self.offsets, self.are_found = offsets, False
        self.derived = [offsets]  # kept alive, so that no other tensor takes their identity

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.embedding_bag:
            own = kwargs.get("offsets", args[2] if len(args) > 2 else None)
            if own is not None and self._is_derived(own):
                self.are_found |= torch.equal(own[: len(self.offsets)], self.offsets.to(own))
        result = function(*args, **kwargs)
        if any(self._is_derived(t) for t in pytree.tree_leaves((args, kwargs))):
            self.derived += [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        return result

    def _is_derived(self, value: Any) -> bool:
        return any(value is t for t in self.derived)


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
