"""All-reduces the sums that processes have measured: starts in the backward pass, ends in the step."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from curvature.preconditioners import CurvatureStore
from optimizers.distributed.processes import Processes
from optimizers.recording.backward_passes import Passes

Key = tuple[str, str]  # name of the block, and of the sum
Layout = dict[Key, tuple[tuple[int, ...], torch.dtype]]


class Statistics:
    """Sums over all processes of what forward passes have measured since the last renewal."""

    def __init__(self, processes: Processes, passes: Passes, store: CurvatureStore) -> None:
        self.processes, self.passes, self.store = processes, passes, store
        self.layout: Layout = {}  # of the sums that all processes know
        self.begun: Callable[[], list[Tensor]] | None = None
        self.discard()

    @functools.cached_property
    def group(self) -> Any:
        """A group of its own, since other collectives of a step come in another order. Made in the first `finish`."""
        return self.processes.subgroup(range(self.processes.size))

    def discard(self) -> None:
        """Forget the local sums. A running all-reduce completes, and `finish` repeats it."""
        self.sent: dict[Key, Tensor] = {}  # local sums that `launch` sent
        self.left: dict[Key, Tensor] = {}  # local sums that `launch` left to `finish`
        self.is_void = self.begun is not None  # whether the running all-reduce is out of date

    def _taken(self) -> dict[Key, Tensor]:
        return self.passes.total.pop_sums(self.processes.rank, self.processes.size)

    def launch(self) -> None:
        """As a backward pass begins, start to send the sums that all know; `finish` sends new and late ones."""
        # once until `finish`, at any step, and without waiting: others may have no batch at a step
        if self.begun is not None or not self.layout:
            return
        found = self._taken()
        self.sent = {key: x for key, x in found.items() if key in self.layout}
        self.left = {key: x for key, x in found.items() if key not in self.layout}
        self.begun = self._total(self.layout, self.sent)

    def finish(self) -> dict[Key, Tensor]:
        """The sums over all processes."""
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
        return totals

    def _total(self, layout: Layout, found: Mapping[Key, Tensor]) -> Callable[[], list[Tensor]]:
        device = self.processes.device
        zeros = lambda key: torch.zeros(layout[key][0], dtype=layout[key][1], device=device)
        return self.processes.all_reduce_sums(
            [found[key] if key in found else zeros(key) for key in layout], self.group
        )

    def _agreed(self, own: Layout) -> tuple[Layout, bool]:
        """The union of the layouts in one order, and whether an all-reduce is out of date; makes missing blocks."""
        mark = float(zlib.crc32(repr(own).encode()))
        most, least, is_void = self.processes.all_reduce_max([mark, -mark, float(self.is_void)])
        if most == -least:
            return own, bool(is_void)
        blocks = [block.empty_like().state() for block in self.store.summed_blocks()]
        union: Layout = {}
        states: dict[str, Any] = {}
        for layout, others in self.processes.all_gather_objects((own, blocks)):
            for key, form in layout.items():
                if union.setdefault(key, form) != form:
                    raise RuntimeError(f"{key[0]}: the processes use it in different forms, {union[key]} and {form}")
            states |= {state["names"][0]: state for state in others if state["names"][0] not in states}
        self.store.complete(list(states.values()), self.processes.device)
        return union, bool(is_void)
