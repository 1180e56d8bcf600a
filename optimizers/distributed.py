"""Processes of torch.distributed that train one model: what they tell each other, and who decomposes what."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from curvature import Injection
from curvature.preconditioners import Block
from curvature.recording import unwrapped
from optimizers.base import check_range

BUCKET = 1 << 23  # entries of a flat buffer that is sent at once
ALIKE = 1e-3  # relative difference of gradients that should be the same on all processes


@dataclass(frozen=True)
class Distributed:
    """How processes that train one model, each on its part of the batch, share the work on the curvature.

    Args:
        group: the processes; None: all of them, once torch.distributed is initialised. A group that holds this process
            alone makes it train alone.
        gradient_worker_fraction: part of the processes that keep the inverse of a layer, as in KAISA
            (arXiv:2107.01739). 1: all do, and an ordinary step needs no communication. 1/size: only the process that
            made it, which then sends the preconditioned gradients to all others at every step. In between: groups of
            ``fraction * size`` processes, which must divide their number. Below 1 a ``state_dict`` has the inverses of
            its own process; after it is loaded all are made anew.

    Raises:
        TypeError, ValueError: an argument of the wrong kind or out of range, by name.
    """

    group: Any = None
    gradient_worker_fraction: float = 1.0

    def __post_init__(self) -> None:
        check_range("gradient_worker_fraction", self.gradient_worker_fraction, 0.0, 1.0)
        if self.group is not None and not isinstance(self.group, dist.ProcessGroup):
            raise TypeError(f"group: expected a process group of torch.distributed, found {self.group!r:.80}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Distributed:
        return self  # a process group is a thing of the outside world


def trained_by(model: Any, distributed: Distributed | None) -> tuple[Any, Distributed]:
    """The user's own module, and the processes that train it."""
    config = Distributed() if distributed is None else distributed
    if not isinstance(config, Distributed):
        raise TypeError(f"distributed: expected optimizers.Distributed(...), found {distributed!r:.80}")
    model = unwrapped(model)
    if isinstance(model, DistributedDataParallel):
        if config.group is None:
            config = Distributed(model.process_group, config.gradient_worker_fraction)
        model = unwrapped(model.module)
    return model, config


class Processes:
    """Those that train one model; one alone where torch.distributed is not in use. Collective calls are for all."""

    def __init__(self, config: Distributed, device: torch.device) -> None:
        self.device = device
        self.rank, self.size = 0, 1
        self.is_alone = not (dist.is_available() and dist.is_initialized())
        if not self.is_alone:
            self.given = dist.group.WORLD if config.group is None else config.group
            self.rank, self.size = dist.get_rank(self.given), dist.get_world_size(self.given)
            self.ranks = dist.get_process_group_ranks(self.given)

    @functools.cached_property
    def group(self) -> Any:
        """Our own, so that the order relative to the user's collectives does not matter; made at the first use."""
        return self.part(range(self.size))

    def part(self, ranks: Iterable[int]) -> Any:
        """A group of some of the processes, made by these."""
        chosen = [self.ranks[rank] for rank in ranks]
        timeout = _timeout_of(self.given, self.device)
        return dist.new_group(chosen, use_local_synchronization=True, timeout=timeout)

    def objects(self, own: Any, group: Any = None) -> list[Any]:
        """What every process gives, by rank."""
        if self.size == 1:
            return [own]
        group = self.group if group is None else group
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, own, group=group)
        return found

    def mean(self, x: Tensor) -> Tensor:
        """The mean over all processes, the same bits on each."""
        if self.size == 1:
            return x
        total = x.to(self.device, copy=True)
        dist.all_reduce(total, group=self.group)
        return (total / self.size).to(x.device)

    def joined(self, x: Tensor) -> Tensor:
        """What every process has along the first axis, one after the other."""
        return x if self.size == 1 else torch.cat([own.to(self.device) for own in self.objects(x.cpu())])

    def largest(self, numbers: Sequence[float]) -> list[float]:
        found = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        if self.size > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return found.tolist()

    def total(self, tensors: Sequence[Tensor], group: Any) -> Callable[[], list[Tensor]]:
        """Begin to add tensors up over a group of all processes, in flat buffers; the function waits for the sums."""
        parts: list[tuple[list[int], Tensor, Any]] = []
        for dtype in dict.fromkeys(x.dtype for x in tensors):
            alike = [k for k, x in enumerate(tensors) if x.dtype == dtype]
            flat = torch.cat([tensors[k].reshape(-1) for k in alike])
            works = [dist.all_reduce(x, group=group, async_op=True) for x in flat.split(BUCKET)]
            parts.append((alike, flat, works))

        def wait() -> list[Tensor]:
            found: list[Any] = [None] * len(tensors)
            for alike, flat, works in parts:
                for work in works:
                    work.wait()
                for k, x in zip(alike, flat.split([tensors[k].numel() for k in alike]), strict=True):
                    found[k] = x.reshape(tensors[k].shape).clone()  # not to hold the whole buffer
            return found

        return wait

    def check_alike(self, gradients: Mapping[str, Tensor]) -> None:
        """
        Raises:
            RuntimeError: the gradients are not the same everywhere; on all processes.
        """
        if self.size == 1:
            return
        own = float(torch.stack([g.detach().double().square().sum() for g in gradients.values()]).sum())
        most, least = self.largest([own, -own])
        if most + least > ALIKE * most:
            raise RuntimeError(
                f"gradients differ between the {self.size} processes (squared norms from {-least:.6g} to {most:.6g}): "
                "wrap the model in DistributedDataParallel or average them before step(); for models that are trained "
                "apart pass distributed=Distributed(group=...), a group of this process alone"
            )


def _timeout_of(group: Any, device: torch.device) -> Any:
    """How long the user's own group waits for a process that is gone; None: the default."""
    try:
        return group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return None


@dataclass(frozen=True)
class Slot:
    """A tensor that comes apart from what it belongs to, its axes in the order in which they lie in memory."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(x: Tensor) -> Slot:
        order = x.dim_order()
        return Slot(tuple(x.permute(order).shape), order, x.dtype)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def flat(self, x: Tensor) -> Tensor:
        return x.permute(self.order).reshape(-1)

    def filled(self, flat: Tensor) -> Tensor:
        """The tensor, of memory of its own: in another order than before, products with it may cost a copy."""
        return flat.clone().view(self.shape).permute([self.order.index(k) for k in range(len(self.order))])


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
        """The group of those that keep what this process keeps."""
        size, start = self.processes.size, self.processes.rank // self.width * self.width
        return self.processes.group if self.width == size else self.processes.part(range(start, start + self.width))

    @functools.cached_property
    def across(self) -> Any:
        """The group of one process of each group of keepers."""
        return self.processes.part(range(self.processes.rank % self.width, self.processes.size, self.width))

    def assign(self, blocks: Sequence[Block]) -> None:
        """Give each new block to the process with the least work in the group with the least, cheap ones to all.

        In their order, which is that of their turns: those whose turns are together go to different processes.
        """
        group = lambda rank: sum(self.loads[rank // self.width * self.width :][: self.width])
        for block in blocks:
            if block.handed_on and block.names[0] not in self.owners:
                owner = min(range(len(self.loads)), key=lambda rank: (group(rank), self.loads[rank]))
                self.owners[block.names[0]] = owner
                self.loads[owner] += block.cost

    def makes(self, block: Block) -> bool:
        """Whether this process decomposes a block."""
        return self.owners.get(block.names[0], self.processes.rank) == self.processes.rank

    def keeps(self, block: Block) -> bool:
        """Whether this process has the inverse of a block."""
        return self.owners.get(block.names[0], self.processes.rank) // self.width == self.processes.rank // self.width

    def is_ready(self, block: Block) -> bool:
        """Whether the processes that keep a block can solve with it: all give the same answer."""
        return (
            block.is_ready if self.width == self.processes.size or not block.handed_on else block.names[0] in self.made
        )

    def exchange(self, blocks: Sequence[Block]) -> None:
        """Send what was made of blocks to the others that keep them."""
        shared = [b for b in blocks if b.handed_on]
        self.made |= {b.names[0] for b in shared}
        if self.width == 1 or not shared:
            return
        own = self.processes.rank
        start = own - own % self.width
        mine = [b for b in shared if self.owners[b.names[0]] == own]
        results = {b.names[0]: b.results() for b in mine}
        slots = pytree.tree_map_only(Tensor, Slot.of, results)
        named = {b.names[0]: b for b in shared}
        for source, theirs in enumerate(self.processes.objects(slots, self.keepers), start):
            leaves, form = pytree.tree_flatten(theirs)
            sent = [x for x in pytree.tree_leaves(results) if isinstance(x, Tensor)] if source == own else None
            tensors = iter(self._broadcast([x for x in leaves if isinstance(x, Slot)], sent, source, self.keepers))
            filled = [next(tensors) if isinstance(x, Slot) else x for x in leaves]
            for name, result in pytree.tree_unflatten(filled, form).items():
                named[name].adopt(result)  # its own, too: other strides would give products other last bits

    def _broadcast(self, slots: Sequence[Slot], own: Sequence[Tensor] | None, source: int, group: Any) -> list[Tensor]:
        """Tensors of these forms, from the process that has them."""
        found: list[Any] = [None] * len(slots)
        for dtype in dict.fromkeys(slot.dtype for slot in slots):
            alike = [k for k, slot in enumerate(slots) if slot.dtype == dtype]
            sizes = [slots[k].size for k in alike]
            if own is None:
                flat = torch.empty(sum(sizes), dtype=dtype, device=self.processes.device)
            else:
                flat = torch.cat([slots[k].flat(own[k]) for k in alike])
            dist.broadcast(flat, self.processes.ranks[source], group=group)
            for k, x in zip(alike, flat.split(sizes), strict=True):
                found[k] = slots[k].filled(x)
        return found

    def gathered(self, blocks: Sequence[Block], found: dict[str, Tensor], right: Mapping[str, Tensor]) -> None:
        """Complete the solutions found here by those of the blocks that other processes keep."""
        if self.width == self.processes.size:
            return
        column = self.processes.rank % self.width
        for first in range(0, self.processes.size, self.width):
            theirs = [b for b in blocks if b.handed_on and self.owners[b.names[0]] // self.width == first // self.width]
            names = [name for b in theirs for name in b.names]
            slots = [Slot.of(right[n].contiguous()) for n in names]
            is_here = first // self.width == self.processes.rank // self.width
            own = [found[n] for n in names] if is_here else None
            if names:
                found |= dict(zip(names, self._broadcast(slots, own, first + column, self.across), strict=True))


def rows_of_whole(
    inject: Injection, output: Tensor, loss: Any, target: Any, processes: Processes, seed: Callable[[], int]
) -> Tensor:
    """Vectors (k, N, ...) for this process's part of the batch, random ones as one process draws them for the whole.

    The parts are taken to be of one size, in the order of the processes. Where the whole would be large, each process
    draws its own.
    """
    if not inject.is_random:
        return inject.vectors(output, loss, target)
    rank, size = processes.rank, processes.size
    generator = torch.Generator(output.device)
    draw = lambda x, y, seed: inject.vectors(x, loss, y, generator=generator.manual_seed(seed))
    if size == 1:
        return draw(output, target, seed())
    if size * output.numel() * inject.number(output, len(output)) > BUCKET:
        return draw(output, target, seed() + rank)
    repeated = lambda x: x.repeat(size, *[1] * (x.ndim - 1)) if isinstance(x, Tensor) and x.ndim else x
    found = draw(repeated(output), repeated(target), seed())
    return found[:, rank * len(output) : (rank + 1) * len(output)]
