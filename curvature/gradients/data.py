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
    (model, loss, data, ...) x and y in place of data, y by position (no option holds a tensor) or by name."""
    signature = inspect.signature(function)
    takes_data = "data" in signature.parameters

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        has_y = "y" in kwargs or (len(args) > THIRD and bool(tensors_in(args[THIRD])))
        if takes_data and has_y:
            args = _with_pair(args, kwargs)
        elif not (takes_data or has_y):
            args = _with_two(signature, args, kwargs)
        return function(*args, **kwargs)

    return cast("F", wrapper)


def _with_pair(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The positional arguments with the pair in place of x and y; what is given by name changes in place."""
    others = args[THIRD:] if "y" in kwargs else args[THIRD + 1 :]
    y = kwargs.pop("y") if "y" in kwargs else args[THIRD]
    x = args[THIRD - 1] if len(args) >= THIRD else kwargs.pop("x", kwargs.pop("data", None))
    if isinstance(x, DataLoader):
        raise TypeError("y: the data are a DataLoader, which gives x and y: leave y out")
    if len(args) >= THIRD:
        return (*args[: THIRD - 1], (x, y), *others)
    kwargs["data"] = x, y
    return args


def _with_two(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The same with x and y in place of the pair."""
    try:
        if not isinstance(signature.bind(*args, **kwargs).arguments["y"], Injection):
            return args
    except TypeError:
        if len(args) < THIRD and "x" not in kwargs:
            return args  # the call says what is missing
    pair = args[THIRD - 1] if len(args) >= THIRD else kwargs["x"]
    if not isinstance(pair, tuple | list) or len(pair) != 2 or isinstance(pair[1], tuple | list):
        raise TypeError(f"y: it is missing, and x is no pair (x, y) but {kind_of(pair)}; pass x and y, of one batch")
    if len(args) >= THIRD:
        return (*args[: THIRD - 1], *pair, *args[THIRD:])
    kwargs["x"], kwargs["y"] = pair
    return args


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
    """Refuse what is neither a pair nor an iterable of pairs (TypeError), without iterating."""
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
    """Refuse a DataLoader, the argument of this name, whose samples come in an order that nobody knows afterwards."""
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
    found = [one for one in (data.batch_sampler, data.sampler) if one is not None]
    for one in found:  # which grows
        yield one
        held = [x for x in getattr(one, "__dict__", {}).values() if isinstance(x, Sampler)]
        found += [x for x in held if all(x is not other for other in found)]


def _is_random(sampler: Any) -> bool:
    """Whether it draws, holds a generator, has a true ``shuffle``, or gives other indices the second time."""
    drawing = RandomSampler, SubsetRandomSampler, WeightedRandomSampler
    sources = torch.Generator, random.Random, np.random.Generator, np.random.RandomState
    held = getattr(sampler, "__dict__", {}).values()
    if isinstance(sampler, drawing) or getattr(sampler, "shuffle", False) or any(isinstance(x, sources) for x in held):
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
