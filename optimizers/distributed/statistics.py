"""What several processes have seen, added up: begun in the backward pass, ended in the step."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from curvature.preconditioners import CurvatureStore
from optimizers.distributed.processes import Processes

Key = tuple[str, str]  # name of the block, and of the sum
Layout = dict[Key, tuple[tuple[int, ...], torch.dtype]]


class Statistics:
    """What forward passes have added since the last renewal, added up over all processes.

    The sums that were there at the last renewal are sent as soon as the backward pass begins (`launch`); what is there
    for the first time, or came after that, follows in `finish`. Each process launches once from one `finish` to the
    next, in whichever step: not all of them need have a batch at every step, so that none may wait for it before.

    Args:
        take: gives what was measured here and is yet to be sent, once.
        store: whose blocks these are sums of. It gets those that other processes have, in the same order everywhere.
    """

    def __init__(
        self,
        processes: Processes,
        take: Callable[[], dict[Key, Tensor]],
        store: CurvatureStore,
    ) -> None:
        self.processes, self.take, self.store = processes, take, store
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

    def launch(self) -> None:
        """Begin to add up; at most once until `finish`."""
        if self.begun is not None or not self.layout:
            return
        found = self.take()
        self.sent = {key: x for key, x in found.items() if key in self.layout}
        self.left = {key: x for key, x in found.items() if key not in self.layout}
        self.begun = self._total(self.layout, self.sent)

    def finish(self) -> dict[Key, Tensor]:
        """The sums over all processes."""
        self.launch()
        totals: dict[Key, Tensor] = {}
        if self.begun is not None:
            totals = dict(zip(self.layout, self.begun(), strict=True))
        rest = self.take()
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
        return totals

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
        blocks = [block.empty_like().state() for block in self.store.summed_blocks()]
        union: Layout = {}
        states: dict[str, Any] = {}
        for layout, others in self.processes.objects((own, blocks)):
            for key, form in layout.items():
                if union.setdefault(key, form) != form:
                    raise RuntimeError(f"{key[0]}: the processes use it in different forms, {union[key]} and {form}")
            states |= {state["names"][0]: state for state in others if state["names"][0] not in states}
        self.store.complete(list(states.values()), self.processes.device)
        return union, bool(is_void)
