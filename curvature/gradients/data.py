"""Data as pairs (x, y): one of them, as a pair or as two arguments, or an iterable of them."""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler

from curvature.losses import Injection
from curvature.recording import tensors_in, unwrap_compiled

F = TypeVar("F", bound=Callable[..., Any])
THIRD = 3  # model, loss, and x or data come before y
COMPARED = 1000  # indices, or batches of them, of a sampler that torch does not know


def either_form(function: F) -> F:
    """Make a function of (model, loss, x, y, ...) accept ``(x, y)`` as its third argument, without y; and one of
    (model, loss, data, ...) x and y in place of data, y by position or by name.

    In the second case what follows x is y if it holds a tensor, which no option of these functions does.
    """
    signature = inspect.signature(function)
    arrange = _as_pair if "data" in signature.parameters else _as_two

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = arrange(signature, args, kwargs)
        return function(*args, **kwargs)

    return cast("F", wrapper)


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _as_pair(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    by_name = "y" in kwargs
    if not by_name and (len(args) <= THIRD or not tensors_in(args[THIRD])):
        return args, kwargs
    rest = dict(kwargs)
    x = args[THIRD - 1] if len(args) >= THIRD else rest.pop("x", rest.pop("data", None))
    if isinstance(x, DataLoader):
        raise TypeError("y: the data are a DataLoader, which gives x and y: leave y out")
    y = rest.pop("y") if by_name else args[THIRD]
    others = args[THIRD:] if by_name else args[THIRD + 1 :]
    if len(args) < THIRD:
        return args, {**rest, "data": (x, y)}
    return (*args[: THIRD - 1], (x, y), *others), rest


def _as_two(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    if "y" in kwargs or (len(args) > THIRD and tensors_in(args[THIRD])):
        return args, kwargs
    try:
        given = signature.bind(*args, **kwargs).arguments
        if not isinstance(given["y"], Injection):
            return args, kwargs
    except TypeError:
        pass
    by_name = len(args) < THIRD
    if by_name and "x" not in kwargs:
        return args, kwargs  # the call says what is missing
    pair = kwargs["x"] if by_name else args[THIRD - 1]
    if not isinstance(pair, tuple | list) or len(pair) != 2 or any(isinstance(x, tuple | list) for x in pair[1:]):
        raise TypeError(f"y: it is missing, and x is no pair (x, y) but {kind_of(pair)}; pass x and y, of one batch")
    if by_name:
        return args, {**kwargs, "x": pair[0], "y": pair[1]}
    return (*args[: THIRD - 1], *pair, *args[THIRD:]), kwargs


def pairs(data: Any) -> Iterator[tuple[Any, Any]]:
    """The pairs (x, y) of one pair or of an iterable of pairs."""
    nested = isinstance(data, list) and all(_is_batch(entry) for entry in data)
    if isinstance(data, tuple | list) and len(data) == 2 and not nested:
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


def _is_batch(entry: Any) -> bool:
    """Whether an entry of a list of two is a batch of its own, not x or y: a pair, or a dict with labels."""
    return isinstance(entry, tuple | list) and len(entry) == 2 or isinstance(entry, Mapping) and bool(_target_of(entry))


def require_pairs(data: Any) -> None:
    """Refuse what is neither a pair nor an iterable of pairs, without iterating.

    Raises:
        TypeError: a tensor, a mapping, a string, or nothing iterable.
    """
    if isinstance(data, Tensor | Mapping | str) or not isinstance(data, Iterable):
        raise TypeError(
            f"data: expected a pair (x, y) or an iterable of pairs (a DataLoader), found {kind_of(data)}{recipe(data)}"
        )


def _target_of(batch: Mapping[Any, Any]) -> str | None:
    return next((key for key in ("labels", "label", "targets", "target", "y") if key in batch), None)


def recipe(found: Any) -> str:
    """How to make pairs of what a data set of dicts gives."""
    if not isinstance(found, Mapping):
        return ""
    key = _target_of(found) or "labels"
    return f"; of batches that are dicts: [(batch, batch.pop({key!r})) for batch in loader]"


def kind_of(found: Any) -> str:
    """Its type, and of a container its size, for messages."""
    size = f" of {len(found)}" if isinstance(found, tuple | list | dict) else ""
    if isinstance(found, np.ndarray):
        return "a numpy.ndarray: pass torch.as_tensor(...) of it"
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


def require_same(path: Path, known: Mapping[str, Any], about: Mapping[str, Any], *but: str) -> None:
    """Raise ValueError where a file was begun with something else; `but` names what may differ."""
    for key in dict.fromkeys([*known, *about]):
        before, now = known.get(key), about.get(key)
        if key in but or before == now:
            continue
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
            raise ValueError(f"{key}: {', '.join(names[:5])} changed since {path} was begun; take another file")
        raise ValueError(f"{key}: {now}, but {path} was begun with {before}; take another file")


def require_order(data: Any, name: str = "data") -> None:
    """Refuse a DataLoader that gives its samples in an order that nobody knows afterwards.

    Args:
        name: of the argument.

    Raises:
        ValueError: its sampler, or that of its batches, or what that wraps, is one of torch's that draw random numbers,
            holds a generator, has a true ``shuffle``, or gives other indices the second time.
    """
    if not isinstance(data, DataLoader):
        return
    found = next(filter(_is_random, _samplers(data)), None)
    if found is not None:
        raise ValueError(
            f"{name}: the DataLoader shuffles (its sampler is a {type(found).__name__}), so that nobody would know "
            f"which sample a result belongs to, and a later pass would not find the same samples; "
            f"make one with shuffle=False: DataLoader(loader.dataset, batch_size=...)"
        )


def _samplers(data: DataLoader) -> Iterator[Any]:
    """Those that decide the order, from the outermost to what it wraps."""
    seen: list[Any] = []
    todo = [data.batch_sampler, data.sampler]
    while todo:
        one = todo.pop(0)
        if one is None or any(one is other for other in seen):
            continue
        seen.append(one)
        yield one
        own = list(vars(one).values()) if hasattr(one, "__dict__") else []
        todo += [x for x in own if isinstance(x, Sampler)]


def _is_random(sampler: Any) -> bool:
    if isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler) or getattr(
        sampler, "shuffle", False
    ):
        return True
    sources = torch.Generator, random.Random, np.random.Generator, np.random.RandomState
    if any(isinstance(x, sources) for x in getattr(sampler, "__dict__", {}).values()):
        return True
    return not type(sampler).__module__.startswith("torch.") and _changes(sampler)


def _changes(sampler: Any) -> bool:
    """Whether a copy of it gives other indices the second time, of the first of them."""
    if isinstance(sampler, Iterator):
        return False
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        own = copy.copy(sampler)
        first, second = (list(itertools.islice(own, COMPARED)) for _ in range(2))
        return first != second
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
