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

from curvature.linalg import by_device, widen
from curvature.operators import Named
from curvature.recording import is_sharded
from optimizers.distributed.sharding import to_local, to_sharded

Layer = tuple[str, ...]  # names of its parameters
Shapes = tuple[tuple[int, ...], ...]  # of the parameters of a layer
MOST_ENTRIES = 1 << 28  # of a vector, in one product


class Family(NamedTuple):
    """Layers of one form."""

    layers: tuple[Layer, ...]
    shapes: Shapes  # of the local shards, where parameters are sharded
    sizes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Layout:
    """Where tensors are in vectors, one for each run of families that share device, precision and kind."""

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
    def names_by_run(self) -> list[list[str]]:
        return [[name for family in run for layer in family.layers for name in layer] for run in self.runs]


def pieces(vector: Tensor, run: Sequence[Family]) -> list[Tensor]:
    """The tensors of a vector, in its memory."""
    shapes = [shape for family in run for shape in family.shapes * len(family.layers)]
    parts = vector.split_with_sizes([size for family in run for size in family.sizes * len(family.layers)])
    return [x.view(shape) for x, shape in zip(parts, shapes, strict=True)]


def rows_of(vector: Tensor, run: Sequence[Family]) -> list[Tensor]:
    """For each family the layers of a vector as rows (n, d), in its memory."""
    parts = vector.split_with_sizes([len(family.layers) * sum(family.sizes) for family in run])
    return [x.view(len(family.layers), -1) for x, family in zip(parts, run, strict=True)]


class LayerVector(Mapping[str, Tensor]):
    """Tensors by name, as views of flat vectors for each run. It alone knows of devices and precisions."""

    def __init__(self, layout: Layout, vectors: Sequence[Tensor]) -> None:
        self.layout, self.vectors = layout, list(vectors)

    @staticmethod
    def of(layout: Layout, tensors: Named) -> LayerVector:
        """Copies of tensors."""
        whole = lambda names: torch.cat([tensors[name].reshape(-1) for name in names])
        return LayerVector(layout, list(map(whole, layout.names_by_run)))

    @functools.cached_property
    def views(self) -> dict[str, Tensor]:
        found = (x for pair in zip(self.vectors, self.layout.runs, strict=True) for x in pieces(*pair))
        return dict(zip(self.layout.names, found, strict=True))

    @functools.cached_property
    def rows(self) -> list[Tensor]:
        """For each family, one row (n, d) for each layer."""
        return [x for pair in zip(self.vectors, self.layout.runs, strict=True) for x in rows_of(*pair)]

    def __getitem__(self, name: str) -> Tensor:
        return self.views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout.names)

    def __len__(self) -> int:
        return len(self.layout.names)

    def stacked(self, family: int, layers: slice) -> list[Tensor]:
        """Tensors (n, *shape) of some layers of a family, in the memory of the vector."""
        rows, (_, shapes, sizes) = self.rows[family][layers], self.layout.families[family]
        parts = rows.split_with_sizes(sizes, 1) if len(sizes) > 1 else [rows]
        return [x.view(len(rows), *shape) for x, shape in zip(parts, shapes, strict=True)]

    def mixed(self, other: LayerVector, own: Sequence[float], others: Sequence[float], times: Tensor) -> LayerVector:
        """``own * self + others * times * other``, with numbers for each run, and `times` a scalar on any device."""
        # one pass over memory: an outer product with a vector of one entry takes a factor that is on the device
        mix = lambda x, y, a, b: torch.addr(x[:, None], y, times.to(y)[None], beta=a, alpha=b).squeeze(1)
        return LayerVector(self.layout, list(map(mix, self.vectors, other.vectors, own, others)))

    def dot(self, other: LayerVector) -> list[Tensor]:
        """The inner product of each run, a scalar where it is, in single precision at least."""
        return [inner(*pair) for pair in zip(self.vectors, other.vectors, strict=True)]

    def layer_dots(self, other: LayerVector) -> list[Tensor]:
        """The inner products of layers, (n,) for each family."""
        return [torch.linalg.vecdot(*_wide(*pair)) for pair in zip(self.rows, other.rows, strict=True)]

    def layer_norms(self) -> list[Tensor]:
        """The norms of layers, (n,) for each family."""
        return [torch.linalg.vector_norm(x, dim=1, dtype=at_least_single([x])) for x in self.rows]

    def multiply_layers_(self, factors: Sequence[float]) -> None:
        """Multiply each layer by a number; by zero it is zero, whatever it was."""
        layers = [x for rows in self.rows for x in rows.unbind()]
        zero = [x for x, factor in zip(layers, factors, strict=True) if not factor]
        for x in zero:
            x.zero_()
        left = iter(factors)
        for own in by_device(layers):
            torch._foreach_mul_(own, [next(left) for _ in own])


def of_states(
    layout: Layout, key: str, states: Mapping[str, dict[str, Any]], trained: Named, kept: LayerVector | None
) -> LayerVector:
    """Entries of the states of parameters, zeros where there are none.

    They are `kept`, of the last step, unless a user, a checkpoint or another layout has replaced it.
    """
    known = [states[name].get(key) for name in layout.names]
    if kept is not None and kept.layout is layout and all(map(_is_view, known, kept.views.values())):
        return kept
    own = [trained[name] for name in layout.names]
    found = [to_local(torch.zeros_like(p) if x is None else x) for x, p in zip(known, own, strict=True)]
    return LayerVector.of(layout, dict(zip(layout.names, found, strict=True)))


def to_states(vector: LayerVector, key: str, states: Mapping[str, dict[str, Any]], trained: Named) -> None:
    """Put a vector in the states of its parameters."""
    for name, view in vector.views.items():
        states[name][key] = to_sharded(view, trained[name])


def _is_view(known: Any, view: Tensor) -> bool:
    return known is view or (known is not None and is_sharded(known) and known.to_local().data_ptr() == view.data_ptr())


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
    family = lambda shapes, layers: Family(tuple(layers), shapes, tuple(map(math.prod, shapes)))
    runs = {own: tuple(itertools.starmap(family, of.items())) for own, of in found.items()}
    devices = list(dict.fromkeys(device for device, _, _ in runs))
    return Layout(tuple(runs[own] for own in sorted(runs, key=lambda own: devices.index(own[0]))))


def joined(numbers: Sequence[Tensor], home: torch.device) -> Tensor:
    """Numbers (n,) or () one after the other, on one device and in its widest precision."""
    return widen(torch.hstack([x if x.device == home else x.to(home) for x in numbers]))


def inner(one: Tensor, other: Tensor) -> Tensor:
    """The product of tensors of one shape, in single precision at least, in parts: BLAS counts to 2^31 entries."""
    one, other = one.flatten(), other.flatten()
    if len(one) <= MOST_ENTRIES:
        return torch.dot(*_wide(one, other))
    parts = zip(one.split(MOST_ENTRIES), other.split(MOST_ENTRIES), strict=True)
    return torch.stack([torch.dot(*_wide(*pair)) for pair in parts]).sum()


def _wide(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    dtype = at_least_single([one])
    return (one, other) if one.dtype == other.dtype == dtype else (one.to(dtype), other.to(dtype))


def at_least_single(tensors: Iterable[Tensor]) -> torch.dtype:
    """The precision to sum in."""
    return torch.float64 if torch.float64 in {x.dtype for x in tensors} else torch.float32
