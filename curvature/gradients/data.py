"""Data as pairs (x, y): one of them, or an iterable of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from curvature.recording import unwrap_compiled


def pairs(data: Any) -> Iterator[tuple[Any, Any]]:
    """The pairs (x, y) of one pair or of an iterable of pairs."""
    nested = isinstance(data, list) and all(isinstance(entry, tuple | list) and len(entry) == 2 for entry in data)
    if isinstance(data, tuple | list) and len(data) == 2 and not nested:
        yield data[0], data[1]
        return
    require_pairs(data)
    for entry in data:
        if not isinstance(entry, tuple | list) or len(entry) != 2:
            raise TypeError(
                f"data: expected pairs (x, y), x a tensor, a tuple of positional or a dict of keyword arguments; "
                f"found {kind_of(entry)}"
            )
        yield entry[0], entry[1]


def require_pairs(data: Any) -> None:
    """Refuse what is neither a pair nor an iterable of pairs, without iterating.

    Raises:
        TypeError: a tensor, a mapping, a string, or nothing iterable.
    """
    if isinstance(data, Tensor | Mapping | str) or not isinstance(data, Iterable):
        raise TypeError(f"data: expected a pair (x, y) or an iterable of pairs (a DataLoader), found {kind_of(data)}")


def kind_of(found: Any) -> str:
    """Its type, and of a container its size, for messages."""
    size = f" of {len(found)}" if isinstance(found, tuple | list | dict) else ""
    return f"a {type(found).__name__}{size}"


def number_of_batches(data: Any) -> int | None:
    """The number of batches, if the data tell it."""
    if isinstance(data, tuple):
        return 1
    try:
        return len(data)
    except TypeError:
        return None


def digests(model: nn.Module) -> dict[str, str]:
    """A few characters for each parameter and buffer, which change with its values."""
    model = unwrap_compiled(model)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}

    def digest(t: Tensor) -> str:
        content = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return hashlib.blake2b(content.tobytes(), digest_size=8).hexdigest()

    tensors = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    return {name: digest(t) + (" frozen" if name in frozen else "") for name, t in tensors.items()}


def require_order(data: Any) -> None:
    """Refuse a DataLoader that shuffles.

    Raises:
        ValueError: it does.
    """
    if not isinstance(data, DataLoader):
        return
    sampler = getattr(data.batch_sampler, "sampler", data.sampler)
    random = isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler)
    if random or getattr(sampler, "shuffle", False):
        raise ValueError(
            f"data: the DataLoader shuffles (its sampler is a {type(sampler).__name__}), so that a later pass "
            f"would not find the same samples; make it with shuffle=False"
        )
