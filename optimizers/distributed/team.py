"""The processes that train a model together: who decomposes which block (KAISA), and the sums of their statistics.

Statistics are all-reduced at renewals, and inverses broadcast to the processes that keep them.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from curvature.preconditioners import Block, CurvatureStore
from optimizers.distributed.processes import Distributed, Processes, in_flat_buffers

Key = tuple[str, str]  # name of the block, and of the sum
Layout = dict[Key, tuple[tuple[int, ...], torch.dtype]]


class Team:
    """The processes, which of them decomposes which block, and sums over them."""

    def __init__(self, config: Distributed, device: torch.device, store: CurvatureStore) -> None:
        self.config, self.device, self.store = config, device, store
        self._set_up()

    def _set_up(self) -> None:
        self.processes = Processes(self.config, self.device)
        self.workers = Workers(self.processes, self.config.gradient_worker_fraction)
        self.layout: Layout = {}  # of the sums that all processes know

    def current(self) -> Team:
        """Itself, of the processes that there are now: torch.distributed may have been initialised, or ended."""
        if self.processes.is_alone == (dist.is_available() and dist.is_initialized()):
            self._set_up()
        return self

    def move(self, device: torch.device) -> None:
        """The model is on another device now."""
        if device != self.device:
            self.device = device
            self._set_up()

    def summed(self, own: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """Sums over all processes of what they have measured; zeros where none has."""
        self.layout = self._agreed(self.layout | {key: (tuple(x.shape), x.dtype) for key, x in own.items()})
        zeros = lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=self.device)
        each = [own[key] if key in own else zeros(*form) for key, form in self.layout.items()]
        return dict(zip(self.layout, self.processes.all_reduce_sums(each), strict=True))

    def _agreed(self, own: Layout) -> Layout:
        """The union of the layouts in one order; makes missing blocks."""
        mark = float(zlib.crc32(repr(own).encode()))
        most, least = self.processes.all_reduce_max([mark, -mark])
        if most == -least:
            return own
        blocks = [block.empty_like().state() for block in self.store.summed_blocks()]
        union: Layout = {}
        states: dict[str, Any] = {}
        for layout, others in self.processes.all_gather_objects((own, blocks)):
            for key, form in layout.items():
                if union.setdefault(key, form) != form:
                    raise RuntimeError(f"{key[0]}: the processes use it in different forms, {union[key]} and {form}")
            states |= {state["names"][0]: state for state in others if state["names"][0] not in states}
        self.store.complete(list(states.values()), self.device)
        return union


@dataclass(frozen=True)
class TensorForm:
    """Shape, memory order of the axes and dtype of a tensor, sent ahead so that others can receive its entries."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(x: Tensor) -> TensorForm:
        order = x.dim_order()
        return TensorForm(tuple(x.permute(order).shape), order, x.dtype)

    def flat(self, x: Tensor) -> Tensor:
        return x.permute(self.order).reshape(-1)

    def filled(self, flat: Tensor) -> Tensor:
        """The tensor with these entries, in its old memory order: another order could make products copy it."""
        return flat.view(self.shape).permute([self.order.index(k) for k in range(len(self.order))])


class Workers:
    """Which process decomposes which block, who keeps the result, and how the others get at what they need."""

    def __init__(self, processes: Processes, fraction: float) -> None:
        self.processes = processes
        size = processes.size
        self.width = max(1, round(fraction * size))  # processes that keep a result
        if size % self.width:
            raise ValueError(
                f"gradient_worker_fraction: {fraction} of {size} processes are {self.width}, which do not divide {size}"
            )
        self.owners: dict[str, int] = {}
        self.made: set[str] = set()  # blocks that were decomposed
        self.loads = [0.0] * size

    @functools.cached_property
    def keepers(self) -> Any:
        """The processes that keep the same inverses as this one."""
        size, start = self.processes.size, self.processes.rank // self.width * self.width
        return self.processes.group if self.width == size else self.processes.subgroup(range(start, start + self.width))

    @functools.cached_property
    def across(self) -> Any:
        """One process of each group of `keepers`."""
        return self.processes.subgroup(range(self.processes.rank % self.width, self.processes.size, self.width))

    def assign(self, blocks: Sequence[Block]) -> None:
        """Assign each new block to the least loaded process of the least loaded group; cheap blocks go to all."""
        group = lambda rank: sum(self.loads[rank // self.width * self.width :][: self.width])
        for block in blocks:
            if block.broadcast_fields and block.names[0] not in self.owners:
                owner = min(range(len(self.loads)), key=lambda rank: (group(rank), self.loads[rank]))
                self.owners[block.names[0]] = owner
                self.loads[owner] += block.cost

    def makes(self, block: Block) -> bool:
        """Whether this process decomposes a block."""
        return self.owners.get(block.names[0], self.processes.rank) == self.processes.rank

    def keeps(self, block: Block) -> bool:
        """Whether this process keeps the inverse of a block."""
        return self.owners.get(block.names[0], self.processes.rank) // self.width == self.processes.rank // self.width

    def is_ready(self, block: Block) -> bool:
        """Whether the processes that keep a block can solve with it; the answer is the same on all processes."""
        is_here = self.width == self.processes.size or not block.broadcast_fields
        return block.is_ready if is_here else block.names[0] in self.made

    def exchange(self, blocks: Sequence[Block]) -> None:
        """Broadcast new inverses to the other processes that keep them."""
        shared = [b for b in blocks if b.broadcast_fields]
        self.made |= {b.names[0] for b in shared}
        if self.width == 1 or not shared:
            return
        own = self.processes.rank
        start = own - own % self.width
        mine = [b for b in shared if self.owners[b.names[0]] == own]
        results = {b.names[0]: b.results() for b in mine}
        slots = pytree.tree_map_only(Tensor, TensorForm.of, results)
        named = {b.names[0]: b for b in shared}
        for source, theirs in enumerate(self.processes.all_gather_objects(slots, self.keepers), start):
            leaves, form = pytree.tree_flatten(theirs)
            sent = [x for x in pytree.tree_leaves(results) if isinstance(x, Tensor)] if source == own else None
            tensors = iter(
                self._broadcast([x for x in leaves if isinstance(x, TensorForm)], sent, source, self.keepers)
            )
            filled = [next(tensors) if isinstance(x, TensorForm) else x for x in leaves]
            for name, result in pytree.tree_unflatten(filled, form).items():
                named[name].load_results(result)  # even its own: other strides could change last bits

    def _broadcast(
        self, slots: Sequence[TensorForm], own: Sequence[Tensor] | None, source: int, group: Any
    ) -> list[Tensor]:
        """Broadcast tensors from `source`; all other processes pass None and get copies of these forms."""
        if own is None:
            sent = [torch.empty(math.prod(x.shape), dtype=x.dtype, device=self.processes.device) for x in slots]
        else:
            sent = [slot.flat(x) for slot, x in zip(slots, own, strict=True)]
        found = in_flat_buffers(sent, lambda flat: dist.broadcast(flat, self.processes.ranks[source], group=group))
        return [slot.filled(x) for slot, x in zip(slots, found, strict=True)]

    def gathered(self, blocks: Sequence[Block], found: dict[str, Tensor], right: Mapping[str, Tensor]) -> None:
        """Add to `found` the solutions of the blocks that other processes keep."""
        if self.width == self.processes.size:
            return
        column = self.processes.rank % self.width
        for first in range(0, self.processes.size, self.width):
            group = first // self.width
            theirs = [b for b in blocks if b.broadcast_fields and self.owners[b.names[0]] // self.width == group]
            names = [name for b in theirs for name in b.names]
            slots = [TensorForm.of(right[n].contiguous()) for n in names]
            is_here = group == self.processes.rank // self.width
            own = [found[n] for n in names] if is_here else None
            if names:
                found |= dict(zip(names, self._broadcast(slots, own, first + column, self.across), strict=True))
