"""Tensors of many layers as few: layers of one form are the rows of one matrix, so that a step takes few calls."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvature.linalg import by_device
from optimizers.distributed.sharding import to_local, to_sharded

Named = Mapping[str, Tensor]
Layer = tuple[str, ...]  # names of its parameters


@dataclass(frozen=True)
class Family:
    """Layers of one form.

    Attributes:
        layers: the names of their parameters.
        shapes: of the parameters of a layer; of their local shards, where they are sharded.
    """

    layers: tuple[Layer, ...]
    shapes: tuple[tuple[int, ...], ...]

    @functools.cached_property
    def names(self) -> list[str]:
        """All parameters, layer by layer."""
        return [name for layer in self.layers for name in layer]

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Numbers of entries of a layer's parameters."""
        return [math.prod(shape) for shape in self.shapes]

    def rows(self, tensors: Named) -> Tensor:
        """One row (n, d) for each layer: in the memory that the tensors are `views` of, or a copy."""
        found = [tensors[name] for name in self.names]
        whole = found[0]._base
        if whole is None or not self._fill(whole, found):
            whole = torch.cat([x.reshape(-1) for x in found]) if len(found) > 1 else found[0].reshape(-1)
        return whole.view(len(self.layers), -1)

    def _fill(self, whole: Tensor, tensors: Sequence[Tensor]) -> bool:
        """Whether these are all of its memory, in order."""
        if whole.numel() != len(self.layers) * sum(self.sizes) or not whole.is_contiguous():
            return False
        starts = itertools.accumulate(itertools.cycle(self.sizes), initial=0)
        parts = zip(tensors, starts, strict=False)
        return all(x._base is whole and x.storage_offset() == start and x.is_contiguous() for x, start in parts)

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """The tensors whose entries rows (n, d) hold, in their memory."""
        return dict(zip(self.names, pieces(rows, self.shapes), strict=True))


def pieces(rows: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Tensors of these shapes one after the other from each of the rows, in their memory."""
    parts = rows.split([math.prod(shape) for shape in shapes], 1)
    columns = [part.view(len(rows), *shape).unbind() for part, shape in zip(parts, shapes, strict=True)]
    return [x for row in zip(*columns, strict=True) for x in row]


class Stack(Mapping[str, Tensor]):
    """Tensors by name, of all families.

    Attributes:
        rows: for each family, of which the tensors are views.
    """

    def __init__(self, families: Sequence[Family], rows: Sequence[Tensor]) -> None:
        self.families, self.rows = families, list(rows)

    @staticmethod
    def of(families: Sequence[Family], tensors: Named) -> Stack:
        return Stack(families, [family.rows(tensors) for family in families])

    def like(self, tensors: Named) -> Stack:
        """Other tensors of the same names."""
        return Stack.of(self.families, tensors)

    def state(self, key: str, states: Mapping[str, dict[str, Any]], trained: Named) -> Stack:
        """Entries of states, zeros where there are none; the states refer to the memory of this stack from then on."""
        return Stack(self.families, [_state_rows(family, key, states, trained) for family in self.families])

    @functools.cached_property
    def views(self) -> dict[str, Tensor]:
        parts = (family.views(rows) for family, rows in zip(self.families, self.rows, strict=True))
        return {name: x for part in parts for name, x in part.items()}

    @property
    def layers(self) -> list[Layer]:
        """In the order of all rows."""
        return [layer for family in self.families for layer in family.layers]

    @property
    def first_layers(self) -> list[Layer]:
        """Of each family: what holds for it holds for all."""
        return [family.layers[0] for family in self.families]

    def __getitem__(self, name: str) -> Tensor:
        return self.views[name]

    def __iter__(self) -> Iterator[str]:
        return itertools.chain.from_iterable(family.names for family in self.families)

    def __len__(self) -> int:
        return sum(len(family.names) for family in self.families)


def families(layers: Iterable[Layer], tensors: Named, kind: Callable[[str], Hashable]) -> list[Family]:
    """Layers with tensors of the same shapes, and of the same `kind`; parameters of different kinds are apart."""
    found: dict[Any, list[Layer]] = {}
    for whole in layers:
        kinds = {name: (kind(name), tensors[name].dtype, tensors[name].device) for name in whole}
        for own, names in itertools.groupby(whole, kinds.__getitem__):
            layer = tuple(names)
            found.setdefault((own, tuple(tuple(tensors[name].shape) for name in layer)), []).append(layer)
    made = [Family(tuple(own), shapes) for (_, shapes), own in found.items()]
    devices = list(dict.fromkeys(tensors[family.names[0]].device for family in made))
    return sorted(made, key=lambda family: devices.index(tensors[family.names[0]].device))  # in runs of one device


def _state_rows(family: Family, key: str, states: Mapping[str, dict[str, Any]], trained: Named) -> Tensor:
    known = {name: states[name].get(key) for name in family.names}
    found = {name: torch.zeros_like(trained[name]) if x is None else x for name, x in known.items()}
    rows, first = family.rows({name: to_local(x) for name, x in found.items()}), to_local(found[family.names[0]])
    if any(x is None for x in known.values()) or rows.data_ptr() != first.data_ptr():
        for name, view in family.views(rows).items():
            states[name][key] = to_sharded(view, trained[name])
    return rows


# -- what a step asks of rows: one number for each, on the device `home`


def row_squares(rows: Sequence[Tensor], home: torch.device) -> Tensor:
    """The squared norm of each row, in single precision."""
    norms = [torch.linalg.vector_norm(x, dim=1, dtype=at_least_single([x])) for x in rows]
    return torch.cat([x.to(home) for x in norms]).square().float()


def row_products(ones: Sequence[Tensor], others: Sequence[Tensor], home: torch.device) -> Tensor:
    """The inner product of each row of one with that of the other, in single precision."""
    found = [torch.linalg.vecdot(*_wide(*pair)) for pair in zip(ones, others, strict=True)]
    return torch.cat([x.to(home, torch.float32) for x in found])


def products(ones: Sequence[Tensor], others: Sequence[Tensor], home: torch.device) -> Tensor:
    """The sum of the inner products of all rows of each family, in single precision."""
    pairs = ([x.view(-1) for x in _wide(*pair)] for pair in zip(ones, others, strict=True))
    return torch.stack([torch.dot(*pair).to(home, torch.float32) for pair in pairs])


def scaled(rows: Sequence[Tensor], factor: Tensor) -> list[Tensor]:
    """All rows times a scalar."""
    return [x for own in by_device(rows) for x in torch._foreach_mul(own, factor.to(own[0]))]


def scale_(rows: Sequence[Tensor], factor: Tensor) -> None:
    """`scaled`, in place."""
    for own in by_device(rows):
        torch._foreach_mul_(own, factor.to(own[0]))


def _wide(one: Tensor, other: Tensor) -> list[Tensor]:
    return [x.to(at_least_single([one])) for x in (one, other)]


def at_least_single(tensors: Iterable[Tensor]) -> torch.dtype:
    """The precision to sum in."""
    return torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32
