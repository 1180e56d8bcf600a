"""The processes that train one model: collectives, sums of what they measured, who decomposes which block.

Statistics are all-reduced at renewals, and inverses broadcast (arXiv:2107.01739, each process keeping all of them).
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from curvature.linalg import read, stack, widen, widest
from curvature.losses import Injection
from curvature.preconditioners import Block, CurvatureStatistics, CurvatureStore, SquaredChange
from curvature.recording import unwrap_compiled

BUCKET_ENTRIES = 1 << 23  # largest flat buffer of one collective
GRADIENT_TOLERANCE = 1e-3  # relative difference of squared gradient norms that should be equal on all processes


@dataclass(frozen=True)
class Distributed:
    """How processes that train one model, each on its part of the batch, share the work on the curvature.

    Args:
        group: the processes; None: all of them, once torch.distributed is initialised. With a group of this process
            alone, it trains alone.

    Raises:
        TypeError: `group` is no process group.
    """

    group: Any = None

    def __post_init__(self) -> None:
        if self.group is not None and not isinstance(self.group, dist.ProcessGroup):
            raise TypeError(f"group: expected a process group of torch.distributed, found {self.group!r:.80}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Distributed:
        return self  # process groups cannot be copied


def unwrap_data_parallel(model: Any, distributed: Distributed | None) -> tuple[Any, Distributed]:
    """The user's own module, without wrappers, and the processes that train it."""
    config = Distributed() if distributed is None else distributed
    if not isinstance(config, Distributed):
        raise TypeError(f"distributed: expected optimizers.Distributed(...), found {distributed!r:.80}")
    model = unwrap_compiled(model)
    if isinstance(model, DistributedDataParallel):
        if config.group is None:
            config = Distributed(model.process_group)
        model = unwrap_compiled(model.module)
    return model, config


class Processes:
    """The processes that train one model; a single one without torch.distributed. All must call each collective."""

    def __init__(self, config: Distributed, device: torch.device) -> None:
        self.device = device
        self.rank, self.size = 0, 1
        self.is_alone = not (dist.is_available() and dist.is_initialized())
        if not self.is_alone:
            self.given: Any = dist.group.WORLD if config.group is None else config.group
            self.rank, self.size = dist.get_rank(self.given), dist.get_world_size(self.given)
            self.ranks = dist.get_process_group_ranks(self.given)

    @functools.cached_property
    def group(self) -> Any:
        """A group of our own, so that the order relative to the user's collectives does not matter; made lazily."""
        return self.new_group()

    @functools.cached_property
    def host_group(self) -> Any:
        """The same processes, for tensors on the CPU where there is a way, so that nobody waits for an accelerator."""
        is_known = "gloo" in dist.get_backend(self.group) or not dist.is_gloo_available()
        return self.group if is_known else self.new_group("gloo")

    def new_group(self, backend: str | None = None) -> Any:
        """A new group of these processes, with the timeout of the user's; only they take part in making it."""
        try:
            timeout = self.given._get_backend(self.device).options._timeout
        except (AttributeError, RuntimeError):
            timeout = None  # the default
        return dist.new_group(self.ranks, backend=backend, use_local_synchronization=True, timeout=timeout)

    def all_gather_objects(self, ours: Any) -> list[Any]:
        """The objects of all processes, several, by rank."""
        objects: list[Any] = [None] * self.size
        dist.all_gather_object(objects, ours, group=self.group)
        return objects

    def all_reduce_mean(self, x: Tensor) -> Tensor:
        """The mean over all processes, the same bits on each."""
        if self.size == 1:
            return x
        total = x.to(self.device, copy=True)
        dist.all_reduce(total, group=self.group)
        return (total / self.size).to(x.device)

    def agreed(self, x: Tensor) -> Tensor:
        """That of the first process, on all."""
        if self.size > 1:
            x = x.to(self.device, copy=True)
            dist.broadcast(x, self.ranks[0], group=self.group)
        return x

    def read(self, facts: Any) -> Any:
        """`curvature.linalg.read` of the facts of the first process, on all."""
        if self.size > 1:
            leaves, form = pytree.tree_flatten(facts)
            send = lambda flat: dist.broadcast(flat, self.ranks[0], group=self.group)
            facts = pytree.tree_unflatten(in_flat_buffers([x.to(self.device) for x in leaves], send), form)
        return read(facts)

    def concatenated(self, x: Tensor) -> Tensor:
        """The tensors of all processes, concatenated along the first axis in the order of ranks."""
        return x if self.size == 1 else torch.cat([part.to(self.device) for part in self.all_gather_objects(x.cpu())])

    def all_reduce_max(self, numbers: Sequence[float]) -> list[float]:
        if self.size == 1:
            return list(numbers)
        largest = torch.tensor(numbers, dtype=widest(torch.device(self.device).type), device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return largest.tolist()

    def all_reduce_sums(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sums over all processes."""

        def reduce(flat: Tensor) -> None:
            for work in [dist.all_reduce(x, group=self.group, async_op=True) for x in flat.split(BUCKET_ENTRIES)]:
                work.wait()

        return in_flat_buffers(tensors, reduce)

    def require_gradients_of_all(self, owner: str, is_here: bool) -> None:
        """Raise on all processes where some have gradients and others have none at all, which would not go on alike."""
        if self.size == 1:
            return
        is_on_host = "gloo" in dist.get_backend(self.host_group)
        lacks = torch.zeros(self.size, device="cpu" if is_on_host else self.device)
        lacks[self.rank] = float(not is_here)
        dist.all_reduce(lacks, group=self.host_group)
        left = [rank for rank, lack in enumerate(lacks.tolist()) if lack]
        if 0 < len(left) < self.size:
            raise RuntimeError(
                f"{owner}.step: no parameter has a gradient on rank {', '.join(map(str, left))} of the {self.size} "
                "processes that train together, and on the others some have; average the gradients before step(), with "
                "zeros where a process has no samples, or give models that are trained apart "
                "distributed=Distributed(group=...), a group of this process alone"
            )

    def check_same_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        """Raise on all processes where gradients differ between them."""
        norm_squared = float(stack(widen(g.detach()).square().sum() for g in gradients.values()).sum())
        most, least = self.all_reduce_max([norm_squared, -norm_squared])
        if most + least > GRADIENT_TOLERANCE * most:
            raise RuntimeError(
                f"gradients differ between the {self.size} processes (squared norms from {-least:.6g} to {most:.6g}): "
                "wrap the model in DistributedDataParallel or average them before step(); for models that are trained "
                "apart pass distributed=Distributed(group=...), a group of this process alone"
            )


def in_flat_buffers(tensors: Sequence[Tensor], collective: Callable[[Tensor], Any]) -> list[Tensor]:
    """The tensors after a collective, in place, of all of one dtype as one buffer."""
    results: list[Any] = [None] * len(tensors)
    for dtype in dict.fromkeys(x.dtype for x in tensors):
        alike = [k for k, x in enumerate(tensors) if x.dtype == dtype]
        flat = torch.cat([tensors[k].reshape(-1) for k in alike])
        collective(flat)
        for k, x in zip(alike, flat.split([tensors[k].numel() for k in alike]), strict=True):
            results[k] = x.reshape(tensors[k].shape).clone()  # so that the buffer can be freed
    return results


def vectors_of_global_batch(
    inject: Injection, output: Tensor, loss: Any, target: Any, processes: Processes, seed: Callable[[], int]
) -> Tensor:
    """This process's slice (k, N, ...) of the vectors that one would draw for all; of a large batch, its own."""
    if not inject.is_random:
        return inject.vectors(output, loss, target)
    rank, size = processes.rank, processes.size
    generator = torch.Generator(output.device)
    draw = lambda x, y, seed: inject.vectors(x, loss, y, generator=generator.manual_seed(seed))
    if size == 1:
        return draw(output, target, seed())
    if size * output.numel() * inject.number(output, len(output)) > BUCKET_ENTRIES:
        return draw(output, target, seed() + rank)
    repeated = lambda x: x.repeat(size, *[1] * (x.ndim - 1)) if isinstance(x, Tensor) and x.ndim else x
    vectors = draw(repeated(output), repeated(target), seed())
    return vectors[:, rank * len(output) : (rank + 1) * len(output)]


ALONG = "along"  # name of what `CurvatureStatistics.along` has
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

    def add_up(self, measured: CurvatureStatistics) -> None:
        """Replace all by what all processes have measured; sums by name of block ("" for the outputs) and of sum."""
        processes = self.processes
        self.store.gather(measured, processes.all_gather_objects)
        each = {name: block.sums(processes.rank, processes.size) for name, block in measured.blocks.items()}
        sums = {(name, k): x for name, block in each.items() for k, x in block.items()}
        sums |= {("", k): x for k, x in measured.outputs.items()}
        if (along := measured.along).blocks:  # of which there is only that they were reached
            sums |= {("", ALONG): along.value} | {(name, ALONG): along.value.new_zeros(0) for name in along.blocks}
        sums = self.summed(sums)
        measured.blocks = self.store.statistics_from({k: x for k, x in sums.items() if k[0] and k[1] != ALONG})
        measured.outputs = {k: x for (name, k), x in sums.items() if not name and k != ALONG}
        if ("", ALONG) in sums:
            reached = frozenset(name for name, k in sums if name and k == ALONG)
            measured.along = SquaredChange(sums["", ALONG], reached)

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


def form_of(x: Tensor) -> Tensor:
    """Shape, memory order and dtype of a tensor, sent ahead so that others can receive its entries."""
    return x.to("meta")


def match_layout(x: Tensor, form: Tensor) -> Tensor:
    """A copy in the memory order of a form: in another order products might copy it again and again."""
    return torch.empty_like(form, device=x.device).copy_(x)


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
        forms = pytree.tree_map_only(Tensor, form_of, results)
        named = {b.names[0]: b for b in shared}
        for source, theirs in enumerate(self.processes.all_gather_objects(forms)):
            whole = results if source == rank else pytree.tree_map_only(Tensor, self._empty, theirs)
            sent = [x for x in pytree.tree_leaves(whole) if isinstance(x, Tensor)]
            received = iter(in_flat_buffers(sent, functools.partial(self._broadcast, source)))
            leaves, form = pytree.tree_flatten(theirs)
            filled = [match_layout(next(received), x) if isinstance(x, Tensor) else x for x in leaves]
            for name, result in pytree.tree_unflatten(filled, form).items():
                named[name].load_results(result)  # even its own: other strides could change last bits

    def _empty(self, form: Tensor) -> Tensor:
        return torch.empty_like(form, device=self.processes.device)

    def _broadcast(self, source: int, flat: Tensor) -> None:
        dist.broadcast(flat, self.processes.ranks[source], group=self.processes.group)
