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

Bags = tuple[tuple[int, int], ...]  # places of values and their offsets among the tensors of the input


def bags_in(model: nn.Module, x: Any) -> Bags:
    """Where x holds values with offsets, as `nn.EmbeddingBag` takes them, in whatever order.

    Values (L,) and offsets are integers, the offsets from 0 upwards to L at most. Identifiers may look the same, so a
    forward pass shows which reach an embedding bag as its offsets.
    """
    leaves = tensors_in(x)
    whole = [k for k, t in enumerate(leaves) if t.ndim == 1 and not t.is_floating_point()]
    if len(whole) < 2 or packed_in(x):
        return ()
    sizes = {k: max(len(leaves[j]) for j in whole if j != k) for k in whole}
    likely = [k for k in whole if _are_ends(leaves[k].tolist(), sizes[k])]
    if not likely:
        return ()
    with preserve_state(model), torch.no_grad(), _BagsSought(leaves, whole, likely) as sought:
        call_model(model, x)
    return tuple(sought.found)


def _are_ends(ends: list[int], size: int) -> bool:
    return bool(ends) and ends[0] == 0 and sorted(ends) == ends and ends[-1] <= size


class _BagsSought(TorchFunctionMode):
    """Follows tensors through torch functions: which arrive, unchanged, at an embedding bag as its offsets?"""

    def __init__(self, leaves: list[Tensor], whole: list[int], likely: list[int]) -> None:
        super().__init__()
        self.leaves, self.likely, self.found = leaves, likely, list[tuple[int, int]]()
        self.derived = {k: [leaves[k]] for k in whole}  # kept alive, so that no other tensor takes their identity

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.embedding_bag:
            offsets = kwargs.get("offsets", args[2] if len(args) > 2 else None)
            self._note(kwargs.get("input", args[0] if args else None), offsets)
        result = function(*args, **kwargs)
        given = pytree.tree_leaves((args, kwargs))
        made = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        for k in self.derived:
            if any(self._is_of(k, t) for t in given):
                self.derived[k] += made
        return result

    def _note(self, values: Any, offsets: Any) -> None:
        if offsets is None:
            return
        for k in self.likely:
            own = self.leaves[k]
            if self._is_of(k, offsets) and torch.equal(offsets[: len(own)], own.to(offsets)):
                read = [j for j in self.derived if j != k and len(self.leaves[j]) == len(values)]
                read.sort(key=lambda j: not self._is_of(j, values))
                self.found += [(j, k) for j in read[:1] if (j, k) not in self.found]

    def _is_of(self, k: int, value: Any) -> bool:
        return any(value is t for t in self.derived[k])


def number_of_bags(offsets: Tensor, y: Any) -> int:
    """One for each offset, but for the last if there is no target for it (`include_last_offset`)."""
    return len(offsets) - any(len(t) == len(offsets) - 1 for t in tensors_in(y) if t.ndim)


def some_bags(x: Any, bags: Bags, some: slice, count: int) -> Any:
    """The bags of these samples."""
    leaves = tensors_in(x)
    parts: dict[int, Tensor] = {}  # by identity of the whole
    spans: dict[int, slice] = {}  # of tensors beside the values, which have their length
    for values, k in bags:
        offsets, size = leaves[k], len(leaves[values])
        ends = [*offsets.tolist(), size]
        span = slice(ends[some.start], ends[some.stop])
        parts[id(offsets)] = offsets[some.start : some.stop + len(offsets) - count] - span.start
        parts[id(leaves[values])] = leaves[values][span]
        spans.setdefault(size, span)

    def part(t: Tensor) -> Tensor:
        if id(t) in parts:
            return parts[id(t)]
        if t.ndim == 1 and len(t) in spans:
            return t[spans[len(t)]]
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
