"""Tensors of all layers as one vector, in which layers of one form are rows of a matrix: a step takes few calls."""

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

from curvature.linalg import by_device
from curvature.operators import Named
from curvature.recording import is_sharded
from optimizers.distributed.sharding import any_sharded, to_local, to_sharded

Layer = tuple[str, ...]  # names of its parameters
Shapes = tuple[tuple[int, ...], ...]  # of the parameters of a layer
MOST_ENTRIES = 1 << 28  # of a vector, in one product


class Family(NamedTuple):
    """Layers of one form, each a matrix of so many rows, in which its parameters are columns; in one, all of them."""

    layers: tuple[Layer, ...]
    shapes: Shapes  # of the local shards, where parameters are sharded
    rows: int

    @property
    def size(self) -> int:
        """The number of entries of a layer."""
        return sum(map(math.prod, self.shapes))

    @property
    def places(self) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
        """Shape, strides and offset of each parameter in a layer."""
        parts = (x[0] for x in self.split(torch.empty(1, self.size, device="meta")))
        return [(x.shape, x.stride(), int(x.storage_offset())) for x in parts]

    def split(self, rows: Tensor) -> list[Tensor]:
        """For each parameter those of n layers (n, *shape), given their rows (n, d)."""
        matrices, widths = rows.view(len(rows), self.rows, -1), [math.prod(shape) // self.rows for shape in self.shapes]
        parts = zip(matrices.split_with_sizes(widths, 2), self.shapes, strict=True)
        return [part.reshape(len(rows), *shape) for part, shape in parts]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of `split`, flat."""
        return torch.cat([part.reshape(len(part) * self.rows, -1) for part in parts], 1).view(-1)


@dataclass(frozen=True, eq=False)
class Layout:
    """Where tensors are in vectors, one for each run of families that share device, precision and kind."""

    runs: tuple[tuple[Family, ...], ...]
    home: torch.device  # where the numbers of a step are, if layers are on several devices
    whole: Mapping[str, Layer]  # by name the layer that was asked for, of which those of the layout may be parts

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
    def owners(self) -> list[Layer]:
        """For each layer what it is a part of; empty if all are whole."""
        owners = [self.whole.get(layer[0], layer) for layer in self.layers]
        return owners if len(set(owners)) < len(owners) else []

    @functools.cached_property
    def names_by_run(self) -> list[list[str]]:
        """What holds for the first of a run holds for all."""
        return [[name for family in run for layer in family.layers for name in layer] for run in self.runs]

    @functools.cached_property
    def places(self) -> list[list[tuple[tuple[int, ...], tuple[int, ...], int]]]:
        """Of each run: shape, strides and offset of its tensors."""
        of_runs = []
        for run, sizes in zip(self.runs, self.sizes, strict=True):
            each = [family.places for family in run for _ in family.layers]
            starts = itertools.accumulate(sizes, initial=0)
            both = [(start, place) for start, places in zip(starts, each, strict=False) for place in places]
            of_runs.append([(shape, strides, start + offset) for start, (shape, strides, offset) in both])
        return of_runs

    @functools.cached_property
    def sizes(self) -> list[list[int]]:
        """Of each run: the sizes of its layers."""
        return [[family.size for family in run for _ in family.layers] for run in self.runs]

    @functools.cached_property
    def rows(self) -> list[tuple[list[int], list[int]]]:
        """Of each run: the sizes of its families, and their numbers of layers."""
        counts = [[len(family.layers) for family in run] for run in self.runs]
        sizes = [[len(family.layers) * family.size for family in run] for run in self.runs]
        return list(zip(sizes, counts, strict=True))


class LayerVector(Mapping[str, Tensor]):
    """Tensors by name, as views of flat vectors for each run. It alone knows of devices and precisions."""

    def __init__(self, layout: Layout, vectors: Sequence[Tensor]) -> None:
        self.layout, self.vectors = layout, list(vectors)

    @staticmethod
    def of(layout: Layout, tensors: Named) -> LayerVector:
        """Copies of tensors."""
        sizes = map(sum, layout.sizes)
        each = [tensors[names[0]].new_empty(size) for names, size in zip(layout.names_by_run, sizes, strict=True)]
        copy = LayerVector(layout, each)
        for names in layout.names_by_run:
            torch._foreach_copy_([copy.views[name] for name in names], [tensors[name] for name in names])
        return copy

    @functools.cached_property
    def views(self) -> dict[str, Tensor]:
        names, views = iter(self.layout.names), {}
        for vector, places in zip(self.vectors, self.layout.places, strict=True):
            for shape, strides, offset in places:
                views[next(names)] = vector.as_strided(shape, strides, offset)
        return views

    @functools.cached_property
    def layers(self) -> list[Tensor]:
        """The entries (d,) of each layer, as they are in memory."""
        both = zip(self.vectors, self.layout.sizes, strict=True)
        return [x for vector, sizes in both for x in vector.split_with_sizes(sizes)]

    @functools.cached_property
    def rows(self) -> list[Tensor]:
        """For each family, one row (n, d) for each layer."""
        rows = []
        for vector, (sizes, counts) in zip(self.vectors, self.layout.rows, strict=True):
            for x, count in zip(vector.split_with_sizes(sizes), counts, strict=True):
                rows.append(x.view(count, -1))
        return rows

    def __getitem__(self, name: str) -> Tensor:
        return self.views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.names)

    def __len__(self) -> int:
        return len(self.layout.names)

    def mixed(self, other: LayerVector, shares: Sequence[float]) -> LayerVector:
        """``self + share (other - self)``, with a share for each run."""
        each = zip(self.vectors, other.vectors, shares, strict=True)
        return LayerVector(self.layout, [torch.lerp(x, y, share) for x, y, share in each])

    def mix_(self, other: LayerVector, shares: Sequence[float]) -> None:
        """The same in place."""
        for x, y, share in zip(self.vectors, other.vectors, shares, strict=True):
            x.lerp_(y, share)

    def dot(self, other: LayerVector) -> list[Tensor]:
        """The inner product of each run, a scalar where it is, in single precision at least."""
        return list(map(inner, self.vectors, other.vectors))

    def layer_dots(self, other: LayerVector) -> list[Tensor]:
        """The inner products of layers, (n,) for each family."""
        return [
            inner(x, y).view(1) if len(x) == 1 else torch.linalg.vecdot(*_wide(x, y))  # the latter writes all products
            for x, y in zip(self.rows, other.rows, strict=True)
        ]

    def multiply_(self, factor: float) -> None:
        for x in self.vectors:
            x.mul_(factor)

    def multiply_layers_(self, factors: Sequence[float]) -> None:
        """Multiply each layer by a number; by zero it is zero, whatever it was."""
        for x, factor in zip(self.layers, factors, strict=True):
            if not factor:
                x.zero_()
        left = iter(factors)
        for some in by_device(self.layers):
            torch._foreach_mul_(some, [next(left) for _ in some])


def of_states(
    layout: Layout, key: str, states: Mapping[str, dict[str, Any]], trained: Named, kept: LayerVector | None
) -> LayerVector:
    """Entries of the states of parameters, zeros where there are none.

    They are `kept`, of the last step, unless a user, a checkpoint or another layout has replaced it.
    """
    known = [states[name].get(key) for name in layout.names]
    if kept is not None and kept.layout is layout:
        views = kept.views.values()
        if all(map(operator.is_, known, views)) or all(map(_is_view, known, views)):
            return kept
    parameters = [trained[name] for name in layout.names]
    # a parameter that has grown has no state any more
    each = zip(known, parameters, strict=True)
    entries = [to_local(torch.zeros_like(p) if x is None or x.shape != p.shape else x) for x, p in each]
    return LayerVector.of(layout, dict(zip(layout.names, entries, strict=True)))


def to_states(vector: LayerVector, key: str, states: Mapping[str, dict[str, Any]], trained: Named) -> None:
    """Put a vector in the states of its parameters."""
    is_spread = any_sharded(trained.values())
    for name, view in vector.views.items():
        states[name][key] = to_sharded(view, trained[name]) if is_spread else view


def _is_view(known: Any, view: Tensor) -> bool:
    return known is view or (known is not None and is_sharded(known) and known.to_local().data_ptr() == view.data_ptr())


def layout_of(layers: Iterable[Layer], tensors: Named, kind: Callable[[str], Hashable]) -> Layout:
    """Tensors of one `kind`, precision and device are in one vector, layers of one form next to each other.

    What is in none of the layers is one of its own.
    """
    kinds: dict[Hashable, int] = {}  # numbered, for a layout that stays the same while all rates change
    number = kinds.setdefault
    forms = [(name, x.shape, (x.device, x.dtype, number(kind(name), len(kinds)))) for name, x in tensors.items()]
    return _layout(tuple(layers), tuple(forms))


@functools.lru_cache(maxsize=64)
def _layout(layers: tuple[Layer, ...], forms: tuple[tuple[str, tuple[int, ...], tuple[Any, ...]], ...]) -> Layout:
    """The layout of tensors, given name, shape and kind of each; those of different kinds are apart."""
    named = {form[0]: form for form in forms}
    parts = [tuple(name for name in layer if name in named) for layer in layers]
    layer_of = {name: layer for layer in parts for name in layer}
    forms_of: dict[Any, dict[Shapes, list[Layer]]] = {}
    for layer in dict.fromkeys(layer_of.get(name, (name,)) for name in named):
        for kind, alike in itertools.groupby((named[name] for name in layer), operator.itemgetter(2)):
            names, shapes, _ = zip(*alike, strict=True)
            forms_of.setdefault(kind, {}).setdefault(shapes, []).append(names)
    family = lambda shapes, layers, device: Family(tuple(layers), shapes, _rows(shapes, device))
    runs = {kind: tuple(family(*form, kind[0]) for form in of.items()) for kind, of in forms_of.items()}
    devices = list(dict.fromkeys(device for device, _, _ in runs))
    home = devices[0] if devices else torch.device("cpu")
    ordered = sorted(runs, key=lambda kind: devices.index(kind[0]))
    return Layout(tuple(runs[kind] for kind in ordered), home, layer_of)


def _rows(shapes: Shapes, device: torch.device) -> int:
    """One for each entry of a bias, beside the row of its weight: so a layer is solved for without a copy."""
    # on an accelerator calls cost more than copies, and tensors with gaps take one each
    if device.type != "cpu" or len(shapes) != 2:
        return 1
    rows = math.prod(shapes[1])
    return rows if rows in itertools.accumulate(shapes[0], operator.mul) else 1


def joined(numbers: Sequence[Tensor], home: torch.device) -> Tensor:
    """Numbers (n,) or () one after the other, on one device."""
    return torch.hstack([x if x.device == home else x.to(home) for x in numbers])


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each tensor, in single precision at least, in one call for each device."""
    dtype = at_least_single(tensors)
    return [x for some in by_device(tensors) for x in torch._foreach_norm(some, 2, dtype)]


def inner(one: Tensor, other: Tensor) -> Tensor:
    """The product of tensors of one shape, in single precision at least, in parts: BLAS counts to 2^31 entries."""
    one, other = one.flatten(), other.flatten()
    if one.numel() <= MOST_ENTRIES:
        return torch.dot(*_wide(one, other))
    parts = zip(one.split(MOST_ENTRIES), other.split(MOST_ENTRIES), strict=True)
    return torch.stack([torch.dot(*_wide(*pair)) for pair in parts]).sum()


def _wide(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if one.dtype == torch.float64 else torch.float32
    return (one, other) if one.dtype == other.dtype == dtype else (one.to(dtype), other.to(dtype))


def at_least_single(tensors: Iterable[Tensor]) -> torch.dtype:
    """The precision to sum in."""
    return torch.float64 if torch.float64 in {x.dtype for x in tensors} else torch.float32
