"""What Python code may read, and whether it is still the same.

A walk goes from some objects to all that their code can reach: attributes, containers, closures, default arguments, and
the globals that functions name. Whatever the walk does not know for certain (a module of the user's, an object that is
not made by a Python class, a file) ends it: then nobody can tell whether it has changed.
"""

from __future__ import annotations

import builtins
import dis
import enum
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

# Packages whose functions depend on nothing but their arguments and, in torch, on its settings.
PURE = {"_thread", "abc", "builtins", "collections", "contextlib", "dataclasses", "enum", "functools", "itertools"}
PURE |= {"math", "numbers", "operator", "types", "typing", "typing_extensions", "warnings"}
OURS = {"curvature", "optimizers"}
PURE |= {"torch", *OURS}
IMPURE_BUILTINS = {"__import__", "breakpoint", "compile", "eval", "exec", "globals", "input", "open"}
NUMBERS = {int, bool, str, bytes, type(None), type(...), type(NotImplemented), range, slice}
NUMBERS |= {torch.dtype, torch.device, torch.layout, torch.memory_format}
CONTAINERS = {dict, list, tuple, set, frozenset, OrderedDict, torch.Size}
WAYS: dict[str, Any] = {
    "tensor": Tensor,
    "class": type,
    "function": (FunctionType, MethodType, partial, staticmethod, classmethod, property, cached_property),
    "pure": (ModuleType, BuiltinFunctionType, MethodDescriptorType),
    "member": enum.Enum,
    "reference": weakref.ref,
    "container": (dict, list, tuple, set, frozenset),
}
READS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
PLAIN_SIZE = type("Plain", (), {}).__basicsize__  # of instances of a class without slots, and without a part in C
MISSING = object()


class Unknown(Exception):
    """Something that may change unseen."""


class Walk:
    """What was found from some objects: `values` to compare, and `tensors`, of which `values` has the form alone."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self.values: list[Any] = []
        self.tensors: list[Tensor] = []
        self.numbers: dict[int, int] = {}  # by id
        self.met: list[Any] = []  # holds them, so that no other object gets the id of one
        self.to(*roots)

    def to(self, *objects: Any) -> None:
        """Go on to objects.

        Raises:
            Unknown: nobody can tell what one of them may read.
        """
        values, numbers = self.values, self.numbers
        for x in objects:
            kind = type(x)
            if kind in NUMBERS:
                values += kind, x
            elif kind in CONTAINERS and not x:  # a module has a dozen of them
                values.append(kind)
            elif kind is float:
                values.append(x.hex())  # nan is itself, and -0 is not 0
            elif id(x) in numbers:
                values.append(numbers[id(x)])
            else:
                numbers[id(x)] = len(self.met)
                self.met.append(x)
                self._into(x)

    def _into(self, x: Any) -> None:
        kind: Any = type(x)
        way = _way(kind)
        if way == "object":
            self._object(x)
        elif way == "tensor":
            self._tensor(x)
        elif way == "container":
            self.values += type(x), len(x)
            self.to(*x, *(x.values() if isinstance(x, dict) else ()))
            if type(x) not in CONTAINERS:
                self._object(x)
        elif way == "class":
            self._class(x)
        elif way == "function":
            self._function(x)
        elif way == "pure":
            self._same_pure(x)
        elif way == "member":
            self.values.append(id(x))
        elif way == "reference":
            self.to(x())
        else:
            raise Unknown(x)

    def _tensor(self, t: Tensor) -> None:
        is_usual = type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided and not t.is_meta
        is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(t)  # `vmap` leaves some in recurrent layers
        if not is_usual or is_wrapped or t.is_inference() or t.is_conj() or t.is_neg():
            raise Unknown(t)
        self.tensors.append(t)
        self.values += type(t), t.shape, t.stride(), t.dtype, t.device, t.requires_grad

    def _same_pure(self, x: Any) -> None:
        """Itself, known by who it is."""
        owner = x
        if not isinstance(x, ModuleType):
            owner = x.__objclass__ if isinstance(x, MethodDescriptorType) else x.__self__
        if isinstance(owner, ModuleType):
            is_pure = _is_pure(owner.__name__)
        elif isinstance(owner, type):
            is_pure = _is_pure(owner.__module__)
        else:
            is_pure = owner is None and _is_pure(x.__module__)
        if not is_pure or (owner is builtins and x.__name__ in IMPURE_BUILTINS):
            raise Unknown(x)
        parts = list(vars(x).values()) if isinstance(x, ModuleType) else []
        self.met.append(parts)
        self.values += id(x), list(map(id, parts))

    def _class(self, x: type) -> None:
        self.values.append(id(x))
        for base in x.__mro__:
            if _is_pure(base.__module__) and not issubclass(base, nn.Module):
                continue
            if _is_pure(base.__module__):
                self.to(*(vars(base).get(name) for name in ("forward", "__call__", "_call_impl")))
                continue
            self.to(type(base))
            for name, value in vars(base).items():
                is_data = name.startswith("__") and not isinstance(value, WAYS["function"])
                if not is_data and name not in ("_abc_impl", "_backward_cls"):
                    self.values.append(name)
                    self.to(value)

    def _function(self, x: Any) -> None:
        self.values.append(type(x))
        if isinstance(x, FunctionType):
            self._python_function(x)
        elif isinstance(x, partial):
            self.to(x.func, x.args, x.keywords)
        elif isinstance(x, property):
            self.to(x.fget, x.fset)
        elif isinstance(x, cached_property):
            self.to(x.func)
        else:
            self.to(x.__func__, getattr(x, "__self__", None))

    def _python_function(self, x: FunctionType) -> None:
        self.values.append(x.__code__)
        self.to(x.__defaults__, x.__kwdefaults__)
        for cell in x.__closure__ or ():
            try:
                self.to(cell.cell_contents)
            except ValueError:  # not assigned yet
                self.values.append(MISSING)
        if _is_pure(x.__module__) and _is_pure(x.__globals__.get("__name__")):
            return  # neither made by `exec`, nor given the name of another that it wraps
        self.to(vars(x))
        for name in _globals_of(x.__code__):
            found = x.__globals__.get(name, getattr(builtins, name, MISSING))
            self.values.append(name)
            self.values.append(MISSING) if found is MISSING else self.to(found)

    def _object(self, x: Any) -> None:
        kind, own = type(x), getattr(x, "__dict__", {})
        self.values.append(id(x))
        self.to(kind)
        if isinstance(x, nn.Module) or kind.__module__.partition(".")[0] not in OURS:
            self.values.append(tuple(own))
            self.to(*own.values())


@lru_cache(1024)
def _way(kind: Any) -> str:
    """How to go on from objects of a class."""
    for name, classes in WAYS.items():
        if issubclass(kind, classes):
            return name
    return "object" if kind is object or (kind.__basicsize__ == PLAIN_SIZE and not kind.__itemsize__) else "unknown"


@lru_cache(1024)
def _globals_of(code: CodeType) -> list[str]:
    """The names of all globals that a function reads, and the functions inside it."""
    names = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in READS:
            names.append(instruction.argval)
        if instruction.opname == "IMPORT_NAME" and not _is_pure(instruction.argval):
            names.append("__import__")
    inner = [name for part in code.co_consts if isinstance(part, CodeType) for name in _globals_of(part)]
    return list(dict.fromkeys([*names, *inner]))


def _is_pure(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in PURE


@dataclass
class Snapshot:
    """What objects and all that they reach were like.

    Attributes:
        walk: from these objects.
        own: the bits of the tensors.
        places: of their values in memory, which graphs share, and the version, of which autograd refuses others.
        copies: of these bits.
    """

    walk: Walk
    own: list[Tensor]
    places: list[tuple[int, int]]
    copies: list[Tensor]

    @classmethod
    def of(cls, *roots: Any) -> Snapshot | None:
        """None if something may change unseen."""
        walk = _walk(roots)
        if walk is None:
            return None
        own = [_bits(t) for t in walk.tensors]
        return cls(walk, own, _places(walk.tensors), [bits.clone() for bits in own])

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for t in self.copies)

    def is_of(self, *roots: Any) -> bool:
        """Whether these are the same, bit by bit, and the tensors that it was made of are as they were."""
        new, old = _walk(roots), self.walk
        if new is None or new.values != old.values or _places(old.tensors) != self.places:
            return False
        known = zip(new.tensors, old.tensors, self.copies, strict=True)
        others = [(_bits(t), copy) for t, own, copy in known if t is not own]
        return _are_equal([*zip(self.own, self.copies, strict=True), *others])


def _walk(roots: Iterable[Any]) -> Walk | None:
    try:
        return Walk(roots)
    except (Unknown, RecursionError):
        return None


def _places(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    return [(t.data_ptr(), t._version) for t in tensors]


def _are_equal(pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    differ: list[Tensor] = []
    for a, b in pairs:
        if a.shape != b.shape:  # the memory of one has not the alignment of the other
            a, b = a.view(torch.uint8).view(-1), b.view(torch.uint8).view(-1)
        if a.device.type != "cpu":
            differ.append((a != b).any())
        elif not torch.equal(a, b):
            return False
    together = [flag.to(differ[0].device, non_blocking=True) for flag in differ]
    return not together or not bool(torch.stack(together).any())  # one wait


@torch.no_grad()
def _bits(t: Tensor) -> Tensor:
    """As integers, in the same memory: nan is itself, and -0 is not 0."""
    t = torch.view_as_real(t.detach()) if t.is_complex() else t.detach()
    if t.is_contiguous() and t.data_ptr() % 8 == 0 and t.numel() * t.itemsize % 8 == 0:
        return t.view(-1).view(torch.int64)
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.itemsize])
