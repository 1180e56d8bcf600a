"""The processes that train a model together: who decomposes which block, and the sums of their statistics.

Statistics are all-reduced at renewals, and inverses broadcast (arXiv:2107.01739, each process keeping all of them).
"""

from __future__ import annotations

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
        self.workers = Workers(self.processes)
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

    def summed(self, measured: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
        """Sums over all processes of what they have measured; zeros where none has."""
        self.layout = self._agree_on(self.layout | {key: (tuple(x.shape), x.dtype) for key, x in measured.items()})
        zeros = lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=self.device)
        each = [measured[key] if key in measured else zeros(*form) for key, form in self.layout.items()]
        return dict(zip(self.layout, self.processes.all_reduce_sums(each), strict=True))

    def _agree_on(self, ours: Layout) -> Layout:
        """The union of the layouts in one order; makes missing blocks."""
        mark = float(zlib.crc32(repr(ours).encode()))
        most, least = self.processes.all_reduce_max([mark, -mark])
        if most == -least:
            return ours
        blocks = [block.empty_like().state() for block in self.store.summed_blocks()]
        union: Layout = {}
        states: dict[str, Any] = {}
        for layout, others in self.processes.all_gather_objects((ours, blocks)):
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
    """Which process decomposes which block; all others get the result from it."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.owners: dict[str, int] = {}
        self.loads = [0.0] * processes.size

    def assign(self, blocks: Sequence[Block]) -> None:
        """Assign each new block to the least loaded process; cheap blocks go to all."""
        for block in blocks:
            if block.broadcast_fields and block.names[0] not in self.owners:
                owner = min(range(len(self.loads)), key=self.loads.__getitem__)
                self.owners[block.names[0]] = owner
                self.loads[owner] += block.cost

    def makes(self, block: Block) -> bool:
        """Whether this process decomposes a block."""
        return self.owners.get(block.names[0], self.processes.rank) == self.processes.rank

    def exchange(self, blocks: Sequence[Block]) -> None:
        """Broadcast new inverses to all other processes."""
        shared = [b for b in blocks if b.broadcast_fields]
        if self.processes.size == 1 or not shared:
            return
        rank = self.processes.rank
        results = {b.names[0]: b.results() for b in shared if self.owners[b.names[0]] == rank}
        slots = pytree.tree_map_only(Tensor, TensorForm.of, results)
        named = {b.names[0]: b for b in shared}
        for source, theirs in enumerate(self.processes.all_gather_objects(slots)):
            leaves, form = pytree.tree_flatten(theirs)
            sent = [x for x in pytree.tree_leaves(results) if isinstance(x, Tensor)] if source == rank else None
            tensors = iter(self._broadcast([x for x in leaves if isinstance(x, TensorForm)], sent, source))
            filled = [next(tensors) if isinstance(x, TensorForm) else x for x in leaves]
            for name, result in pytree.tree_unflatten(filled, form).items():
                named[name].load_results(result)  # even its own: other strides could change last bits

    def _broadcast(self, slots: Sequence[TensorForm], sent: Sequence[Tensor] | None, source: int) -> list[Tensor]:
        """Broadcast tensors from `source`; all other processes pass None and get copies of these forms."""
        processes = self.processes
        if sent is None:
            flat = [torch.empty(math.prod(x.shape), dtype=x.dtype, device=processes.device) for x in slots]
        else:
            flat = [slot.flat(x) for slot, x in zip(slots, sent, strict=True)]
        received = in_flat_buffers(flat, lambda x: dist.broadcast(x, processes.ranks[source], group=processes.group))
        return [slot.filled(x) for slot, x in zip(slots, received, strict=True)]
