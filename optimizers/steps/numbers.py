"""Options of the parameter groups as numbers on the device, where a CUDA graph that replays a step reads new ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from curvature.linalg import to_device
from optimizers.steps.updates import kept_by_decay

FIELDS = "lr", "kept", "fresh", "damping"  # of a group: weight decay keeps `kept`, momentum takes `fresh` of a gradient


class Numbers:
    """The numbers of all parameter groups on one device, always in the same memory.

    Attributes:
        values: the largest lr, and `FIELDS` of each group.
    """

    def __init__(self) -> None:
        self.values = torch.zeros(0, device="cpu")
        self.known: list[float] = []  # what `values` holds
        self.places: dict[str, int] = {}  # group of each parameter
        self.indices: dict[tuple[int, ...], Tensor] = {}
        self.asked: set[tuple[str, ...]] = set()  # names whose numbers are taken together

    def tell(self, options: Mapping[str, Mapping[str, Any]], home: torch.device, dtype: torch.dtype) -> None:
        """Take over the options of each parameter, by name, in a precision; the host does not wait.

        Indices follow parameters that have moved to other groups: a CUDA graph is captured after that.
        """
        groups = {id(own): own for own in options.values()}
        order = {key: k for k, key in enumerate(groups)}
        before, self.places = self.places, {name: order[id(own)] for name, own in options.items()}
        found = [max(own["lr"] for own in groups.values())]
        for own in groups.values():
            found += [own["lr"], kept_by_decay(own), 1 - own.get("momentum", 0.0), own.get("damping") or 0.0]
        if (self.values.device, self.values.dtype) != (home, dtype) or self.values.numel() != len(found):
            self.values = torch.zeros(len(found), dtype=dtype, device=home)
            self.known, self.indices, before = [0.0] * len(found), {}, {}
        if found != self.known:
            self.values.zero_()
            torch._foreach_add_(self.values.unbind(), found)  # as arguments of a kernel, for which no copy waits
            self.known = found
        if self.places != before:
            self.asked = {names for names in self.asked if self.places.keys() >= set(names)}
            for names in self.asked:
                self._index_of(names)

    @property
    def lr(self) -> Tensor:
        """The largest of all groups, a scalar."""
        return self.values[0]

    def of(self, field: str, name: str) -> Tensor:
        """A number of a parameter's group, a scalar."""
        return self.values[1 + len(FIELDS) * self.places[name] + FIELDS.index(field)]

    def of_all(self, field: str, names: Sequence[str]) -> Tensor:
        """That of several parameters: a scalar if they are all of one group, else one for each (n,)."""
        self.asked.add(tuple(names))
        index = self._index_of(names)
        if index is None:
            return self.of(field, names[0])
        return self.values[1:].view(-1, len(FIELDS))[:, FIELDS.index(field)][index]

    def _index_of(self, names: Sequence[str]) -> Tensor | None:
        """The groups of several parameters; None for a single group."""
        places = tuple(self.places[name] for name in names)
        return None if len(set(places)) == 1 else self.index(places)

    def index(self, places: tuple[int, ...]) -> Tensor:
        """Places as a tensor, which is sent to the device once."""
        if places not in self.indices:
            self.indices[places] = to_device(torch.tensor(places, device="cpu"), self.values.device)
        return self.indices[places]
