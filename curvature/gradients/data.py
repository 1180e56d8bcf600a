"""Data as pairs (x, y): one of them, or an iterable of them; and whether these always come in one order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

DRAWING = RandomSampler, SubsetRandomSampler, WeightedRandomSampler


def pairs(data: Any) -> Iterator[tuple[Any, Any]]:
    """The pairs (x, y) of one pair or of an iterable of pairs."""
    if _is_pair(data):
        yield data[0], data[1]
        return
    require_pairs(data)
    for entry in data:
        if not isinstance(entry, tuple | list) or len(entry) != 2:
            raise TypeError(
                f"data: expected pairs (x, y), x a tensor, a tuple of positional or a dict of keyword arguments; "
                f"found {kind_of(entry)}{recipe(entry)}"
            )
        yield entry[0], entry[1]


def _is_pair(data: Any) -> bool:
    """Whether the data are one pair (x, y): a tuple of two, or a list of two that are no batches."""
    nested = isinstance(data, list) and all(_is_batch(entry) for entry in data)
    return isinstance(data, tuple | list) and len(data) == 2 and not nested


def _is_batch(entry: Any) -> bool:
    """Whether an entry of a list of two is a batch of its own, not x or y: a pair, or a dict with labels."""
    return isinstance(entry, tuple | list) and len(entry) == 2 or isinstance(entry, Mapping) and bool(_target_of(entry))


def require_pairs(data: Any, what: str = "data") -> None:
    """Refuse what is neither a pair nor an iterable of pairs (TypeError), without iterating."""
    if isinstance(data, Tensor | Mapping | str) or not isinstance(data, Iterable):
        raise TypeError(
            f"{what}: expected a pair (x, y) or an iterable of pairs (a DataLoader), found "
            f"{kind_of(data)}{recipe(data)}"
        )


def _target_of(batch: Mapping[Any, Any]) -> str | None:
    return next((key for key in ("labels", "label", "targets", "target", "y") if key in batch), None)


def recipe(batch: Any) -> str:
    """How to make pairs of what a data set of dicts gives."""
    if not isinstance(batch, Mapping):
        return ""
    key = _target_of(batch) or "labels"
    return f"; of batches that are dicts: [(batch, batch.pop({key!r})) for batch in loader]"


def kind_of(value: Any) -> str:
    """Its type, and of a container its size, for messages."""
    size = f" of {len(value)}" if isinstance(value, tuple | list | dict) else ""
    if isinstance(value, np.ndarray):
        return "a numpy.ndarray: pass torch.as_tensor(...) of it"
    return f"a {type(value).__name__}{size}"


def number_of_batches(data: Any) -> int | None:
    """The number of batches, if the data tell it."""
    if _is_pair(data):
        return 1
    try:
        return len(data)
    except TypeError:
        return None


def require_order(data: Any, name: str = "data") -> None:
    """Refuse a DataLoader, the argument of this name, whose samples come in an order that nobody knows afterwards.

    Types tell it, no sampler is run: a pass may draw random numbers, take long, or be the only one that there is.
    """
    if not isinstance(data, DataLoader) or isinstance(data.dataset, IterableDataset):  # which has an order of its own
        return
    what, more = ("sampler", ", batch_size=None") if data.batch_sampler is None else ("batch_sampler", "")
    unknown = _without_order(getattr(data, what))
    if unknown is None:
        return
    draws = isinstance(unknown, DRAWING) or getattr(unknown, "shuffle", False)
    raise ValueError(
        f"{name}: the DataLoader {'shuffles' if draws else 'shuffles or may shuffle'} (its sampler is a "
        f"{type(unknown).__name__}), so that nobody would know which sample a result belongs to, and a later pass "
        f"would not find the same samples; make one with shuffle=False: DataLoader(loader.dataset, batch_size=...), "
        f"or one that keeps the order of a single pass: DataLoader(loader.dataset, {what}=list(loader.{what}){more})"
        + ("" if draws else "; a sampler of your own may say that its order is fixed: an attribute shuffle = False")
    )


def _without_order(sampler: Any) -> Any:
    """The sampler, or that within, which may give another order at the next pass; None if all keep theirs."""
    iterate = getattr(type(sampler), "__iter__", None)  # a subclass with one of its own does what it likes
    if isinstance(sampler, Sequence | Tensor | np.ndarray) or iterate is SequentialSampler.__iter__:
        return None
    if iterate is BatchSampler.__iter__:
        return _without_order(sampler.sampler)
    if isinstance(sampler, DRAWING) or getattr(sampler, "shuffle", True):
        return sampler
    within = (x for x in getattr(sampler, "__dict__", {}).values() if isinstance(x, Sampler))
    return next((unknown for x in within if (unknown := _without_order(x)) is not None), None)
