"""Losses that keep something, such as a moving centre or the parts that they log: calls of ours leave no trace.

A module keeps it in its attributes. A function keeps it in variables around it (of a closure, of its file), or in the
object whose method it is: what the first call changes there is put back after every call.
"""

from __future__ import annotations

import copy
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

TORCHS = frozenset(vars(nn.Module())) - {"_buffers"}  # that no forward pass changes
CONTAINERS = list, dict, set, deque
FIXED = ModuleType, FunctionType, BuiltinFunctionType, type  # what a function reads to call it
OTHERS = "torch", "curvature"  # packages whose functions keep nothing of a loss
EMPTY = CellType()  # of a variable without a value
PLAIN = str, float, int, bool, type(None)
MOST_SETTINGS = 100
ASKED, KEEPS = ("asked what it keeps",), "keeps"
FOUND: weakref.WeakKeyDictionary[Any, dict[Any, set[Any]]] = weakref.WeakKeyDictionary()  # by the loss, its settings


def from_its_state(loss: Any) -> Any:
    """The loss as a function of (output, target): each call begins with what it keeps now, and leaves it so."""
    if _is_wrapped(loss) or not isinstance(loss, nn.Module) and _keeps_nothing(loss):
        return loss
    function: Any = partial(_call_module if isinstance(loss, nn.Module) else _call, loss)
    function.__qualname__ = getattr(loss, "__qualname__", type(loss).__qualname__)
    if hasattr(loss, "reduction"):
        function.reduction = loss.reduction
    return function


def found_of(loss: Any) -> set[Any]:
    """What was found of a loss, as long as it exists: to read and to add to; forgotten if it has no weak references."""
    own: Any = loss.args[0] if _is_wrapped(loss) else loss
    settings: tuple[Any, ...] = ()
    if isinstance(own, MethodType):
        settings, own = (own.__func__,), own.__self__
    elif isinstance(own, nn.Module):
        settings = tuple((name, value) for name, value in vars(own).items() if isinstance(value, PLAIN))
    try:
        found = FOUND.setdefault(own, {})
    except TypeError:  # or no hash
        return set()
    if len(found) >= MOST_SETTINGS:  # an attribute that counts, say
        found.clear()
    return found.setdefault(settings, set())


def _is_wrapped(loss: Any) -> bool:
    return isinstance(loss, partial) and loss.func in (_call, _call_module)


def _keeps_nothing(function: Any) -> bool:
    found = found_of(function)
    if ASKED not in found and next(_places(function, set()), None) is None:
        found.add(ASKED)
    return ASKED in found and not _kept(found)


def _kept(found: set[Any]) -> set[str]:
    """Names of the variables that the first call has changed."""
    return {key[1] for key in found if key[0] == KEEPS}


def _call_module(loss: nn.Module, output: Any, target: Any) -> Any:
    """Meanwhile the modules have copies, which the graph may hold."""
    kept = [(vars(module), dict(vars(module))) for module in loss.modules()]
    try:
        for own, before in kept:
            own.update({name: _copied(value) for name, value in before.items() if name not in TORCHS})
        return loss(output, target)
    finally:
        for own, before in kept:
            for name in own.keys() - before.keys():
                del own[name]
            own.update(before)


def _call(loss: Any, output: Any, target: Any) -> Any:
    """Meanwhile the variables that it changes have copies; at the first call, all that it reads."""
    found = found_of(loss)
    kept, is_first = _kept(found), ASKED not in found
    if not is_first and not kept:
        return loss(output, target)
    places = list(_places(loss, set()))
    # attributes of objects: not cells, nor the variables of a file, to which warnings add some
    holders = (place.holder for place in places if place.is_entry and "__builtins__" not in place.holder)
    objects = {id(own): (own, set(own)) for own in holders}
    before = [(place, place.value) for place in places if is_first or place.name in kept]
    copies = [_copied(value) for _, value in before]
    parts = [_parts(own) for own in copies]
    try:
        for (place, value), own in zip(before, copies, strict=True):
            if own is not value:
                place.put(own)
        result = loss(output, target)
        found.add(ASKED)
        return result
    finally:
        for (place, value), own in zip(before, parts, strict=True):
            now = _parts(place.value)
            if len(own) != len(now) or not all(a is b and m == n for (a, m), (b, n) in zip(own, now, strict=True)):
                found.add((KEEPS, place.name))
            if place.value is not value:
                place.put(value)
        for attributes, names in objects.values():
            for name in attributes.keys() - names:
                found.add((KEEPS, name))
                del attributes[name]


@dataclass(frozen=True)
class Place:
    """A variable: an entry of a namespace, or a cell of a closure under this name."""

    holder: Any
    name: str

    @property
    def is_entry(self) -> bool:
        return isinstance(self.holder, dict)

    @property
    def value(self) -> Any:
        return self.holder.get(self.name) if self.is_entry else self.holder.cell_contents

    def put(self, value: Any) -> None:
        if self.is_entry:
            self.holder[self.name] = value
        else:
            self.holder.cell_contents = value


def _places(loss: Any, seen: set[int]) -> Iterator[Place]:
    """The variables in which a function, or the object whose method it is, may keep something."""
    if id(loss) in seen or _is_wrapped(loss):
        return
    seen.add(id(loss))
    if isinstance(loss, partial):
        yield from _places(loss.func, seen)
    elif isinstance(loss, MethodType):
        yield from _places(loss.__func__, seen)
        yield from _attributes(loss.__self__)
    elif not isinstance(loss, FunctionType):
        yield from _places(type(loss).__call__, seen)
        yield from _attributes(loss)
    else:
        names, cells = _names(loss.__code__), zip(loss.__code__.co_freevars, loss.__closure__ or (), strict=True)
        around = [Place(cell, name) for name, cell in cells if cell != EMPTY]
        package = str(loss.__globals__.get("__name__", "")).partition(".")[0]
        around += [Place(loss.__globals__, name) for name in names if name in loss.__globals__]
        for place in around:
            value, is_global = place.value, place.is_entry
            if package not in OTHERS and not isinstance(value, FIXED):
                yield place
            if isinstance(value, FunctionType | partial | MethodType):
                if not is_global or getattr(value, "__globals__", None) is loss.__globals__:
                    yield from _places(value, seen)
            elif isinstance(value, nn.Module) and not any(p.requires_grad for p in value.parameters()):
                yield from _attributes(value)


def _attributes(holder: Any) -> Iterator[Place]:
    modules = holder.modules() if isinstance(holder, nn.Module) else [holder]
    skipped = TORCHS if isinstance(holder, nn.Module) else ()
    for own in (getattr(module, "__dict__", None) for module in modules):
        if isinstance(own, dict):
            yield from (Place(own, name) for name in own if name not in skipped)


def _names(code: CodeType) -> set[str]:
    """The names that a function reads or writes, and those of the functions in it."""
    inner = [_names(own) for own in code.co_consts if isinstance(own, CodeType)]
    return set(code.co_names).union(*inner)


def _copied(value: Any) -> Any:
    """A copy of tensors and containers, also of those in dicts; everything else as it is."""
    if isinstance(value, Tensor):
        return value.clone()
    if not isinstance(value, CONTAINERS):
        return value
    found = copy.copy(value)
    if isinstance(found, dict):
        for key, own in found.items():
            found[key] = _copied(own)
    return found


def _parts(value: Any) -> list[tuple[Any, int]]:
    """What is replaced, grows, or has another version where something is changed."""
    if isinstance(value, Tensor):
        return [(value, 0 if value.is_inference() else value._version)]
    if isinstance(value, dict):
        return [(value, len(value)), *(part for own in value.values() for part in _parts(own))]
    return [(value, len(value)), *((own, 0) for own in value)] if isinstance(value, CONTAINERS) else [(value, 0)]
