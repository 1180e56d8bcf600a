"""The data of a call as one pair ``(x, y)`` or as two arguments, whichever form a function declares."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from torch.utils.data import DataLoader

from curvature.gradients.data import kind_of
from curvature.losses import Injection
from curvature.recording import tensors_in

F = TypeVar("F", bound=Callable[..., Any])
THIRD = 3  # model, loss, and x or data come before y


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
