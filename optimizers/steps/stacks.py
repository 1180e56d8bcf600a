"""Tensors of many layers as one vector, in which layers of one form are rows of a matrix: a step takes few calls."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimizers.distributed.sharding import to_local, to_sharded

Named = Mapping[str, Tensor]
Layer = tuple[str, ...]  # names of its parameters
Shapes = tuple[tuple[int, ...], ...]  # of the parameters of a layer
MOST_ENTRIES = 1 << 28  # of a vector, in one product


class Family(NamedTuple):
    """Layers of one form.

    Attributes:
        layers: the names of their parameters.
        shapes: of the parameters of a layer; of their local shards, where they are sharded.
    """

    layers: tuple[Layer, ...]
    shapes: Shapes


class Form(NamedTuple):
    """What is to be known of a `Family` to find its layers in a vector.

    Attributes:
        layers: how many there are.
        shapes: of the parameters of each.
        sizes: numbers of their entries.
    """

    layers: int
    shapes: Shapes
    sizes: tuple[int, ...]

    @staticmethod
    def of(layers: int, shapes: Shapes) -> Form:
        return Form(layers, shapes, tuple(map(math.prod, shapes)))


@dataclass(frozen=True, eq=False)
class Layout:
    """Where tensors are in vectors, one for each run of families that share device, precision and kind.

    Attributes:
        runs: the families in each vector, one after the other, layer by layer.
    """

    runs: tuple[tuple[Family, ...], ...]

    @functools.cached_property
    def families(self) -> list[Family]:
        return [family for run in self.runs for family in run]

    @functools.cached_property
    def layers(self) -> list[Layer]:
        """In the order of all rows."""
        return [layer for family in self.families for layer in family.layers]

    @functools.cached_property
    def names(self) -> list[str]:
        return [name for layer in self.layers for name in layer]

    @functools.cached_property
    def first_layers(self) -> list[Layer]:
        """Of each run: what holds for it holds for all."""
        return [run[0].layers[0] for run in self.runs]

    @functools.cached_property
    def forms(self) -> list[list[Form]]:
        """Of each run."""
        return [[Form.of(len(family.layers), family.shapes) for family in run] for run in self.runs]

    @functools.cached_property
    def names_by_run(self) -> list[list[str]]:
        return [[name for family in run for layer in family.layers for name in layer] for run in self.runs]

    def vectors(self, tensors: Named) -> list[Tensor]:
        """The tensors one after the other, copied."""
        return [torch.cat([tensors[name].reshape(-1) for name in names]) for names in self.names_by_run]

    def views(self, vectors: Sequence[Tensor]) -> dict[str, Tensor]:
        """The tensors that vectors hold, in their memory."""
        found = (x for pair in zip(vectors, self.forms, strict=True) for x in pieces(*pair))
        return dict(zip(self.names, found, strict=True))


def pieces(vector: Tensor, forms: Sequence[Form]) -> list[Tensor]:
    """The tensors of a vector, in its memory."""
    shapes = [shape for form in forms for shape in form.shapes * form.layers]
    parts = vector.split_with_sizes([size for form in forms for size in form.sizes * form.layers])
    return [x.view(shape) for x, shape in zip(parts, shapes, strict=True)]


def rows_of(vector: Tensor, forms: Sequence[Form]) -> list[Tensor]:
    """For each form the layers of a vector as rows (n, d), in its memory."""
    parts = vector.split_with_sizes([form.layers * sum(form.sizes) for form in forms])
    return [x.view(form.layers, -1) for x, form in zip(parts, forms, strict=True)]


class Stack(Mapping[str, Tensor]):
    """Tensors by name, as views of vectors.

    Attributes:
        vectors: for each run of the layout.
    """

    def __init__(self, layout: Layout, vectors: Sequence[Tensor]) -> None:
        self.layout, self.vectors = layout, list(vectors)

    @staticmethod
    def of(layout: Layout, tensors: Named) -> Stack:
        """Copies of tensors."""
        return Stack(layout, layout.vectors(tensors))

    def like(self, tensors: Named) -> Stack:
        """Copies of other tensors of the same names."""
        return Stack.of(self.layout, tensors)

    @functools.cached_property
    def views(self) -> dict[str, Tensor]:
        return self.layout.views(self.vectors)

    @functools.cached_property
    def rows(self) -> list[Tensor]:
        """For each family, one row (n, d) for each layer."""
        return [x for pair in zip(self.vectors, self.layout.forms, strict=True) for x in rows_of(*pair)]

    def __getitem__(self, name: str) -> Tensor:
        return self.views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.names)

    def __len__(self) -> int:
        return len(self.layout.names)


class StateStack:
    """Entries of the states of parameters as a `Stack`, in one memory from step to step.

    Args:
        key: of the entries.
    """

    def __init__(self, key: str) -> None:
        self.key = key
        self.stack: Stack | None = None
        self.given: list[Any] = []  # what the states were given

    def of(self, layout: Layout, states: Mapping[str, dict[str, Any]], trained: Named) -> Stack:
        """The entries, zeros where there are none; the states refer to the memory of the stack from then on."""
        known = [states[name].get(self.key) for name in layout.names]
        if self.stack is None or self.stack.layout is not layout or any(map(operator.is_not, known, self.given)):
            own = [trained[name] for name in layout.names]
            found = [to_local(torch.zeros_like(p) if x is None else x) for x, p in zip(known, own, strict=True)]
            self.stack = Stack.of(layout, dict(zip(layout.names, found, strict=True)))
            self.given = [to_sharded(view, p) for view, p in zip(self.stack.views.values(), own, strict=True)]
            for name, given in zip(layout.names, self.given, strict=True):
                states[name][self.key] = given
        return self.stack


def layout_of(layers: Iterable[Layer], tensors: Named, kind: Callable[[str], Hashable]) -> Layout:
    """Tensors of one `kind`, precision and device are in one vector, layers of one form next to each other."""

    kinds: dict[Hashable, int] = {}  # numbered, for a layout that stays the same while all rates change

    def known(name: str) -> tuple[Hashable, ...]:
        x = tensors[name]
        return name, tuple(x.shape), (x.device, x.dtype, kinds.setdefault(kind(name), len(kinds)))

    return _layout(tuple(tuple(map(known, layer)) for layer in layers))


@functools.lru_cache(maxsize=64)
def _layout(layers: tuple[tuple[Any, ...], ...]) -> Layout:
    """The layout of layers, given name, shape and kind of each parameter; those of different kinds are apart."""
    found: dict[Any, dict[Shapes, list[Layer]]] = {}
    for whole in layers:
        for own, parts in itertools.groupby(whole, operator.itemgetter(2)):
            names, shapes, _ = zip(*parts, strict=True)
            found.setdefault(own, {}).setdefault(shapes, []).append(names)
    runs = {own: tuple(Family(tuple(layers), shapes) for shapes, layers in of.items()) for own, of in found.items()}
    devices = list(dict.fromkeys(device for device, _, _ in runs))
    return Layout(tuple(runs[own] for own in sorted(runs, key=lambda own: devices.index(own[0]))))


# -- what a step asks of rows: one number for each, on the device `home`


def row_norms(rows: Sequence[Tensor], home: torch.device) -> Tensor:
    """The norm of each row, in single precision."""
    return joined([torch.linalg.vector_norm(x, dim=1, dtype=at_least_single([x])) for x in rows], home).float()


def row_products(ones: Sequence[Tensor], others: Sequence[Tensor], home: torch.device) -> Tensor:
    """The inner product of each row of one with that of the other, in single precision."""
    found = [torch.linalg.vecdot(*_wide(*pair)) for pair in zip(ones, others, strict=True)]
    return joined(found, home).float()


def products(ones: Sequence[Tensor], others: Sequence[Tensor], home: torch.device) -> Tensor:
    """The inner products (n,) of vectors, in single precision."""
    return joined([_product(*pair)[None] for pair in zip(ones, others, strict=True)], home).float()


def _product(one: Tensor, other: Tensor) -> Tensor:
    """Of two vectors, some entries at a time: BLAS counts to 2^31, and copies in single precision are large."""
    parts = zip(one.split(MOST_ENTRIES), other.split(MOST_ENTRIES), strict=True)
    found = [torch.dot(*_wide(*pair)) for pair in parts]
    return found[0] if len(found) == 1 else torch.stack(found).sum()


def joined(numbers: Sequence[Tensor], home: torch.device) -> Tensor:
    """Numbers (n,) one after the other, on one device."""
    own = [x.to(home) for x in numbers]
    return own[0] if len(own) == 1 else torch.cat(own)


def total(numbers: Tensor) -> Tensor:
    """The sum of numbers (n,)."""
    return numbers.squeeze(0) if numbers.numel() == 1 else numbers.sum()


def _wide(one: Tensor, other: Tensor) -> list[Tensor]:
    return [x.to(at_least_single([one])) for x in (one, other)]


def at_least_single(tensors: Iterable[Tensor]) -> torch.dtype:
    """The precision to sum in."""
    return torch.float64 if torch.float64 in {x.dtype for x in tensors} else torch.float32
