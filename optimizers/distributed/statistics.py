"""What several processes have seen, added up: begun in the backward pass, ended in the step."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from curvature.preconditioners import Block
from optimizers.distributed.processes import Processes
from optimizers.distributed.workers import Workers


class Holder(Protocol):
    """What has sums to be added up over processes, as `Block`."""

    def sums(self, rank: int, size: int) -> Mapping[str, Tensor]: ...

    def take_sums(self, sums: Mapping[str, Tensor]) -> None: ...

    def discard(self) -> None: ...


Key = tuple[str, str]  # name of the holder, and of the sum
Layout = dict[Key, tuple[tuple[int, ...], torch.dtype]]


class Statistics:
    """What forward passes have added since the last renewal, added up over all processes.

    The sums that were there at the last renewal are sent as soon as the backward pass begins (`launch`); what is there
    for the first time, or came after that, follows in `finish`. Each process launches once from one `finish` to the
    next, in whichever step: not all of them need have a batch at every step, so that none may wait for it before.

    Args:
        holders: what has sums, by name.
        missing: told the states of blocks that other processes have, in an order that is the same for all.
    """

    def __init__(
        self,
        processes: Processes,
        holders: Callable[[], Mapping[str, Holder]],
        missing: Callable[[Sequence[Mapping[str, Any]], torch.device], None],
    ) -> None:
        self.processes, self.holders, self.missing = processes, holders, missing
        self.layout: Layout = {}  # that all processes know of
        self.begun: Callable[[], list[Tensor]] | None = None
        self.discard()

    @functools.cached_property
    def group(self) -> Any:
        """Apart from other collectives of a step: those come in an order of their own. Made in the first `finish`."""
        return self.processes.part(range(self.processes.size))

    def discard(self) -> None:
        """Forget what was recorded here. What is under way goes on, and all take the sum anew in `finish`."""
        self.sent: dict[Key, Tensor] = {}  # at the launch, from here
        self.left: dict[Key, Tensor] = {}  # then, to follow in `finish`
        self.is_void = self.begun is not None  # whether what was sent no longer holds

    def cut(self) -> None:
        """What is sent is no part of what can be taken out."""

    def join(self, found: None) -> None:
        """See `cut`."""

    def launch(self) -> None:
        """Begin to add up; at most once until `finish`."""
        if self.begun is not None or not self.layout:
            return
        found = self._taken()
        self.sent = {key: x for key, x in found.items() if key in self.layout}
        self.left = {key: x for key, x in found.items() if key not in self.layout}
        self.begun = self._total(self.layout, self.sent)

    def finish(self) -> None:
        """Give every holder the sums over all processes."""
        self.launch()
        totals: dict[Key, Tensor] = {}
        if self.begun is not None:
            totals = dict(zip(self.layout, self.begun(), strict=True))
        rest = self._taken()
        rest = self.left | {key: self.left[key] + x if key in self.left else x for key, x in rest.items()}
        layout, is_void = self._agreed({key: (tuple(x.shape), x.dtype) for key, x in rest.items()})
        if is_void:
            totals = dict(zip(self.layout, self._total(self.layout, self.sent)(), strict=True))
        if layout:
            for key, x in zip(layout, self._total(layout, rest)(), strict=True):
                totals[key] = totals[key] + x if key in totals else x
            self.layout |= layout
        self.begun = None
        self.discard()
        for name, holder in self.holders().items():
            holder.take_sums({key: x for (owner, key), x in totals.items() if owner == name})

    def _taken(self) -> dict[Key, Tensor]:
        """What the holders have, and they no more."""
        own = self.processes
        found: dict[Key, Tensor] = {}
        for name, holder in self.holders().items():
            found |= {(name, key): x for key, x in holder.sums(own.rank, own.size).items()}
            holder.discard()
        return found

    def _total(self, layout: Layout, found: Mapping[Key, Tensor]) -> Callable[[], list[Tensor]]:
        device = self.processes.device
        zeros = lambda key: torch.zeros(layout[key][0], dtype=layout[key][1], device=device)
        return self.processes.total([found[key] if key in found else zeros(key) for key in layout], self.group)

    def _agreed(self, own: Layout) -> tuple[Layout, bool]:
        """The union over the processes, in one order, and whether any says that what was sent no longer holds.

        Blocks that are missing here are made.
        """
        mark = float(zlib.crc32(repr(own).encode()))
        most, least, is_void = self.processes.largest([mark, -mark, float(self.is_void)])
        if most == -least:
            return own, bool(is_void)
        blocks = [holder.anew().state() for holder in self.holders().values() if isinstance(holder, Block)]
        union: Layout = {}
        states: dict[str, Any] = {}
        for layout, others in self.processes.objects((own, blocks)):
            for key, form in layout.items():
                if union.setdefault(key, form) != form:
                    raise RuntimeError(f"{key[0]}: the processes use it in different forms, {union[key]} and {form}")
            states |= {state["names"][0]: state for state in others if state["names"][0] not in states}
        self.missing(list(states.values()), self.processes.device)
        return union, bool(is_void)


@dataclass(frozen=True)
class Team:
    """The processes that train a model, and what they do together."""

    processes: Processes
    workers: Workers
    statistics: Statistics
